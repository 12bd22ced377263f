"""What a kind of fault takes after its colon: one reader per form, each with its own message."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

_STOP = re.compile(r"(\d+)(requests|tokens)?")


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument as read: words, numbers, or both."""

    text: str = ""
    numbers: tuple[float, ...] = ()


Reader: TypeAlias = Callable[[str], Argument]
"""Raises ValueError, whose text says what was expected."""


def no_argument(text: str) -> Argument:
    """Nothing."""
    if text:
        raise ValueError("nothing after its name")
    return Argument()


def any_text(text: str) -> Argument:
    """Any text, or none."""
    return Argument(text)


def one_of(default: str, *others: str) -> Reader:
    """One of a few words; the first where nothing is written."""

    def read(text: str) -> Argument:
        if text and text not in {default, *others}:
            raise ValueError(" or ".join(word for word in (default, *others) if word))
        return Argument(text or default)

    return read


def count(text: str) -> Argument:
    """How many: a whole number from 1."""
    return Argument("", (_whole(text, "a count of 1 or more, such as 20"),))


def optional_count(text: str) -> Argument:
    """A count, or nothing: no limit."""
    return count(text) if text else Argument()


def counts(text: str) -> Argument:
    """Counts from 1, with commas between them."""
    expected = "counts of 1 or more, such as 4 or 1,3,2"
    return Argument("", tuple(_whole(part, expected) for part in text.split(",")))


def signed_count(text: str) -> Argument:
    """A whole number with its sign."""
    if not re.fullmatch(r"[+-]0*[1-9]\d*", text):
        raise ValueError("how many tokens too many (+2) or too few (-2)")
    return Argument("", (int(text),))


def requests_or_tokens(text: str) -> Argument:
    """A count of requests (the unit may be left out) or of tokens."""
    found = _STOP.fullmatch(text)
    if found is None or int(found[1]) == 0:
        raise ValueError("a count of requests or tokens, such as 3requests or 500tokens")
    return Argument(found[2] or "requests", (int(found[1]),))


def seconds(text: str) -> Argument:
    """A duration in seconds."""
    return Argument("", (_real(text, 0.0, float("inf"), "seconds above 0, such as 8"),))


def share(text: str) -> Argument:
    """A share of all, above 0 and at most 1."""
    return Argument("", (_real(text, 0.0, 1.0, "a share above 0 and up to 1, such as 0.05"),))


def seconds_and_share(text: str) -> Argument:
    """A duration in seconds, a comma, and a share below 1."""
    expected = "seconds and the share that the clock falls by, such as 10,0.3"
    first, _, second = text.partition(",")
    lost = _real(second, 0.0, 1.0, expected)
    if lost == 1.0:
        raise ValueError(expected)
    return Argument("", (_real(first, 0.0, float("inf"), expected), lost))


def _whole(text: str, expected: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(expected)
    return int(text)


def _real(text: str, above: float, most: float, expected: str) -> float:
    try:
        value = float(text)
    except ValueError as err:
        raise ValueError(expected) from err
    if not above < value <= most or value == float("inf"):
        raise ValueError(expected)
    return value
