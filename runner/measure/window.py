"""When one load may stop and which part of it counts: the steady window.

A window is the half-open span (start_s, end_s]: what happens at start_s belongs to the ramp-up.

closed_loop. A period is the time in which `concurrency` requests finish: about one mean request
duration. The window opens when

- every stream has begun (load/ramp.py), and a whole period has ended since,
- three periods have ended since the load began: three mean request durations, and
- the two halves of the last period agree, in tokens per second and in the number of requests that
  are being answered, within a tenth (`SETTLED`) or, after three more periods, without regard to it.

Requests that were sent together finish together, and the token rate then swings once per period,
so a window ends only where a whole number of periods ends: at the first such place where it holds
`min_periods` of them and is at least `min_window_s` long. After `max_window_s` it ends at the last
such place that leaves it `min_window_s`, or at once if there is none. It is steady when it does not
drift: the mean rates of the first and of the last half of its batches differ by at most a tenth
(half, when it holds fewer than two periods: a swing cannot be told from drift there; 15 %, when
each half is one batch and their scatter cannot be told), or by no more than their scatter explains;
and when its ramp-up was not cut off, which happens after `max_ramp_s`, by default half an
hour, or 24 times `max_window_s` where that is longer. A drift slower than that is seen only by
comparing restarts of the load: measure/restarts.py.

A closed loop that cannot matter (LoadPlan.worth) ends in its ramp-up, with its last period as its
window: measure/hopeless.py.

Batches: measure/batches.py.

open_loop. Opens after half of `min_window_s` and three mean request durations (by Little's law:
when three times as many requests have finished as are in flight), at the latest after
`max_window_s`; ends as closed_loop, where a period is the time in which as many requests finish as
were in flight when it opened. burst: from the first send to the end of the last request. A warm-up
sends one request per stream and ends when as many have finished. Burst and warm-up give up after 5
times `max_window_s`.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from runner.measure.batches import batch_edges, batch_rates, drift_of, most_drift
from runner.measure.hopeless import HopelessWatch
from runner.trial import LoadPlan, LoadProtocol

RAMP_PERIODS = 3
SETTLED = 0.1
MOST_SETTLING = 3
GIVE_UP = 5.0
RAMP_GIVE_UP = 24.0
RAMP_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Window:
    """The span (start_s, end_s] that counts; `is_steady` by the rule of this module.

    `is_hopeless`: the load ends early, by the rule of measure/hopeless.py.
    """

    start_s: float
    end_s: float
    is_steady: bool
    is_hopeless: bool = False


class Counts(NamedTuple):
    """Running totals of one load: what has come, and what was begun.

    `streams` have begun to send (closed loop); `answering` requests have their first token and
    have not ended; `sent` requests were sent, `finished` ended.
    """

    output_tokens: int
    sent: int
    finished: int
    answering: int
    streams: int


class WindowRule:
    """Watches running totals of one load and says when it may stop.

    `observe` is called about every `check_interval_s` seconds, and better also whenever a request
    ends: then windows end exactly where periods end.
    """

    def __init__(self, plan: LoadPlan, started_s: float) -> None:
        self.check_interval_s = min(max(plan.min_window_s / 40, 0.01), 1.0)
        self._plan = plan
        self._started_s = started_s
        self._ramp = _RampWatch(plan, started_s)
        self._hopeless = _hopeless_watch(plan)
        self._curve: _Curve | None = None
        self._finished_at_open = 0
        self._period = 0  # requests of one; 0: the load has no periods
        self._periods = 0
        self._period_ends_s: list[float] = []
        self._window: Window | None = None

    def observe(self, now_s: float, counts: Counts) -> Window | None:
        """Take the totals since the start of the load; a Window means: the load may stop."""
        if self._window is None:
            self._window = self._judge(now_s, counts)
        return self._window

    def _judge(self, now_s: float, counts: Counts) -> Window | None:
        plan = self._plan
        if plan.is_warmup or plan.protocol is LoadProtocol.BURST:
            return self._judge_all(now_s, counts.finished)
        if self._curve is None:
            return self._judge_ramp(now_s, counts)
        self._curve.add(now_s, counts.output_tokens)
        is_period_end = self._note_periods(now_s, counts.finished)
        length_s = now_s - self._curve.start_s
        is_whole = is_period_end and self._periods >= plan.min_periods
        if is_whole and length_s >= plan.min_window_s:
            return self._close(self._curve, now_s)
        if length_s < plan.max_window_s:
            return None
        end_s = self._last_end_s(self._curve.start_s + plan.min_window_s, now_s)
        return self._close(self._curve, end_s)

    def _judge_ramp(self, now_s: float, counts: Counts) -> Window | None:
        if self._hopeless is not None:
            span = self._hopeless.look(now_s, counts.streams, counts.finished, counts.output_tokens)
            if span is not None:
                return Window(*span, is_steady=False, is_hopeless=True)
        if self._ramp.is_over(now_s, counts):
            self._open(now_s, counts)
        return None

    def _judge_all(self, now_s: float, finished: int) -> Window | None:
        if finished >= self._plan.concurrency:
            return Window(self._started_s, now_s, is_steady=True)
        if now_s - self._started_s >= GIVE_UP * self._plan.max_window_s:
            return Window(self._started_s, now_s, is_steady=False)
        return None

    def _open(self, now_s: float, counts: Counts) -> None:
        self._curve = _Curve(now_s, counts.output_tokens)
        self._finished_at_open = counts.finished
        is_open_loop = self._plan.protocol is LoadProtocol.OPEN_LOOP
        in_flight = counts.sent - counts.finished
        self._period = max(in_flight, 1) if is_open_loop else self._plan.concurrency

    def _note_periods(self, now_s: float, finished: int) -> bool:
        """Whether a whole number of periods ends now."""
        periods = (finished - self._finished_at_open) // self._period
        if periods == self._periods:
            return False
        # Several periods in one look count as one end: only that one was seen.
        self._periods = periods
        self._period_ends_s.append(now_s)
        return True

    def _last_end_s(self, earliest_s: float, now_s: float) -> float:
        ends_s = [end_s for end_s in self._period_ends_s if end_s >= earliest_s]
        return ends_s[-1] if ends_s else now_s

    def _close(self, curve: _Curve, end_s: float) -> Window:
        is_steady = not self._ramp.was_cut and self._is_fair(curve, end_s)
        return Window(curve.start_s, end_s, is_steady)

    def _is_fair(self, curve: _Curve, end_s: float) -> bool:
        rate = curve.rate(curve.start_s, end_s)
        edges_s = batch_edges(curve.start_s, end_s, self._period_ends_s)
        rates = batch_rates(edges_s, curve.tokens_at)
        if rate <= 0 or len(rates) <= 1:
            return False
        is_open_loop = self._plan.protocol is LoadProtocol.OPEN_LOOP
        periods = sum(period_s <= end_s for period_s in self._period_ends_s)
        drift, noise = drift_of(rates)
        limit = most_drift(rates, has_periods=is_open_loop or periods > 1)
        return abs(drift) <= max(limit * rate, noise)


def _hopeless_watch(plan: LoadPlan) -> HopelessWatch | None:
    if plan.worth is None or plan.protocol is not LoadProtocol.CLOSED_LOOP:
        return None
    return HopelessWatch(plan.worth, plan.concurrency)


def longest_ramp_s(plan: LoadPlan) -> float:
    """When a ramp-up is cut off, in seconds since the load began."""
    if plan.max_ramp_s is not None:
        return plan.max_ramp_s
    return max(RAMP_GIVE_UP * plan.max_window_s, RAMP_LIMIT_S)


def longest_load_s(plan: LoadPlan) -> float:
    """What no load of this plan exceeds, but for the looks between."""
    if plan.is_warmup or plan.protocol is LoadProtocol.BURST:
        return (GIVE_UP + 1) * plan.max_window_s
    return longest_ramp_s(plan) + 2 * plan.max_window_s


class _RampWatch:
    """Says when the ramp-up of a load is over."""

    def __init__(self, plan: LoadPlan, started_s: float) -> None:
        self._plan = plan
        self._started_s = started_s
        self._limit_s = longest_ramp_s(plan)
        self._full: int | None = None  # requests finished when the last stream began
        self._seen = 0  # half periods that have ended since
        self._halves: list[tuple[float, Counts]] = []  # where each of them ended
        self._answering: list[int] = []
        self._means: list[float] = []
        self.was_cut = False

    def is_over(self, now_s: float, counts: Counts) -> bool:
        """Whether the window may open now."""
        plan = self._plan
        since_start_s = now_s - self._started_s
        self.was_cut = since_start_s >= self._limit_s
        if self.was_cut:
            return True
        if plan.protocol is LoadProtocol.OPEN_LOOP:
            in_flight = counts.sent - counts.finished
            is_long = counts.finished >= RAMP_PERIODS * max(in_flight, 1)
            return since_start_s >= plan.min_window_s / 2 and (
                is_long or since_start_s >= plan.max_window_s
            )
        return self._is_settled(now_s, counts)

    def _is_settled(self, now_s: float, counts: Counts) -> bool:
        concurrency = self._plan.concurrency
        if counts.streams < concurrency:
            return False
        if self._full is None:
            self._full = counts.finished
            self._halves.append((now_s, counts))
        self._answering.append(counts.answering)
        since_full = counts.finished - self._full
        halves = since_full // max(concurrency // 2, 1)
        if halves <= self._seen:
            return False
        self._seen = halves
        self._halves.append((now_s, counts))
        self._means.append(statistics.fmean(self._answering))
        self._answering.clear()
        if since_full < concurrency or counts.finished < RAMP_PERIODS * concurrency:
            return False
        return since_full >= (RAMP_PERIODS + MOST_SETTLING) * concurrency or self._agree()

    def _agree(self) -> bool:
        """Whether the last two half periods were alike."""
        if len(self._means) <= 1:
            return True
        (start_s, start), (middle_s, middle), (end_s, end) = self._halves[-3:]
        if not start_s < middle_s < end_s:
            return True
        first = (middle.output_tokens - start.output_tokens) / (middle_s - start_s)
        last = (end.output_tokens - middle.output_tokens) / (end_s - middle_s)
        return _alike(first, last) and _alike(*self._means[-2:])


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= SETTLED * max(one, other)


class _Curve:
    """Output tokens over time since a window opened, linear between looks."""

    def __init__(self, start_s: float, tokens: int) -> None:
        self.start_s = start_s
        self._times_s = [start_s]
        self._tokens = [tokens]

    def add(self, now_s: float, tokens: int) -> None:
        if now_s > self._times_s[-1]:
            self._times_s.append(now_s)
            self._tokens.append(tokens)
        else:
            self._tokens[-1] = tokens

    def tokens_at(self, time_s: float) -> float:
        after = bisect_right(self._times_s, time_s)
        if after == 0:
            return self._tokens[0]
        if after == len(self._times_s):
            return self._tokens[-1]
        left_s, right_s = self._times_s[after - 1], self._times_s[after]
        left, right = self._tokens[after - 1], self._tokens[after]
        return left + (right - left) * (time_s - left_s) / (right_s - left_s)

    def rate(self, start_s: float, end_s: float) -> float:
        if end_s <= start_s:
            return 0.0
        return (self.tokens_at(end_s) - self.tokens_at(start_s)) / (end_s - start_s)
