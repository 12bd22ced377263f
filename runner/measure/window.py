"""When a load may stop and which part of it counts: the steady window.

A window is the half-open span (start_s, end_s]: what happens at start_s belongs to the ramp-up.

closed_loop. The ramp-up ends when `concurrency` requests have finished. A request period is the
time in which `concurrency` further requests finish. Requests that were sent together finish
together, and the token rate then swings once per period, so a window ends only where a whole
number of periods ends. It ends at the first such place where it is at least `min_window_s` long
and the 95 % half-width of its token rate is at most `precision` of the rate. After `max_window_s`
it ends at the last such place that leaves it `min_window_s`, or at once if there is none; it is
then steady when the half-width is at most 5 times `precision`, or when it does not drift: the mean
rates of the first and of the last half of its batches differ by at most 10 times `precision`, or
by no more than their scatter explains. With fewer than two periods a swing cannot be told from
drift, and they may differ by 50 times. When requests are so long that the ramp-up lasts
`max_window_s`, it ends there, and the window is `max_window_s` long without regard to periods.

The half-width is that of batch means: the rates of up to ten batches, Student's t. Batches are
whole periods when the window holds at least three, else ten equal spans. It speaks of this window
on these servers; other launches of the same setting may differ by more.

burst. From the first send to the end of the last request. open_loop: opens after half of
`min_window_s`, then as closed_loop without periods, at any moment. A warm-up sends one request per
stream and ends when as many have finished. Burst and warm-up give up after 5 times `max_window_s`.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runner.trial import LoadPlan, LoadProtocol

BATCHES = 10
FEWEST_PERIODS = 3
LOOSE = 5.0
DRIFT = 10.0
SWING = 50.0
GIVE_UP = 5.0
# Student's t, 97.5 %, for 1 to 9 degrees of freedom.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True, slots=True)
class Window:
    """The span (start_s, end_s] that counts; `is_steady` by the rule of this module."""

    start_s: float
    end_s: float
    is_steady: bool


class WindowRule:
    """Watches running totals of one load and says when it may stop.

    `observe` is called about every `check_interval_s` seconds, and better also whenever a request
    ends: then windows end exactly where periods end.
    """

    def __init__(self, plan: LoadPlan, started_s: float) -> None:
        self.check_interval_s = min(max(plan.min_window_s / 40, 0.01), 1.0)
        self._plan = plan
        self._started_s = started_s
        self._curve: _Curve | None = None
        self._finished_at_open = 0
        self._periods = 0
        self._period_ends_s: list[float] = []
        self._window: Window | None = None

    def observe(self, now_s: float, output_tokens: int, finished_requests: int) -> Window | None:
        """Take the totals since the start of the load; a Window means: the load may stop."""
        if self._window is None:
            self._window = self._judge(now_s, output_tokens, finished_requests)
        return self._window

    def _judge(self, now_s: float, tokens: int, finished: int) -> Window | None:
        plan = self._plan
        if plan.is_warmup or plan.protocol is LoadProtocol.BURST:
            return self._judge_all(now_s, finished)
        if self._curve is None:
            if self._is_ramped_up(now_s, finished):
                self._curve = _Curve(now_s, tokens)
                self._finished_at_open = finished
            return None
        self._curve.add(now_s, tokens)
        is_period_end = self._note_periods(now_s, finished)
        may_end = is_period_end or plan.protocol is LoadProtocol.OPEN_LOOP
        length_s = now_s - self._curve.start_s
        if may_end and length_s >= plan.min_window_s and self._is_precise(self._curve, now_s):
            return Window(self._curve.start_s, now_s, is_steady=True)
        if length_s < plan.max_window_s:
            return None
        end_s = self._last_end_s(self._curve.start_s + plan.min_window_s, now_s)
        return Window(self._curve.start_s, end_s, self._is_fair(self._curve, end_s))

    def _judge_all(self, now_s: float, finished: int) -> Window | None:
        if finished >= self._plan.concurrency:
            return Window(self._started_s, now_s, is_steady=True)
        if now_s - self._started_s >= GIVE_UP * self._plan.max_window_s:
            return Window(self._started_s, now_s, is_steady=False)
        return None

    def _is_ramped_up(self, now_s: float, finished: int) -> bool:
        since_start_s = now_s - self._started_s
        if self._plan.protocol is LoadProtocol.OPEN_LOOP:
            return since_start_s >= self._plan.min_window_s / 2
        return finished >= self._plan.concurrency or since_start_s >= self._plan.max_window_s

    def _note_periods(self, now_s: float, finished: int) -> bool:
        """Whether a whole number of periods ends now."""
        concurrency = self._plan.concurrency
        # A window that opened in the middle of the first requests has no whole periods.
        has_periods = self._finished_at_open >= concurrency
        if self._plan.protocol is LoadProtocol.OPEN_LOOP or not has_periods:
            return False
        periods = (finished - self._finished_at_open) // concurrency
        if periods == self._periods:
            return False
        # Several periods in one look count as one: only its end was seen.
        self._periods = periods
        self._period_ends_s.append(now_s)
        return True

    def _last_end_s(self, earliest_s: float, now_s: float) -> float:
        ends_s = [end_s for end_s in self._period_ends_s if end_s >= earliest_s]
        return ends_s[-1] if ends_s else now_s

    def _is_precise(self, curve: _Curve, end_s: float) -> bool:
        rate = curve.rate(curve.start_s, end_s)
        halfwidth = halfwidth_of(self._batch_rates(curve, end_s))
        return rate > 0 and halfwidth is not None and halfwidth <= self._plan.precision * rate

    def _is_fair(self, curve: _Curve, end_s: float) -> bool:
        rate = curve.rate(curve.start_s, end_s)
        rates = self._batch_rates(curve, end_s)
        halfwidth = halfwidth_of(rates)
        if rate <= 0 or halfwidth is None:
            return False
        if halfwidth <= LOOSE * self._plan.precision * rate:
            return True
        is_open_loop = self._plan.protocol is LoadProtocol.OPEN_LOOP
        periods = sum(period_s <= end_s for period_s in self._period_ends_s)
        limit = DRIFT if is_open_loop or periods > 1 else SWING
        drift, noise = drift_of(rates)
        return abs(drift) <= max(limit * self._plan.precision * rate, noise)

    def _batch_rates(self, curve: _Curve, end_s: float) -> list[float]:
        edges_s = batch_edges(curve.start_s, end_s, self._period_ends_s)
        return batch_rates(edges_s, curve.tokens_at)


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


def halfwidth_of(rates: Sequence[float]) -> float | None:
    """The 95 % half-width of the mean of 2 to 10 batch rates; None when there are fewer."""
    if len(rates) <= 1:
        return None
    return STUDENT_T[len(rates) - 2] * math.sqrt(statistics.variance(rates) / len(rates))


def drift_of(rates: Sequence[float]) -> tuple[float, float]:
    """By how much the last half of the batches is faster, and how much of that noise explains.

    Noise is the 95 % limit of Student's two-sample test; 0 when each half is one batch.
    """
    half = len(rates) // 2
    first, last = rates[:half], rates[-half:]
    drift = statistics.fmean(last) - statistics.fmean(first)
    if half == 1:
        return drift, 0.0
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / half)
    return drift, STUDENT_T[2 * half - 3] * error


def rate_halfwidth(
    token_s: Sequence[float],
    request_end_s: Sequence[float],
    concurrency: int | None,
    start_s: float,
    end_s: float,
) -> float | None:
    """The half-width of the token rate of a window, from its records, by the rule above.

    Args:
        token_s: the time of every output token, ascending.
        request_end_s: the time at which each request ended, ascending.
        concurrency: requests per period; None: a load without periods.
        start_s: where the window starts.
        end_s: where the window ends.
    """
    if end_s <= start_s:
        return None
    period_ends_s: Sequence[float] = ()
    if concurrency is not None:
        first = bisect_right(request_end_s, start_s)
        period_ends_s = request_end_s[first + concurrency - 1 :: concurrency]
    edges_s = batch_edges(start_s, end_s, period_ends_s)
    return halfwidth_of(batch_rates(edges_s, lambda time_s: bisect_right(token_s, time_s)))
