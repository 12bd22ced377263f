from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.config import dump, load_study, parse_study
from runner.errors import ConfigError
from runner.settings import StudySettings
from runner.study_file.lengths import read_lengths
from runner.trial import Lengths
from tests.study_samples import DOCUMENT, refused


@pytest.mark.parametrize(
    ("law", "lengths"),
    [
        ("300", Lengths("fixed", 300)),
        ("{uniform: [1, 300]}", Lengths("uniform", 1, 300)),
        ("{normal: [256, 64.5]}", Lengths("normal", 256.0, 64.5)),
        ("{recorded: [3, 1, 2]}", Lengths("recorded", values=(3, 1, 2))),
    ],
)
def test_laws(law: str, lengths: Lengths) -> None:
    assert (
        parse_study(DOCUMENT, [f"workload.prompt_tokens={law}"]).workload.prompt_tokens == lengths
    )


@pytest.mark.parametrize(
    ("law", "message"),
    [
        ("{}", "found no law, expected a whole number of tokens above 0, {uniform: [low, high]}, "),
        ("{uniform: [1, 2], normal: [1, 1]}", "found uniform and normal, expected a whole number"),
        (
            "{uniform: [5, 1]}",
            "workload.prompt_tokens.uniform: found [5, 1], expected [low, high] with low <= high",
        ),
        ("{uniform: [0, 1]}", "workload.prompt_tokens.uniform.0: found 0; "),
        (
            "{normal: [0, 1]}",
            (
                "workload.prompt_tokens.normal: found [0.0, 1.0], expected [mean, sd] with mean "
                ">= 1 and sd >= 0"
            ),
        ),
        ("{normal: [5, -1]}", "workload.prompt_tokens.normal: found [5.0, -1.0], expected"),
        ("{file: none.jsonl}", "workload.prompt_tokens.file: none.jsonl does not exist"),
    ],
)
def test_laws_that_are_none(law: str, message: str) -> None:
    assert refused(f"workload.prompt_tokens={law}").startswith(message)


def test_recorded_lengths_are_numbers_or_objects(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('5\n  \n{"prompt_tokens": 7, "output_tokens": 9, "note": "x"}\n')
    assert read_lengths(path, "prompt_tokens") == (5, 7)
    assert read_lengths(path, "output_tokens") == (5, 9)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0", "line 2: found 0, expected a whole number of tokens, 1 or more, or "),
        ("-5", "line 2: found -5, expected"),
        ("1.5", "line 2: found 1.5, expected"),
        ("true", "line 2: found true, expected"),
        ("null", "line 2: found nothing, expected"),
        ('"5"', "line 2: found the text '5', expected"),
        ("[5]", "line 2: found [5], expected"),
        ('{"output_tokens": 5}', 'or {"prompt_tokens": number}'),
        ("{", "line 2 is not JSON: the text '{'"),
        ("[" * 100_000, "line 2 is not JSON: the text '[["),
    ],
)
def test_a_line_that_is_no_length(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(f"5\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_lengths(path, "prompt_tokens")
    assert str(caught.value).startswith(f"{path} line 2")
    assert message in str(caught.value)


def test_a_file_without_lengths(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text("\n \n")
    with pytest.raises(ConfigError, match="is empty, expected a token count on each line"):
        read_lengths(path, "prompt_tokens")


def test_lengths_of_one_file_are_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"prompt_tokens": 7, "output_tokens": 900}\n{"prompt_tokens": 8, "output_tokens": 100}\n'
    )
    (tmp_path / "b.jsonl").write_text("5\n6\n7\n")
    study = tmp_path / "demo.yaml"
    study.write_text(json.dumps(DOCUMENT))

    def work(prompts: str, replies: str) -> StudySettings:
        files = (f"workload.prompt_tokens.file={prompts}", f"workload.output_tokens.file={replies}")
        return load_study(study, ["workload.output_tokens=null", *files])

    settings = work("a.jsonl", "./a.jsonl")
    assert settings.workload.prompt_tokens == Lengths("recorded", values=(7, 8), paired=True)
    assert settings.workload.output_tokens == Lengths("recorded", values=(900, 100), paired=True)
    assert settings.search.output_tokens == Lengths("recorded", values=(461, 51), paired=True)
    assert parse_study(dump(settings)) == settings
    assert not work("a.jsonl", "b.jsonl").workload.output_tokens.paired


@pytest.mark.parametrize(
    ("prompts", "replies", "message"),
    [
        ("{recorded: [1], paired: true}", "{recorded: [1]}", "pairs of recorded lengths need"),
        (
            "{recorded: [1, 2], paired: true}",
            "{recorded: [1], paired: true}",
            "found 1 lengths for 2 prompts; pairs need as many of each",
        ),
        ("5", "{uniform: [1, 2], paired: true}", "workload.output_tokens.paired: found without"),
    ],
)
def test_pairs_that_are_none(prompts: str, replies: str, message: str) -> None:
    options = (f"workload.prompt_tokens={prompts}", f"workload.output_tokens={replies}")
    assert refused(*options).startswith(message)
