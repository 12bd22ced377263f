"""The study file in and out: read and check it, write it down, compare two of them.

load_study is the only way in for what a user wrote. The steps are files of runner/study_file:
reading (bytes to a document), model (its shape), resolve, parameters and lengths (the settings),
check (can it be run). Every mistake ends as one ConfigError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeGuard

from runner.settings import Choices, FloatRange, IntRange, Objective, Parameter, StudySettings
from runner.study_file.mistake import Mistakes, show
from runner.trial import Arrivals, Lengths, LoadProtocol

MAY_CHANGE = frozenset(
    {"search.trials", "search.minutes", "search.launches", "search.energy_j", "storage"}
    | {"tracking"}
)
"""What may change when a study continues: the paths of these fields, or of what is in them."""

LARGEST_NUMBER = 2**63
MOST_SHOWN = 100


def load_study(path: Path, overrides: Sequence[str] = ()) -> StudySettings:
    """Read a study file; each override is `section.key=value` with a YAML value.

    Raises ConfigError with the place of the mistake, what was found and what is allowed.
    """
    from runner.study_file.reading import read_study

    return _settings(read_study(path), overrides, path.name, path.parent)


def parse_study(document: Mapping[str, object], overrides: Sequence[str] = ()) -> StudySettings:
    """The settings of a document, such as dump() gives; `parse_study(dump(s)) == s`."""
    return _settings(document, overrides, "", None)


def _settings(
    document: Mapping[str, object], overrides: Sequence[str], source: str, folder: Path | None
) -> StudySettings:
    # pydantic and yaml take longer to import than a command needs to say what it can do.
    from runner.study_file.check import check_study
    from runner.study_file.model import read_document
    from runner.study_file.reading import override, split_override
    from runner.study_file.resolve import resolve

    changed = override(document, overrides)
    mistakes = Mistakes(source, [split_override(each)[0] for each in overrides])
    for place, wrong in _odd_values(changed, ""):
        mistakes.add(place, wrong)
    mistakes.stop()
    settings = resolve(read_document(changed, mistakes), mistakes, folder)
    mistakes.stop()
    check_study(settings, mistakes)
    mistakes.stop()
    return settings


def _odd_values(value: object, place: str) -> Iterator[tuple[str, str]]:
    """Values that no field takes and no JSON holds, with their places."""
    match value:
        case Mapping():
            for key, inner in value.items():
                if not isinstance(key, str):
                    yield place, f"found the key {key!r}, expected a key that is text"
                yield from _odd_values(inner, f"{place}.{key}" if place else str(key))
        case list():
            for position, inner in enumerate(value):
                yield from _odd_values(inner, f"{place}.{position}")
        case float() if not math.isfinite(value):
            yield place, f"found {show(value)}, expected a finite number"
        case int() if abs(value) >= LARGEST_NUMBER:
            yield place, "found a number of more than 63 bits"
        case None | bool() | int() | float() | str():
            return
        case _:
            yield place, f"found {show(value)}, expected text, a number, true or false"


def dump(settings: StudySettings) -> dict[str, object]:
    """The settings as a study file says them, every default written out; ready for JSON."""
    engine = asdict(settings.engine)
    work, search = settings.workload, asdict(settings.search)
    law = settings.search.output_tokens or work.output_tokens
    return {
        "name": settings.name,
        "engine": {**engine, "kind": str(settings.engine.kind)},
        "hardware": asdict(settings.hardware),
        "parameters": {p.name: _dump_parameter(p) for p in settings.parameters},
        "constraints": [constraint.text for constraint in settings.constraints],
        "baselines": [{"name": each.name, **each.params} for each in settings.baselines],
        "workload": _dump_workload(settings),
        "objectives": [_dump_objective(each, settings) for each in settings.objectives],
        "slo": _dump_slo(settings),
        "search": {
            **search,
            "parallel": search["parallel"] or "auto",
            "output_tokens": _dump_lengths(law),
        },
        "measure": asdict(settings.measure),
        "storage": settings.storage,
        "tracking": {"uri": settings.tracking_uri},
    }


def complete(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A dumped study with what versions before this one did not write.

    They measured everything with the lengths of the workload, and their arrivals were random.
    """
    work, search = stored.get("workload"), stored.get("search")
    if not isinstance(work, Mapping) or not isinstance(search, Mapping):
        return dict(stored)  # damaged; what is wrong is said when it is read
    work, search = dict(work), dict(search)
    search.setdefault("output_tokens", work.get("output_tokens"))
    if work.get("protocol") == LoadProtocol.OPEN_LOOP:
        work.setdefault("arrivals", str(Arrivals.POISSON))
    return {**stored, "workload": work, "search": search}


def _dump_parameter(parameter: Parameter) -> dict[str, object]:
    when = {} if parameter.when is None else {"when": parameter.when.text}
    match parameter:
        case Choices(values=values):
            return {"choices": list(values), **when}
        case IntRange(low=low, high=high, step=step, log=log):
            return {"int": [low, high], "step": step, "log": log, **when}
        case FloatRange(low=low, high=high, log=log):
            return {"float": [low, high], "log": log, **when}


def _dump_workload(settings: StudySettings) -> dict[str, object]:
    work = settings.workload
    is_open = work.protocol is LoadProtocol.OPEN_LOOP
    return {
        "protocol": str(work.protocol),
        "prompt_tokens": _dump_lengths(work.prompt_tokens),
        "output_tokens": _dump_lengths(work.output_tokens),
        **({"rate": list(work.rate)} if is_open else {"concurrency": list(work.concurrency)}),
        **({"arrivals": str(work.arrivals)} if is_open else {}),
        "shared_prefix": work.shared_prefix,
    }


def _dump_lengths(lengths: Lengths) -> object:
    """Recorded lengths are written out: the file they came from may be gone."""
    match lengths.kind:
        case "fixed":
            return int(lengths.a)
        case "recorded":
            return {
                "recorded": list(lengths.values),
                **({"paired": True} if lengths.paired else {}),
            }
        case kind:
            return {kind: [lengths.a, lengths.b]}


def _dump_objective(objective: Objective, settings: StudySettings) -> dict[str, object]:
    is_open = settings.workload.protocol is LoadProtocol.OPEN_LOOP
    return {
        "metric": objective.metric,
        "rate" if is_open else "concurrency": objective.concurrency,
        "direction": str(objective.direction),
    }


def _dump_slo(settings: StudySettings) -> dict[str, dict[str, float]]:
    limits: dict[str, dict[str, float]] = {}
    for limit in settings.slo:
        limits.setdefault(limit.metric, {})[limit.percentile] = limit.limit_s
    return limits


ABSENT = object()


def diff(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Each difference between two dumped studies: `search.trials: 20 -> 40`."""
    return list(_differences(old, new, ""))


def _differences(old: object, new: object, place: str) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{place}.{key}" if place else str(key)
            yield from _differences(old.get(key, ABSENT), new.get(key, ABSENT), inner)
    elif _has_sections(old) and _has_sections(new):
        pairs = zip_longest(old, new, fillvalue=ABSENT)
        for position, (one, other) in enumerate(pairs):
            yield from _differences(one, other, f"{place}.{position}")
    elif old is ABSENT or new is ABSENT or _written(old) != _written(new):
        yield f"{place}: {_written(old)} -> {_written(new)}"


def _has_sections(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list) and any(isinstance(each, Mapping) for each in value)


def _written(value: object) -> str:
    if value is ABSENT:
        return "absent"
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
