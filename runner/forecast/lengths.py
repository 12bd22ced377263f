"""A law of token counts in a few numbers."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import lru_cache

from runner.load.workload import draw
from runner.trial import Lengths

QUANTILES = 1000


@dataclass(frozen=True, slots=True)
class LengthFacts:
    """Mean, relative standard deviation, and nearly the longest."""

    mean: float
    cv: float
    longest: float


@lru_cache(maxsize=64)
def length_facts(lengths: Lengths) -> LengthFacts:
    """The facts of a law, from the token counts that are really drawn."""
    if lengths.kind == "uniform":
        low, high = round(lengths.a), round(lengths.b)
        mean, deviation = (low + high) / 2, (((high - low + 1) ** 2 - 1) / 12) ** 0.5
        return LengthFacts(mean, deviation / max(mean, 1.0), float(high))
    if lengths.kind == "recorded":
        drawn = [max(value, 1) for value in lengths.values]
    else:
        drawn = [draw(lengths, (place + 0.5) / QUANTILES) for place in range(QUANTILES)]
    mean = statistics.fmean(drawn)
    return LengthFacts(mean, statistics.pstdev(drawn) / mean, float(max(drawn)))


@lru_cache(maxsize=1024)
def expected_longest(lengths: Lengths, count: int) -> float:
    """About what the longest of `count` requests has."""
    law = replace(lengths, values=tuple(sorted(lengths.values)))
    return float(draw(law, count / (count + 1)))
