"""The flags of real SGLang versions, a line each: spellings, what follows, choices if listed."""

from __future__ import annotations

from pathlib import Path

from runner.engines.sglang.environment import Flag, ServerEnvironment, Takes

FOLDER = Path(__file__).parent / "data" / "flags"
VERSIONS = ("0.5.12", "0.5.14", "0.5.16", "0.5.18", "0.5.20", "0.5.23")


def real_environment(version: str) -> ServerEnvironment:
    """What this version of SGLang offers."""
    lines = (FOLDER / f"{version}.txt").read_text(encoding="utf-8").splitlines()
    return ServerEnvironment(version, tuple(_flag(line.split()) for line in lines))


def _flag(words: list[str]) -> Flag:
    names = tuple(word for word in words if word.startswith("--"))
    takes, *choices = words[len(names) :]
    return Flag(names, Takes(takes), tuple(choices[0].split(",")) if choices else ())


def help_text(environment: ServerEnvironment) -> str:
    """The text that argparse prints for these flags, but for its explanations."""
    lines = ["usage: sglang serve [-h] ...", "", "options:"]
    lines.append("  -h, --help            show this help message and exit")
    for flag in environment.flags:
        listed = "{" + ",".join(flag.choices) + "}" if flag.choices else "SOMETHING"
        value = {"nothing": "", "value": f" {listed}", "optional": f" [{listed}]"}[flag.takes]
        lines.append("  " + ", ".join(name + value for name in flag.names))
    return "\n".join(lines) + "\n"
