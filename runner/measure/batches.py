"""A window in batches: where they end, their token rates, and whether those drift. Pure.

Batches are whole periods when the window holds at least three, up to ten of them, else ten equal
spans. What their scatter says is said of this window alone. The rules: measure/window.py.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence

from runner.measure.student import student_t
from runner.trial import LoadRun, RequestStatus

BATCHES = 10
FEWEST_PERIODS = 3
DRIFT = 0.1
DRIFT_OF_TWO = 0.15
"""A server that stops for 0.45 s makes one batch of three seconds slower by a seventh."""
SWING = 0.5


def batch_edges(start_s: float, end_s: float, period_ends_s: Sequence[float]) -> list[float]:
    """The borders of the batches of a window; `period_ends_s` ascend, and may pass its end."""
    ends_s = [time_s for time_s in period_ends_s if start_s < time_s <= end_s]
    edges_s = [start_s, *sorted(set(ends_s))]
    periods = len(edges_s) - 1
    if periods < FEWEST_PERIODS:
        length_s = end_s - start_s
        return [*(start_s + length_s * batch / BATCHES for batch in range(BATCHES)), end_s]
    step = math.ceil(periods / BATCHES)
    # The newest batches are whole; what does not fill a batch is left out at the start.
    return edges_s[::-1][::step][::-1]


def batch_rates(edges_s: Sequence[float], tokens_at: Callable[[float], float]) -> list[float]:
    """Tokens per second of each batch; `tokens_at` counts all tokens up to a time, inclusive."""
    counts = [tokens_at(edge_s) for edge_s in edges_s]
    return [
        (counts[batch + 1] - counts[batch]) / (edges_s[batch + 1] - edges_s[batch])
        for batch in range(len(edges_s) - 1)
        if edges_s[batch + 1] > edges_s[batch]
    ]


def drift_of(rates: Sequence[float]) -> tuple[float, float]:
    """By how much the last half of the batches is faster, and how much of that noise explains.

    Noise is the 95 % limit of Student's two-sample test, from the scatter that neither a step
    between the halves nor a line through both leaves over; 0 when each half is one batch.
    """
    half = len(rates) // 2
    first, last = rates[:half], rates[-half:]
    drift = statistics.fmean(last) - statistics.fmean(first)
    if half == 1:
        return drift, 0.0
    step = (statistics.variance(first) + statistics.variance(last)) / 2
    places = (*range(half), *range(len(rates) - half, len(rates)))
    both = (*first, *last)
    slope, start = statistics.linear_regression(places, both)
    left = (rate - start - slope * at for at, rate in zip(places, both, strict=True))
    scatter = min(step, math.fsum(each * each for each in left) / (2 * half - 2))
    return drift, student_t(2 * half - 2) * math.sqrt(2 * scatter / half)


def most_drift(rates: Sequence[float], *, has_periods: bool) -> float:
    """The drift that is fair without regard to noise, relative to the mean rate.

    `has_periods`: the window holds more than one, or is of an open loop.
    """
    if not has_periods:
        return SWING
    return DRIFT_OF_TWO if len(rates) // 2 == 1 else DRIFT


def token_times(load: LoadRun) -> list[float]:
    """When each output token of a load came, ascending; failed requests deliver nothing."""
    return sorted(
        time_s
        for record in load.records
        if record.status is not RequestStatus.FAILED
        for time_s in record.token_s
    )


def end_times(load: LoadRun) -> list[float]:
    """When each request ended that was not cut, ascending."""
    return sorted(r.end_s for r in load.records if r.status is not RequestStatus.CUT)


def rate_in(token_s: Sequence[float], start_s: float, end_s: float) -> float:
    """Tokens per second in (start_s, end_s]; `token_s` ascend."""
    if end_s <= start_s:
        return 0.0
    return (bisect_right(token_s, end_s) - bisect_right(token_s, start_s)) / (end_s - start_s)


def period_ends(
    request_end_s: Sequence[float], concurrency: int, start_s: float
) -> Sequence[float]:
    """Where the periods of a closed loop end after `start_s`, by the ends of its requests."""
    first = bisect_right(request_end_s, start_s)
    return request_end_s[first + concurrency - 1 :: concurrency]


def rate_batches(
    token_s: Sequence[float],
    request_end_s: Sequence[float],
    concurrency: int | None,
    start_s: float,
    end_s: float,
) -> list[float]:
    """The token rates of the batches of a window, from its records, by the rule above.

    Args:
        token_s: the time of every output token, ascending.
        request_end_s: the time at which each request ended, ascending.
        concurrency: requests per period; None: a load without periods.
        start_s: where the window starts.
        end_s: where the window ends.
    """
    if end_s <= start_s:
        return []
    period_ends_s: Sequence[float] = ()
    if concurrency is not None:
        period_ends_s = period_ends(request_end_s, concurrency, start_s)
    edges_s = batch_edges(start_s, end_s, period_ends_s)
    return batch_rates(edges_s, lambda time_s: bisect_right(token_s, time_s))
