"""How the pipeline's time runs against the server's clock: alike, until the GPUs slow down."""

from __future__ import annotations


class Pace:
    """Maps readings of the clock to the pipeline's times and back.

    `speed` is pipeline seconds per second of the clock: with GPUs at 70 % of their clock, what
    the pipeline thinks takes 0.7 s takes 1 s.
    """

    def __init__(self) -> None:
        self.speed = 1.0
        self._clock_s = 0.0
        self._pipeline_s = 0.0

    def to_pipeline(self, clock_s: float) -> float:
        """The pipeline's time at this reading of the clock."""
        return self._pipeline_s + (clock_s - self._clock_s) * self.speed

    def to_clock(self, pipeline_s: float) -> float:
        """What the clock reads at this time of the pipeline."""
        return self._clock_s + (pipeline_s - self._pipeline_s) / self.speed

    def slow_down(self, speed: float, now_s: float) -> None:
        """From now on the pipeline's time runs at this speed."""
        self._pipeline_s = self.to_pipeline(now_s)
        self._clock_s = now_s
        self.speed = speed
