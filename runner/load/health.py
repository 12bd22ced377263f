"""Whether the load generator itself was the limit: its share of a core, and how late it ran."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise

from runner.clock import Clock
from runner.trial import ClientHealth

TICK_S = 0.01
LASTING_TICKS = 3
STANDSTILL_S = 2.0


@dataclass(frozen=True, slots=True)
class _Tick:
    time_s: float
    wall_s: float
    cpu_s: float
    lag_s: float
    calendar_s: float


class HealthMonitor:
    """A callback every 10 ms on the event loop that notes how late it was called.

    CPU time is that of the event loop's own thread: other threads of the process cost us only as
    lag. Both values are in wall seconds, whatever the scale of the study's clock. A lag counts
    when three calls in a row suffered it, or when it took most of the span: one short stall of the
    machine is not the client's limit.
    A machine that was suspended, or whose clock was set, shows as a jump between two calls.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._ticks: list[_Tick] = []
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._due_s = time.monotonic()
        self._tick()

    def stop(self) -> None:
        """Note the last state and end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._note(0.0)

    def health(self, start_s: float, end_s: float) -> ClientHealth:
        """The health over a span of the study's clock; over all, if too little of it was seen."""
        seen = [tick for tick in self._ticks if start_s <= tick.time_s <= end_s]
        if len(seen) <= LASTING_TICKS:
            seen = self._ticks
        wall_s = seen[-1].wall_s - seen[0].wall_s
        cpu_s = seen[-1].cpu_s - seen[0].cpu_s
        return ClientHealth(
            cpu_share=cpu_s / wall_s if wall_s > 0 else 0.0,
            max_lag_s=lasting_lag_s([tick.lag_s for tick in seen], wall_s),
            clock_jump_s=clock_jump_s([(tick.wall_s, tick.calendar_s) for tick in seen]),
        )

    def _tick(self) -> None:
        self._note(max(time.monotonic() - self._due_s, 0.0))
        self._due_s = time.monotonic() + TICK_S
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _note(self, lag_s: float) -> None:
        now_s, wall_s, calendar_s = self._clock.now_s(), time.monotonic(), time.time()
        self._ticks.append(_Tick(now_s, wall_s, time.thread_time(), lag_s, calendar_s))


def clock_jump_s(readings: list[tuple[float, float]]) -> float:
    """The furthest jump between two neighbouring readings of (monotonic, calendar) time.

    It is how far the two drifted apart at once, or the whole time between the two readings if
    that is 2 s and more: nothing was seen of what happened then.
    """
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(readings)]
    apart_s = (abs(calendar_s - wall_s) for wall_s, calendar_s in steps)
    stood_s = (wall_s for wall_s, _ in steps if wall_s >= STANDSTILL_S)
    return max((*apart_s, *stood_s), default=0.0)


def lasting_lag_s(lags_s: list[float], span_s: float) -> float:
    """The highest lag that every one of three neighbouring calls reached, or that took most of it.

    Args:
        lags_s: the lags in order.
        span_s: the wall seconds in which they were seen.
    """
    worst_s = max(lags_s, default=0.0)
    if worst_s > span_s / 2:
        return worst_s
    triples = zip(lags_s, lags_s[1:], lags_s[2:], strict=False)
    return max((min(triple) for triple in triples), default=0.0)
