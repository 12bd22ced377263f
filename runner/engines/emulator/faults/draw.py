"""Chance that repeats: a number drawn from words, the same in every process."""

from __future__ import annotations

import hashlib

_BITS = 53


def draw(*words: object) -> float:
    """A number from 0 up to 1 that looks random and depends on the words alone."""
    digest = hashlib.sha256("\0".join(map(str, words)).encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> (64 - _BITS)) / (1 << _BITS)
