"""What the GPUs of a study draw and may draw: sentences, and the same as a document."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from runner.insight.ranking import Ranking
from runner.measure.idle import IdleGpu
from runner.record.codec import encode

UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class PowerFacts:
    """Sums over GPUs: those of the best setting, or all of the study's while there is no best.

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


def power_facts(ranking: Ranking, idle: Sequence[IdleGpu]) -> PowerFacts:
    """What is known of the GPUs; `idle` as read before the first launch."""
    rungs = [] if ranking.best is None else ranking.best.rungs_at(ranking.objectives[0].concurrency)
    used = {gpu.gpu_uuid for rung in rungs for gpu in rung.gpus}
    gpus = [gpu for gpu in idle if gpu.uuid in used or not used]
    is_whole = bool(gpus) and used <= {gpu.uuid for gpu in gpus}
    powers = [rung.power_w for rung in rungs]
    best_w = _sum(powers) if rungs else None
    return PowerFacts(
        gpus=len(used) or len(gpus),
        idle_w=_sum([gpu.power_w for gpu in gpus]) if is_whole else None,
        limit_w=_sum([gpu.power_limit_w for gpu in gpus]) if is_whole else None,
        best_w=None if best_w is None else best_w / len(powers),
    )


def power_document(ranking: Ranking, idle: Sequence[IdleGpu]) -> dict[str, object]:
    """The same for JSON; null: unavailable."""
    facts = power_facts(ranking, idle)
    return {
        "idle_power_w": facts.idle_w,
        "power_limit_w": facts.limit_w,
        "best_power_w": facts.best_w,
        "best_share_of_limit": facts.share,
        "gpus": [encode(gpu) for gpu in idle],
    }


def power_words(ranking: Ranking, idle: Sequence[IdleGpu]) -> Iterator[str]:
    """The sentences of the report; none when nothing was read."""
    if not idle:
        return
    facts = power_facts(ranking, idle)
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


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None
