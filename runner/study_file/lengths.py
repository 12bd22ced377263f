"""Token counts of a study file: a number, a law, or a file of recorded lengths read right away."""

from __future__ import annotations

import json
from pathlib import Path

from runner.errors import ConfigError
from runner.study_file.mistake import Mistakes, show
from runner.study_file.model import LENGTHS, LengthsSection
from runner.study_file.reading import read_text
from runner.trial import Lengths

LARGEST_BYTES = 20_000_000


def resolve_lengths(
    section: LengthsSection, key: str, folder: Path | None, mistakes: Mistakes
) -> Lengths:
    """The law of `workload.KEY`; files are looked up from `folder`."""
    place = f"workload.{key}"
    given = section.model_dump(exclude_none=True)
    if len(given) != 1:
        mistakes.add(place, f"found {' and '.join(given) or 'no law'}, expected {LENGTHS}")
        return Lengths.fixed(1)
    if section.fixed is not None:
        return Lengths.fixed(section.fixed)
    if section.uniform is not None:
        low, high = section.uniform
        if low > high:
            text = f"found {show(section.uniform)}, expected [low, high] with low <= high"
            mistakes.add(f"{place}.uniform", text)
        return Lengths("uniform", low, high)
    if section.normal is not None:
        mean, deviation = section.normal
        if mean < 1 or deviation < 0:
            text = f"found {show(section.normal)}, expected [mean, sd] with mean >= 1 and sd >= 0"
            mistakes.add(f"{place}.normal", text)
        return Lengths("normal", mean, deviation)
    if section.recorded is not None:
        return Lengths("recorded", values=tuple(section.recorded))
    try:
        path = (folder or Path()) / (section.file or "")
        return Lengths("recorded", values=read_lengths(path, key))
    except ConfigError as err:
        mistakes.add(f"{place}.file", str(err))
        return Lengths.fixed(1)


def read_lengths(path: Path, key: str) -> tuple[int, ...]:
    """The token counts of a JSON lines file; each line is a number or an object with `key`."""
    lines = read_text(path, LARGEST_BYTES, "a JSON lines file").splitlines()
    values = tuple(
        _length(line, key, f"{path} line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )
    if not values:
        raise ConfigError(f"{path} is empty, expected a token count on each line")
    return values


def _length(line: str, key: str, place: str) -> int:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"{place} is not JSON: {show(line)}") from err
    value = entry.get(key) if isinstance(entry, dict) else entry
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{place}: found {show(entry)}, expected a whole number of tokens, 1 or more, "
            f'or {{"{key}": number}}'
        )
    return value
