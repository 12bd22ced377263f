"""What an installed SGLang offers: its version and the flags of its `--help`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from runner.errors import ConfigError

FIRST_KNOWN, LAST_KNOWN = (0, 5, 12), (0, 5, 23)
"""The versions of SGLang that the runner was tried with."""

NOT_SETTINGS = frozenset({"--help", "--version"})
_SPELLING = re.compile(r"(?:^|, )(-{1,2}[A-Za-z0-9][\w-]*)")
_CHOICES = re.compile(r"\{([^{}]*)\}")
_FLAG_LINE = re.compile(r"^ {2}(-.*)$")


class Takes(StrEnum):
    """What follows a flag on the command line."""

    NOTHING = "nothing"
    VALUE = "value"
    OPTIONAL = "optional"  # the flag alone means something too


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: all its long spellings (`--tp-size`), and the values that --help lists, if any."""

    names: tuple[str, ...]
    takes: Takes
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerEnvironment:
    """The flags of one installed server. `shown` is how messages call it."""

    version: str
    flags: tuple[Flag, ...]
    shown: str = field(default="")

    @cached_property
    def by_name(self) -> Mapping[str, Flag]:
        """Every flag by each of its exact long names."""
        return {name: flag for flag in self.flags for name in flag.names}

    def __str__(self) -> str:
        return self.shown or f"SGLang {self.version}"

    @property
    def note(self) -> str | None:
        """A line for the user when the runner was never tried with this version."""
        numbers = tuple(int(part) for part in re.findall(r"\d+", self.version)[:3])
        if FIRST_KNOWN <= numbers <= LAST_KNOWN:
            return None
        first, last = (".".join(map(str, each)) for each in (FIRST_KNOWN, LAST_KNOWN))
        return (
            f"note: the runner was tried with SGLang {first} to {last}, and this is "
            f"{self.version}: its flags are taken from its --help, its other ways may differ"
        )


def parse_help(text: str) -> tuple[Flag, ...]:
    """The flags that the text of argparse's --help lists.

    Raises ConfigError when there is none: then it is not the text of --help.
    """
    flags = tuple(flag for line in text.splitlines() if (flag := _flag_of(line)) is not None)
    if not flags:
        raise ConfigError("the text of --help lists no flags")
    return flags


def _flag_of(line: str) -> Flag | None:
    """The flag that a line introduces; lines of explanation are indented further."""
    match = _FLAG_LINE.match(line)
    if match is None:
        return None
    words = _before_explanation(match[1])
    choices = _CHOICES.search(words)
    bare = _CHOICES.sub("{}", words)
    names = tuple(name for name in _SPELLING.findall(bare) if name.startswith("--"))
    settings = tuple(dict.fromkeys(name for name in names if name not in NOT_SETTINGS))
    if not settings:
        return None
    listed = tuple(choice.strip() for choice in choices[1].split(",")) if choices else ()
    return Flag(settings, _takes(bare), listed)


def _before_explanation(line: str) -> str:
    return line.split("  ", 1)[0].rstrip()


def _takes(bare: str) -> Takes:
    """By what follows the names; since Python 3.13 only the last one shows it."""
    rests = [part.strip().partition(" ")[2] for part in _parts(bare)]
    rest = next((each for each in rests if each), "")
    if not rest:
        return Takes.NOTHING
    return Takes.OPTIONAL if rest.startswith("[") and "..." not in rest else Takes.VALUE


def _parts(bare: str) -> Iterator[str]:
    starts = [match.start(1) for match in _SPELLING.finditer(bare)]
    ends = [*(start - 2 for start in starts[1:]), len(bare)]
    return (bare[start:end] for start, end in zip(starts, ends, strict=True))
