"""Which flags a server has: asked of its interpreter, kept, and held against a study."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from runner.cli import main
from runner.engines.program import environment_for
from runner.engines.sglang import installation
from runner.engines.sglang.environment import ServerEnvironment
from runner.engines.sglang.installation import read_installed
from runner.errors import ConfigError
from runner.settings import EngineSettings
from runner.trial import EngineKind
from tests.driving import wait_for
from tests.fake_python import FakePython
from tests.server_flags import help_text, real_environment
from tests.studies import CPU

NEWEST, OLDEST = real_environment("0.5.23"), real_environment("0.5.12")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of caches of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sglang-runner" / "flags"


@pytest.fixture
def python(tmp_path: Path) -> FakePython:
    return FakePython(tmp_path / "env")


def read(python: FakePython) -> ServerEnvironment:
    return read_installed(python.path, {})


def refused(python: FakePython) -> str:
    with pytest.raises(ConfigError) as caught:
        read(python)
    return str(caught.value)


def test_the_flags_are_those_of_its_help(python: FakePython) -> None:
    python.install("0.5.23", help_text(NEWEST))
    assert read(python) == NEWEST
    assert python.asked() == ["version", "help"]


def test_the_second_time_only_the_version_is_asked_for(python: FakePython) -> None:
    python.install("0.5.23", help_text(NEWEST))
    assert read(python) == read(python) == NEWEST
    assert python.asked() == ["version", "help", "version"]


def test_another_version_is_read_anew(python: FakePython) -> None:
    python.install("0.5.23", help_text(NEWEST))
    read(python)
    python.install("0.5.12", help_text(OLDEST))
    assert read(python) == OLDEST
    python.install("0.5.23", help_text(NEWEST))
    assert read(python) == NEWEST
    assert python.asked().count("help") == 2


def test_the_same_version_installed_again_is_read_anew(python: FakePython) -> None:
    python.install("0.5.23", help_text(OLDEST))
    read(python)
    python.install("0.5.23", help_text(NEWEST), mark=1)
    assert read(python) == NEWEST


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"schema": 1}', "\x00\xff"])
def test_a_damaged_file_is_made_anew(python: FakePython, cache: Path, damage: str) -> None:
    python.install("0.5.23", help_text(NEWEST))
    read(python)
    (kept,) = cache.iterdir()
    kept.write_text(damage, encoding="utf-8")
    assert read(python) == NEWEST
    assert python.asked().count("help") == 2
    assert read(python) == NEWEST
    assert python.asked().count("help") == 2


def test_a_file_with_a_flag_of_an_unknown_kind_is_made_anew(
    python: FakePython, cache: Path
) -> None:
    python.install("0.5.23", help_text(NEWEST))
    read(python)
    (kept,) = cache.iterdir()
    document = json.loads(kept.read_text(encoding="utf-8"))
    document["flags"][0][1] = "several"
    kept.write_text(json.dumps(document), encoding="utf-8")
    assert read(python) == NEWEST


def test_a_cache_that_cannot_be_written_is_no_hindrance(python: FakePython, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("no folder", encoding="utf-8")
    python.install("0.5.23", help_text(NEWEST))
    assert read(python) == read(python) == NEWEST


def test_a_missing_interpreter(python: FakePython) -> None:
    assert f"{python.path} is no program here; name the Python that has SGLang" in refused(python)


def test_an_interpreter_that_cannot_be_run(python: FakePython) -> None:
    python.install("0.5.23")
    Path(python.path).write_text("#!/no/such/interpreter\n", encoding="utf-8")
    assert "cannot be run: No such file or directory" in refused(python)


@pytest.mark.parametrize("version", ["", "0.5.23\0", "../../x", "\ud800"])
def test_a_version_that_is_none(python: FakePython, version: str) -> None:
    python.install(version)
    assert "did not say which SGLang it has" in refused(python)


def test_what_hangs_below_an_interpreter_ends_with_it(
    python: FakePython, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(installation, "QUERY_LIMIT_S", 0.5)
    python.install("0.5.23")
    pid = tmp_path / "pid"
    wrapper = f"#!/bin/sh\nsh -c 'echo $$ > {pid}; sleep 600; true'\ntrue\n"
    Path(python.path).write_text(wrapper, encoding="utf-8")
    assert "did not end within" in refused(python)
    child = int(pid.read_text())
    wait_for(lambda: not psutil.pid_exists(child), "the end of the child", 30)


def test_an_environment_without_sglang(python: FakePython) -> None:
    python.install(None)
    assert "has no SGLang; name the Python of the environment" in refused(python)


def test_the_interpreter_of_these_tests_has_none() -> None:
    with pytest.raises(ConfigError, match="has no SGLang"):
        read_installed(sys.executable, {})


def test_a_real_interpreter_finds_a_package_on_its_path(tmp_path: Path) -> None:
    folder = install_package(tmp_path / "site", "9.8.7")
    found = read_installed(sys.executable, {"PYTHONPATH": str(folder)})
    assert found.version == "9.8.7"
    assert set(found.by_name) == {"--tp-size", "--greeting"}
    assert found.note is not None
    assert "this is 9.8.7" in found.note
    before = (folder / "sglang" / "srt" / "server_args.py").stat().st_mtime_ns
    install_package(tmp_path / "site", "9.8.7", more="parser.add_argument('--new-one')")
    assert (folder / "sglang" / "srt" / "server_args.py").stat().st_mtime_ns != before
    renewed = read_installed(sys.executable, {"PYTHONPATH": str(folder)})
    assert "--new-one" in renewed.by_name


def install_package(folder: Path, version: str, more: str = "") -> Path:
    """A package named sglang, whose import as a whole fails, as one without a GPU may."""
    info = folder / f"sglang-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    (info / "RECORD").write_text(f"sglang/__init__.py,,\nsglang-{version}.dist-info/RECORD,,\n")
    args = folder / "sglang" / "srt" / "server_args.py"
    args.parent.mkdir(parents=True, exist_ok=True)
    args.write_text(f"# {more}")
    (folder / "sglang" / "__init__.py").touch()
    (folder / "sglang" / "launch_server.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--tp-size', type=int)\n"
        f"parser.add_argument('--greeting', choices=['hello', 'ahoy'])\n{more}\n"
        "parser.parse_args()\n"
    )
    return folder


def test_a_help_that_crashes_shows_its_last_lines(python: FakePython, cache: Path) -> None:
    python.install("0.5.23", crash="one\ntwo\nImportError: libnuma.so.1: no such file")
    said = refused(python)
    assert "-m sglang.launch_server --help` failed with exit code 1; run it by hand" in said
    assert said.endswith("ImportError: libnuma.so.1: no such file")
    assert not cache.exists()


def test_a_help_without_flags(python: FakePython) -> None:
    python.install("0.5.23", "usage: nothing of use")
    assert "the text of --help lists no flags\n  usage: nothing of use" in refused(python)


def test_a_help_that_never_ends(python: FakePython, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "HELP_LIMIT_S", 0.5)
    python.install("0.5.23", help_text(NEWEST), delay_s=600.0)
    assert "did not end within" in refused(python)


def test_a_study_of_sglang_asks_the_interpreter_that_it_names(python: FakePython) -> None:
    python.install("0.5.12", help_text(OLDEST))
    engine = EngineSettings(EngineKind.SGLANG, None, 1.0, "/models/m", python.path, {}, {})
    assert environment_for(engine) == OLDEST


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def tune(home: Path, engine: dict[str, Any], **sections: Any) -> int:  # noqa: ANN401 - YAML
    """`runner tune` in this process."""
    home.mkdir(exist_ok=True)
    path = home / "study.yaml"
    document = {**CPU, "engine": {**CPU["engine"], **engine}, **sections}
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return main(["tune", str(path), "--executor", "inline", "--home", str(home)])


SIZES = {"pp_size": {"choices": [1, 2]}}


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (
            {**SIZES, "max_running": {"choices": [4, 8]}},
            (
                "parameters.max_running: the emulated server has no flag --max-running; did you "
                "mean 'max_running_requests'?"
            ),
        ),
        (
            {**SIZES, "hicache_sise": {"choices": [1]}},
            (
                "parameters.hicache_sise: the emulated server has no flag --hicache-sise; did you "
                "mean 'hicache_size'?"
            ),
        ),
        (
            {**SIZES, "attention_backend": {"choices": ["triton", "best"]}},
            "parameters.attention_backend: found the text 'best', expected one of triton, ",
        ),
    ],
)
def test_a_parameter_that_emulated_servers_lack_begins_nothing(
    home: Path, capsys: pytest.CaptureFixture[str], parameters: dict[str, Any], said: str
) -> None:
    assert tune(home, {}, parameters=parameters) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not (home / "studies").exists()


@pytest.mark.parametrize(
    ("version", "args", "said"),
    [
        ("0.5.23", {"max_running": 8}, "engine.args.max_running: SGLang 0.5.23 has no flag"),
        ("0.5.23", {"cuda_graph_bs": 8}, "did you mean 'cuda_graph_bs_decode'?"),
        ("0.5.12", {"weight_cache_mode": "daemon"}, "SGLang 0.5.12 has no flag for it"),
        ("0.5.20", {"load_format": "dumy"}, "found the text 'dumy', expected one of auto, pt, "),
    ],
)
def test_an_argument_that_this_sglang_lacks_begins_nothing(
    home: Path,
    python: FakePython,
    capsys: pytest.CaptureFixture[str],
    version: str,
    args: dict[str, Any],
    said: str,
) -> None:
    python.install(version, help_text(real_environment(version)))
    engine = {"kind": "sglang", "model": str(home), "python": python.path, "args": args}
    assert tune(home, engine, parameters=SIZES) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not (home / "studies").exists()


def test_a_study_without_sglang_begins_nothing(
    home: Path, python: FakePython, capsys: pytest.CaptureFixture[str]
) -> None:
    python.install(None)
    assert tune(home, {"kind": "sglang", "model": str(home), "python": python.path}) == 2
    assert "has no SGLang" in capsys.readouterr().err
    assert not (home / "studies").exists()
