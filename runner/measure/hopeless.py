"""When a closed loop is so slow that the rest of it would be wasted time.

The search knows from which rate on a setting may still matter (LoadPlan.worth). A load whose rate
stays below `HOPELESS` times that is ended in its ramp-up already: when every stream has begun and a
whole period has ended since (as many requests as there are streams, about one mean request
duration), and both halves of the last period were that slow. A server that still compiles, or
stands still once, is slow in one half only, and a setting that begins slowly has a fast last half.

`HOPELESS` is the margin for what one period cannot know: a pipeline that creeps from a bad start to
its long-run rate began with 0.65 of it at the least, and servers without CUDA graphs swing by
0.3 between periods (docs/measurement.md).
"""

from __future__ import annotations

from typing import NamedTuple

HOPELESS = 0.5
MARKS = 3  # two half periods lie between


class _Mark(NamedTuple):
    time_s: float
    finished: int
    tokens: int


class HopelessWatch:
    """Watches running totals of a closed loop of `streams` streams until its window opens.

    `worth` is the rate (output tokens/s) from which on these streams may matter.
    """

    def __init__(self, worth: float, streams: int) -> None:
        self._least = HOPELESS * worth
        self._streams = streams
        # Requests of the next half period, and of the one after it: together a whole one.
        self._halves = ((streams + 1) // 2, max(streams // 2, 1))
        self._marks: list[_Mark] = []  # where half periods ended

    def look(
        self, now_s: float, streams: int, finished: int, output_tokens: int
    ) -> tuple[float, float] | None:
        """Take the totals since the start of the load; a span (start_s, end_s]: it is hopeless.

        `streams` have begun, `finished` requests have ended.
        """
        if streams < self._streams:
            return None
        if self._marks:
            if finished - self._marks[-1].finished < self._halves[0]:
                return None
            self._halves = self._halves[::-1]
        self._marks = [*self._marks, _Mark(now_s, finished, output_tokens)][-MARKS:]
        if len(self._marks) < MARKS:
            return None
        start, middle, end = self._marks
        is_slow = self._is_slow(start, middle) and self._is_slow(middle, end)
        return (start.time_s, end.time_s) if is_slow else None

    def _is_slow(self, one: _Mark, other: _Mark) -> bool:
        return other.tokens - one.tokens < self._least * (other.time_s - one.time_s)
