"""How many requests each slot of a pipeline holds, by the rules of admission. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from statistics import NormalDist
from typing import TypeAlias

LEAST_COUNT = 0.05  # a slot that holds fewer requests on average counts as empty

Counts: TypeAlias = tuple[float, ...]


@lru_cache(maxsize=4096)
def occupancy(slot_count: int, cap: int, per_visit: int, running: int, variance: float) -> Counts:
    """Mean requests of each occupied slot, the empty ones left out.

    Args:
        slot_count: slots of the server.
        cap: most requests of a slot.
        per_visit: most requests that one visit admits.
        running: requests in flight, at most slot_count * cap.
        variance: of the drift of requests since the burst they began as, in slots squared.
    """
    counts = greedy(slot_count, cap, per_visit, running)
    if variance > 0:
        counts = _pushed_on(_spread(counts, math.sqrt(variance)), float(cap))
    return tuple(count for count in counts if count > LEAST_COUNT)


def greedy(slot_count: int, cap: int, per_visit: int, running: int) -> list[float]:
    """A burst's requests by slot: the first visit finds one, the later ones all that wait."""
    counts = [0] * slot_count
    slot, left, allowed = 0, running, 1
    while left:
        taken = min(allowed, cap - counts[slot], left)
        counts[slot] += taken
        left -= taken
        slot, allowed = (slot + 1) % slot_count, per_visit
    return [float(count) for count in counts]


def _spread(counts: Iterable[float], deviation: float) -> list[float]:
    """The counts after every request has drifted on the ring of slots."""
    given = list(counts)
    size = len(given)
    law = NormalDist(0.0, deviation)
    reach = min(math.ceil(4 * deviation), size)
    shares = {step: law.cdf(step + 0.5) - law.cdf(step - 0.5) for step in range(-reach, reach + 1)}
    spread = [0.0] * size
    for slot, count in enumerate(given):
        if count:
            for step, share in shares.items():
                spread[(slot + step) % size] += count * share
    return spread


def _pushed_on(counts: Iterable[float], cap: float) -> list[float]:
    """The counts after what the cap refuses has gone on to the next slots."""
    kept = list(counts)
    excess = 0.0
    for place in range(2 * len(kept)):
        slot = place % len(kept)
        excess += kept[slot]
        kept[slot] = min(excess, cap)
        excess -= kept[slot]
    return kept
