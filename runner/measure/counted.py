"""A load of a given number of requests: when it ends, and which part of it is steady.

The load ends when all of its requests have ended. Its totals are taken from the first send to the
last end, with the ramp-up and the tail in them. Its steady window is found afterwards, from the
records, as a span (start_s, end_s]:

closed_loop. It ends with full concurrency: when a request ends and there is nothing more to send.
It starts three mean request durations after the first send, where that leaves at least two
requests per stream to end in it; else when `concurrency` requests have ended, where that leaves
one per stream; else there is none.

open_loop. It ends with the last arrival. It starts three mean request durations after the first
one, where that leaves at least ten requests to end in it; else there is none.

burst. There is none: the load rises and falls by nature.

A load whose last requests all failed lost its server; it has no full concurrency after the first
of those failures.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeAlias

from runner.measure.batches import (
    drift_of,
    end_times,
    most_drift,
    period_ends,
    rate_batches,
    token_times,
)
from runner.measure.window import Counts, Window, WindowRule
from runner.trial import LoadPlan, LoadProtocol, LoadRun, RequestRecord, RequestStatus

RAMP_UP_DURATIONS = 3.0
FEWEST_OPEN_LOOP = 10
CHECK_INTERVAL_S = 0.25

Span: TypeAlias = tuple[float, float]


class CountedRule:
    """Says when a load of `requests` requests is over; the window is all of it."""

    def __init__(self, requests: int, started_s: float) -> None:
        self.check_interval_s = CHECK_INTERVAL_S
        self._requests = requests
        self._started_s = started_s

    def observe(self, now_s: float, counts: Counts) -> Window | None:
        """Take the totals since the start of the load; a Window means: all have ended."""
        if counts.finished < self._requests:
            return None
        return Window(self._started_s, now_s, is_steady=True)


def rule_for(plan: LoadPlan, started_s: float) -> WindowRule | CountedRule:
    """What says when a load of this plan ends."""
    if plan.requests is None:
        return WindowRule(plan, started_s)
    return CountedRule(plan.requests, started_s)


def whole_span(load: LoadRun) -> Span:
    """From the first send to the last end."""
    return (
        min(record.send_s for record in load.records),
        max(record.end_s for record in load.records),
    )


def steady_span(load: LoadRun, plan: LoadPlan) -> Span | None:
    """The steady window of a counted load by the rule of this module; None: it has none."""
    if plan.protocol is LoadProtocol.BURST or not load.records:
        return None
    mean_s = mean_duration_s(load)
    if mean_s is None:
        return None
    ends_s = end_times(load)
    end_s = min(_full_until_s(load.records, plan), _lost_s(load.records))
    start_s = whole_span(load)[0] + RAMP_UP_DURATIONS * mean_s
    is_open = plan.protocol is LoadProtocol.OPEN_LOOP
    if _count(ends_s, start_s, end_s) >= (FEWEST_OPEN_LOOP if is_open else 2 * plan.concurrency):
        return start_s, end_s
    if is_open or len(ends_s) < plan.concurrency:
        return None
    start_s = ends_s[plan.concurrency - 1]
    return (start_s, end_s) if _count(ends_s, start_s, end_s) >= plan.concurrency else None


def requests_wanted(load: LoadRun, plan: LoadPlan) -> int:
    """About how many requests give a load like this one a steady window; 0: no number does."""
    match plan.protocol:
        case LoadProtocol.BURST:
            return 0
        case LoadProtocol.CLOSED_LOOP:
            # The first and the last `concurrency` of them end outside.
            return 3 * plan.concurrency
        case LoadProtocol.OPEN_LOOP:
            # Those of the ramp-up, those still running at the last arrival, and those that count.
            durations = (RAMP_UP_DURATIONS + 1.0) * (mean_duration_s(load) or 0.0)
            return math.ceil((plan.rate or 0.0) * durations) + 2 * FEWEST_OPEN_LOOP


def mean_duration_s(load: LoadRun) -> float | None:
    """From send to end, over the requests that ended OK; None when none did."""
    durations_s = [r.end_s - r.send_s for r in load.records if r.status is RequestStatus.OK]
    return statistics.fmean(durations_s) if durations_s else None


def drift_reason(load: LoadRun, plan: LoadPlan, span: Span) -> str | None:
    """Why a window is not steady after all, in words for the user; None when it is.

    The limits are those of the longest window in measure/window.py.
    """
    start_s, end_s = span
    concurrency = plan.concurrency if plan.protocol is LoadProtocol.CLOSED_LOOP else None
    ends_s = end_times(load)
    rates = rate_batches(token_times(load), ends_s, concurrency, start_s, end_s)
    if len(rates) <= 1 or not any(rates):
        return None
    periods = 0 if concurrency is None else len(period_ends(ends_s, concurrency, start_s))
    is_many = plan.protocol is LoadProtocol.OPEN_LOOP or periods > 1
    drift, noise = drift_of(rates)
    share = drift / statistics.fmean(rates)
    if abs(drift) <= noise or abs(share) <= most_drift(rates, has_periods=is_many):
        return None
    return f"not steady: the token rate changed by {share:+.0%} from the window's first half on"


def _full_until_s(records: Sequence[RequestRecord], plan: LoadPlan) -> float:
    """Until when requests were sent as the plan wants."""
    last_send_s = max(record.send_s for record in records)
    if plan.protocol is LoadProtocol.OPEN_LOOP:
        return last_send_s
    later_s = (record.end_s for record in records if record.end_s > last_send_s)
    return min(later_s, default=last_send_s)


def _lost_s(records: Sequence[RequestRecord]) -> float:
    """When the first of the failures came that the load ended with; infinity without any."""
    lost_s = math.inf
    ended = [record for record in records if record.status is not RequestStatus.CUT]
    for record in sorted(ended, key=lambda each: each.end_s, reverse=True):
        if record.status is not RequestStatus.FAILED:
            break
        lost_s = record.end_s
    return lost_s


def _count(ends_s: Sequence[float], start_s: float, end_s: float) -> int:
    """How many ended in (start_s, end_s]."""
    return max(bisect_right(ends_s, end_s) - bisect_right(ends_s, start_s), 0)
