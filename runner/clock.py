"""The one clock of a study: monotonic seconds of this machine, scaled for emulated servers.

Emulated servers run `time_scale` times faster than the hardware they stand for. Every time the
project reports is in the seconds of that hardware ("emulated seconds"), so every process of a
study (server, load client, power meter) reads time through a `Clock` of the same scale. All
processes of one machine share CLOCK_MONOTONIC, so their readings can be compared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """Monotonic time multiplied by `scale` (1.0 for real servers)."""

    scale: float = 1.0

    def now_s(self) -> float:
        """Seconds since an arbitrary origin, the same for every process of this machine."""
        return time.monotonic() * self.scale

    def sleep(self, duration_s: float) -> None:
        """Sleep for `duration_s` seconds of this clock; negative durations return at once."""
        if duration_s > 0:
            time.sleep(duration_s / self.scale)

    def wall_duration_s(self, duration_s: float) -> float:
        """How many wall-clock seconds `duration_s` seconds of this clock take."""
        return duration_s / self.scale


@dataclass(frozen=True, slots=True)
class ClockAnchor:
    """Ties a clock to the calendar, so that records can be shown with dates."""

    wall_s: float
    clock_s: float
    scale: float

    @classmethod
    def take(cls, clock: Clock) -> ClockAnchor:
        """Read both clocks now."""
        return cls(wall_s=time.time(), clock_s=clock.now_s(), scale=clock.scale)

    def to_wall_s(self, clock_s: float) -> float:
        """Unix time of a reading of the clock."""
        return self.wall_s + (clock_s - self.clock_s) / self.scale
