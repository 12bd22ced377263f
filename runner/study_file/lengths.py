"""Token counts of a study file: a number, a law, or a file of recorded lengths read right away.

Prompts and replies that come from one file stay pairs: a request has both counts of one line.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from runner.errors import ConfigError
from runner.lengths import scaled, written_mean
from runner.study_file.mistake import Mistakes, show
from runner.study_file.model import LENGTHS, LengthsSection, WorkloadSection
from runner.study_file.reading import read_text
from runner.trial import Lengths

LARGEST_BYTES = 20_000_000
SEARCH_TOKENS = 256
PROMPTS, REPLIES = "prompt_tokens", "output_tokens"


def resolve_workload(
    section: WorkloadSection, folder: Path | None, mistakes: Mistakes
) -> tuple[Lengths, Lengths]:
    """The laws of prompts and replies; files are looked up from `folder`."""
    sections = (section.prompt_tokens, section.output_tokens)
    prompts, replies = (
        resolve_lengths(each, key, f"workload.{key}", folder, mistakes)
        for each, key in zip(sections, (PROMPTS, REPLIES), strict=True)
    )
    if _are_one_file(*sections, folder):
        prompts, replies = replace(prompts, paired=True), replace(replies, paired=True)
    if prompts.paired or replies.paired:
        _check_pairs(prompts, replies, "workload.output_tokens", mistakes)
    return prompts, replies


def resolve_search(
    section: LengthsSection | None,
    workload: WorkloadSection,
    laws: tuple[Lengths, Lengths],
    folder: Path | None,
    mistakes: Mistakes,
) -> Lengths | None:
    """What the search asks for instead of the workload's reply lengths; None: just these.

    `section` None is auto: replies of more than `SEARCH_TOKENS` tokens on average are scaled to
    that mean. An open loop keeps them: at the same rate, shorter replies are a smaller load.
    """
    prompts, replies = laws
    if section is None:
        is_long = written_mean(replies) > SEARCH_TOKENS
        return scaled(replies, SEARCH_TOKENS) if is_long and workload.rate is None else None
    place = f"search.{REPLIES}"
    law = resolve_lengths(section, REPLIES, place, folder, mistakes)
    if _are_one_file(workload.prompt_tokens, section, folder):
        law = replace(law, paired=True)
    if law.paired:
        _check_pairs(prompts, law, place, mistakes)
    return None if law == replies else law


def _are_one_file(one: LengthsSection, other: LengthsSection, folder: Path | None) -> bool:
    if one.file is None or other.file is None:
        return False
    above = folder or Path()
    return (above / one.file).resolve() == (above / other.file).resolve()


def _check_pairs(prompts: Lengths, replies: Lengths, place: str, mistakes: Mistakes) -> None:
    if not (prompts.paired and replies.paired):
        text = "pairs of recorded lengths need `paired: true` in workload.prompt_tokens as well"
        mistakes.add(place, f"{text} as here; found it in one of them")
    elif len(prompts.values) != len(replies.values):
        text = f"found {len(replies.values)} lengths for {len(prompts.values)} prompts"
        mistakes.add(place, f"{text}; pairs need as many of each")


def resolve_lengths(
    section: LengthsSection, key: str, place: str, folder: Path | None, mistakes: Mistakes
) -> Lengths:
    """The law at a place of the study file; `key` is what its lines of a file call it."""
    given = section.model_dump(exclude_none=True)
    is_paired = bool(given.pop("paired", False))
    if is_paired and section.recorded is None:
        mistakes.add(f"{place}.paired", "found without recorded; only recorded lengths have pairs")
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
        return Lengths("recorded", values=tuple(section.recorded), paired=is_paired)
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
