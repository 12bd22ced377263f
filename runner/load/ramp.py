"""When the next stream of a closed loop begins, if they begin one after another.

Streams that begin together are served together for many request durations: in a pipeline they fill
few of its slots, and the throughput creeps towards its long-run value as newcomers spread. Streams
that begin well apart find the slots as steady traffic would. So the starts are spread over
`DURATIONS` mean request durations. The duration is learned on the way: mean output tokens times
the time per token of all streams so far.
"""

from __future__ import annotations

DURATIONS = 4.0
# Mean request durations before a window opens: 4.1 to 6.0 in simulated loops, 2.8 of one stream.
USUAL_LIVES, LONE_LIVES = 5.5, 3.0


class Ramp:
    """The starts of `streams` streams whose requests have `mean_tokens` output tokens."""

    def __init__(self, streams: int, mean_tokens: float) -> None:
        self._streams = streams
        self._mean_tokens = mean_tokens
        self._started = 0
        self._sum_s = 0.0
        self._last_s = 0.0

    @property
    def started(self) -> int:
        """How many streams have begun."""
        return self._started

    @property
    def is_done(self) -> bool:
        """Whether every stream has begun."""
        return self._started >= self._streams

    def start(self, now_s: float) -> int:
        """Note that the next stream begins; its place in this ramp."""
        self._started += 1
        self._sum_s += now_s
        self._last_s = now_s
        return self._started - 1

    def due_s(self, now_s: float, output_tokens: int) -> float | None:
        """When the next stream is to begin; None: not before the first token has come."""
        if output_tokens <= 0:
            return None
        stream_s = self._started * now_s - self._sum_s
        duration_s = self._mean_tokens * stream_s / output_tokens
        return max(self._last_s + DURATIONS * duration_s / self._streams, now_s)
