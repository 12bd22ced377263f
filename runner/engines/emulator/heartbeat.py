"""How late an event loop is, felt by doing nothing at regular times.

What is due on a loop waits for all that is ready before it: requests to read, tokens to write. So a
beat that comes late says by how much everything else does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from runner.clock import Clock
from runner.engines.emulator.alarm import Alarm

PERIOD_WALL_S = 0.02


class Heartbeat:
    """Calls `on_beat` every 20 ms of the wall, with how late that was in seconds of the clock."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Clock, on_beat: Callable[[float], object]
    ) -> None:
        self._clock = clock
        self._on_beat = on_beat
        self._alarm = Alarm(loop, self._beat)
        self._set()

    def close(self) -> None:
        """Stop."""
        self._alarm.close()

    def _set(self) -> None:
        self._due_s = self._clock.now_s() + PERIOD_WALL_S * self._clock.scale
        self._alarm.set(self._due_s / self._clock.scale)

    def _beat(self) -> None:
        self._on_beat(self._clock.now_s() - self._due_s)
        self._set()
