"""What the GPUs of a study draw and may draw: sentences, and the same as a document."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from runner.insight.ranking import Ranking
from runner.measure.idle import IdleGpu
from runner.record.codec import encode
from runner.trial import RungResult, TrialResult

UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class PowerFacts:
    """Sums over the GPUs of the best setting; means over its measurements, which may be on others.

    While there is no best, those of the trial that was measured last, or all that were read.
    None: unavailable for one of them at least. `best_w`: mean power at the first objective's rung.
    """

    gpus: int
    idle_w: float | None
    limit_w: float | None
    best_w: float | None

    @property
    def share(self) -> float | None:
        """The best setting's power as a share of the limit."""
        if self.best_w is None or not self.limit_w:
            return None
        return self.best_w / self.limit_w


def power_facts(
    ranking: Ranking, results: Sequence[TrialResult], idle: Sequence[IdleGpu]
) -> PowerFacts:
    """What is known of the GPUs; `idle`: each as read before the first launch on it."""
    rungs = [] if ranking.best is None else ranking.best.rungs_at(ranking.objectives[0].concurrency)
    used = [uuids for rung in rungs if (uuids := _gpus_of(rung))] or _last_used(results)
    places = used or [[gpu.uuid for gpu in idle]]
    idle_w = {gpu.uuid: gpu.power_w for gpu in idle}
    limit_w = {gpu.uuid: gpu.power_limit_w for gpu in idle}
    return PowerFacts(
        gpus=max(map(len, places)),
        idle_w=_mean([_sum([idle_w.get(uuid) for uuid in uuids]) for uuids in places]),
        limit_w=_mean([_sum([limit_w.get(uuid) for uuid in uuids]) for uuids in places]),
        best_w=_mean([rung.power_w for rung in rungs]),
    )


def power_document(
    ranking: Ranking, results: Sequence[TrialResult], idle: Sequence[IdleGpu]
) -> dict[str, object]:
    """The same for JSON; null: unavailable. `gpus`: all that were read, by `reading`."""
    facts = power_facts(ranking, results, idle)
    return {
        "idle_power_w": facts.idle_w,
        "power_limit_w": facts.limit_w,
        "best_power_w": facts.best_w,
        "best_share_of_limit": facts.share,
        "gpus": [encode(gpu) for gpu in idle],
    }


def power_words(
    ranking: Ranking, results: Sequence[TrialResult], idle: Sequence[IdleGpu]
) -> Iterator[str]:
    """The sentences of the report; none when nothing was read."""
    if not idle:
        return
    facts = power_facts(ranking, results, idle)
    which, whose = ("GPU", "its") if facts.gpus == 1 else (f"{facts.gpus} GPUs", "their")
    limit = f"limit {_watts(facts.limit_w)}"
    if facts.share is not None:
        limit = f"{facts.share:.0%} of {whose} limit of {_watts(facts.limit_w)}"
    if ranking.best is None:
        yield f"Power of the {which}: idle {_watts(facts.idle_w)}, {limit}."
    else:
        yield (
            f"Power of the best one's {which}: {_watts(facts.best_w)}, {limit}; "
            f"idle {_watts(facts.idle_w)}."
        )
    for gpu in idle:
        if gpu.pids:
            pids = ", ".join(map(str, gpu.pids))
            yield (
                f"GPU {gpu.index} was not free when its idle power was read: process {pids} "
                "used it."
            )


def _watts(value: float | None) -> str:
    return UNAVAILABLE if value is None else f"{value:.0f} W"


def _gpus_of(rung: RungResult) -> list[str]:
    return [gpu.gpu_uuid for gpu in rung.gpus]


def _last_used(results: Sequence[TrialResult]) -> list[list[str]]:
    """The GPUs of the last rung of the latest trial that names any."""
    for result in sorted(results, key=lambda result: -result.number):
        for rung in reversed(result.rungs):
            if rung.gpus:
                return [_gpus_of(rung)]
    return []


def _mean(values: Sequence[float | None]) -> float | None:
    """None without values, or where one is unavailable."""
    total = _sum(values)
    return None if total is None else total / len(values)


def _sum(values: Sequence[float | None]) -> float | None:
    """None without values, or where one is unavailable."""
    known = [value for value in values if value is not None]
    return math.fsum(known) if known and len(known) == len(values) else None
