from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import ConfigError
from runner.study_file.reading import override, parse_yaml, read_study, split_override


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "demo.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2", "demo.yaml: line 1, column 9: this is not YAML"),
        ("a: b: c", "demo.yaml: line 1, column 5: this is not YAML"),
        ("a: 'x", "found unexpected end of stream"),
        ("a:\n\t- 1", "demo.yaml: line 2, column 1: found a tab; indent with spaces"),
        ("a: 1\nb: 2\na: 3", "demo.yaml: line 3, column 1: found the key 'a' twice; keep one"),
        ("x: {a: 1, a: 2}", "demo.yaml: line 1, column 11: found the key 'a' twice"),
        ("a: &x [1]\nb: [*x, *x]", "line 1, column 4: found an anchor or alias"),
        ("b: *x", "line 1, column 4: found an anchor or alias"),
        ("a: !!python/object/apply:os.getcwd []", "line 1, column 4: found a tag (!)"),
        ("a: !!float abc", "line 1, column 4: found a tag (!)"),
        ("a: 1\n---\nb: 2", "found a second document (---); a study file has one"),
        ("1: 2", "line 1, column 1: found a key that is not text; put it in quotes"),
        ("no: 2", "found a key that is not text"),
        ("? [a]\n: 1", "found a key that is not text"),
        ("a: " + "[" * 5000, "found more than 20 levels of nesting"),
        ("- " * 5000, "found more than 20 levels of nesting"),
        ("a: \x07", "demo.yaml: line 1: the character '\\x07' is not allowed"),
    ],
)
def test_what_is_not_plain_yaml_is_refused_with_its_place(text: str, message: str) -> None:
    assert message in refused(text)


def test_an_anchor_bomb_is_refused_before_it_grows() -> None:
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    assert "line 1, column 5: found an anchor" in refused("\n".join(lines))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("-3", -3),
        ("0", 0),
        ("0.5", 0.5),
        (".5", 0.5),
        ("1.5e3", 1500.0),
        ("true", True),
        ("off", False),
        ("~", None),
        ("triton", "triton"),
        ("'8'", "8"),
    ],
)
def test_plain_values(text: str, value: object) -> None:
    read = parse_yaml(f"a: {text}", "demo.yaml")
    assert read == {"a": value}
    assert isinstance(read, dict)
    assert type(read["a"]) is type(value)


@pytest.mark.parametrize(
    "text", ["010", "0x10", "0b11", "1:30", "1_000", "1e3", "2024-01-01", "9" * 5000]
)
def test_odd_spellings_of_numbers_stay_text(text: str) -> None:
    assert parse_yaml(f"a: {text}", "demo.yaml") == {"a": text}


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_in_one_way(text: str) -> None:
    message = ""
    try:
        parse_yaml(text, "demo.yaml")
    except ConfigError as err:
        message = str(err)
    assert not message or message.startswith("demo.yaml:")


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "demo.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: demo\r\nsearch: {trials: 5}\r\n")
    assert read_study(path) == {"name": "demo", "search": {"trials": 5}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; a study file starts with 'name: my-study'"),
        (b"\n \n# only a comment\n", "is empty"),
        (b"- a\n- b\n", "demo.yaml: found a list, expected sections"),
        (b"demo", "demo.yaml: found the text 'demo', expected sections"),
        (b"name: caf\xe9\n", "is not UTF-8 text (line 1, byte 9); save it as UTF-8"),
        ("name: demo\n".encode("utf-16"), "is not UTF-8 text (line 1, byte 0)"),
        (b"name: demo\n\x00", "demo.yaml: line 2: the character '\\x00' is not allowed"),
        (b"a: 1\n" * 2_000_000, "has 10,000,000 bytes, a study file has at most 1,000,000"),
    ],
)
def test_a_file_that_is_no_study(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "demo.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_study(path)
    assert message in str(caught.value)


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text("name: demo\n")
    expected = {
        tmp_path / "dmeo.yaml": f"does not exist; did you mean {tmp_path / 'demo.yaml'}?",
        tmp_path / "demo": f"does not exist; did you mean {tmp_path / 'demo.yaml'}?",
        tmp_path / "nothing-alike": f"does not exist; {tmp_path} has demo.yaml",
        tmp_path / "no" / "x.yaml": f"does not exist; nor does the folder {tmp_path / 'no'}",
        tmp_path: f"is a folder, expected a study file; {tmp_path} has demo.yaml",
        Path("/dev/null"): "is not a regular file, expected a study file",
        tmp_path / ("a" * 300): "cannot be read: File name too long",
        tmp_path / "a\0b": "does not exist",
    }
    for path, message in expected.items():
        with pytest.raises(ConfigError) as caught:
            read_study(path)
        assert str(caught.value).startswith(str(path))
        assert message in str(caught.value)


DOCUMENT = {"name": "demo", "workload": {"concurrency": [1, 8]}, "baselines": [{"name": "a"}]}


@pytest.mark.parametrize(
    ("option", "changed"),
    [
        ("name=other", {"name": "other"}),
        ("workload.concurrency=[1, 2]", {"workload": {"concurrency": [1, 2]}}),
        ("workload.concurrency.1=16", {"workload": {"concurrency": [1, 16]}}),
        ("baselines.0.tp_size=8", {"baselines": [{"name": "a", "tp_size": 8}]}),
        ("slo.ttft_s.p99=0.5", {"slo": {"ttft_s": {"p99": 0.5}}}),
        ("engine.model=a=b", {"engine": {"model": "a=b"}}),
        ("name=", {"name": None}),
        (" name =x", {"name": "x"}),
    ],
)
def test_an_override_sets_one_value(option: str, changed: dict[str, object]) -> None:
    before = repr(DOCUMENT)
    assert override(DOCUMENT, [option]) == {**DOCUMENT, **changed}
    assert repr(DOCUMENT) == before


def test_later_overrides_see_earlier_ones() -> None:
    document = override({}, ["search={trials: 5, seed: 1}", "search.trials=7"])
    assert document == {"search": {"trials": 7, "seed": 1}}


def test_an_override_fills_a_section_without_content() -> None:
    assert override({"slo": None}, ["slo.ttft_s.p99=1"]) == {"slo": {"ttft_s": {"p99": 1}}}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("name", "--set name: expected section.key=value, for example search.trials=40"),
        ("=5", "expected section.key=value"),
        ("a..b=5", "expected section.key=value"),
        ("name.x=1", "--set name.x: name is the text 'demo', it has no 'x'"),
        ("workload.concurrency.2=1", "is a list of 2, expected a position from 0 to 1, found '2'"),
        ("workload.concurrency.-1=1", "expected a position from 0 to 1, found '-1'"),
        ("workload.concurrency.x.y=1", "expected a position from 0 to 1, found 'x'"),
        ("name=[1", "--set name: line 1, column 3: this is not YAML"),
    ],
)
def test_an_override_that_cannot_be_applied(option: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override(DOCUMENT, [option])
    assert message in str(caught.value)


def test_the_value_of_an_override_is_yaml() -> None:
    assert split_override("engine.kind=simulated") == ("engine.kind", "simulated")
    assert split_override("a.b={c: [1, true]}") == ("a.b", {"c": [1, True]})
