"""What README.md and ARCHITECTURE.md point at is there: files, anchors, commands, options."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser
from pathlib import Path

import pytest

from runner.cli import parser
from runner.config import load_study

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", re.DOTALL)


def page_id(path: Path) -> str:
    return path.name


def subcommands(top: ArgumentParser) -> dict[str, ArgumentParser]:
    """The parsers of all commands, by name."""
    for action in top._actions:  # noqa: SLF001 - argparse offers no public way
        if isinstance(action.choices, dict):
            return dict(action.choices)
    return {}


def commands(page: str) -> list[list[str]]:
    """Every `runner ...` or `.venv/bin/runner ...` in code."""
    code = "\n".join(block or inline for block, inline in CODE.findall(page))
    lines = [line.split(" #")[0].strip().removeprefix("$ ") for line in code.splitlines()]
    words = [shlex.split(line) for line in lines if re.match(r"(\S*/)?runner [a-z]", line)]
    return [line[1:] for line in words]


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_links_lead_somewhere(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
    for target in LINK.findall(page):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        assert not file or (path.parent / file).exists(), target
        assert file or anchor in anchors, target


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_commands_exist_with_their_options(path: Path) -> None:
    known = subcommands(parser())
    for words in commands(path.read_text(encoding="utf-8")):
        command, *rest = words
        assert command in known, f"runner {command} does not exist"
        options = known[command]._option_string_actions  # noqa: SLF001
        used = [word.split("=")[0] for word in rest if word.startswith("--") and word != "--"]
        missing = [word for word in used if word not in options and command != "emulate"]
        assert not missing, f"runner {command} has no {missing}"


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_scripts_and_files_named_in_code_exist(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    code = " ".join(block or inline for block, inline in CODE.findall(page))
    for name in re.findall(r"\b(?:scripts|search_spaces)/[\w.-]+[\w]", code):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["engine.profile=rtx-pro-6000-x8-kimi-k2.6", "engine.kind=simulated", "name=dry-run"],
    ],
)
def test_the_study_file_of_the_readme_can_be_used_as_it_is(
    overrides: list[str], tmp_path: Path
) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (study,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "your-study.yaml"
    path.write_text(study, encoding="utf-8")
    settings = load_study(path, overrides)
    assert settings.baselines[0].name == "today"


def test_every_command_is_in_the_readme() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = {words[0] for words in commands(page)}
    assert set(subcommands(parser())) <= shown
