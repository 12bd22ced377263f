"""Mistakes in the user's input, told in plain words: the place, what was found, what is allowed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from runner.errors import ConfigError

MOST_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake. `place` is the path in the study file, e.g. `parameters.pp_size.int`."""

    place: str
    text: str


@dataclass(slots=True)
class Mistakes:
    """All mistakes of one reading; the user is shown the first and told how many follow.

    `source` names the file. `overrides` are the paths of each `--set`: a mistake at or below such
    a path is blamed on the option, not on the file. `unsaid` counts mistakes that were not put
    into words.
    """

    source: str = ""
    overrides: Sequence[str] = ()
    found: list[Mistake] = field(default_factory=list)
    unsaid: int = 0

    def add(self, place: str, text: str) -> None:
        """Note one mistake."""
        self.found.append(Mistake(place, text))

    def stop(self) -> None:
        """Raise ConfigError if there was any mistake."""
        if not self.found:
            return
        first = self.found[0]
        more = len(self.found) - 1 + self.unsaid
        source = self._source_of(first)
        place = "" if source == f"--set {first.place}" else first.place
        message = ": ".join(part for part in (source, place, first.text) if part)
        raise ConfigError(f"{message} (and {more} more)" if more else message)

    def _source_of(self, mistake: Mistake) -> str:
        # Only the path of an option is repeated: a value may hold a password.
        for path in reversed(self.overrides):
            if f"{path}.".startswith(f"{mistake.place}.") or mistake.place.startswith(f"{path}."):
                return f"--set {path}"
        return self.source


def show(value: object) -> str:
    """A value as the user would write it, cut when long."""
    match value:
        case None:
            text = "nothing"
        case bool():
            text = "true" if value else "false"
        case str():
            text = f"the text {_cut(value)!r}"
        case float() if not math.isfinite(value):
            text = "NaN" if math.isnan(value) else "infinity"
        case int() | float():
            text = repr(value)
        case list() | tuple():
            text = _cut(json.dumps(value, default=str)) if value else "an empty list"
        case dict():
            text = _cut(json.dumps(value, default=str)) if value else "an empty section"
        case _:
            text = f"a {type(value).__name__}"
    return text


def near_match(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant."""
    close = get_close_matches(name.lower(), tuple(names), n=1, cutoff=0.6)
    return close[0] if close else None


def unknown(kind: str, name: str, names: Iterable[str]) -> str:
    """`unknown key 'x'; did you mean 'y'? Valid: a, b`."""
    valid = tuple(names)
    close = near_match(name, valid)
    guess = f"; did you mean {close!r}?" if close else ";"
    listed = f" Valid: {', '.join(valid)}" if close else f" valid: {', '.join(valid)}"
    return f"unknown {kind} {_cut(name)!r}{guess}{listed}"


def _cut(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
