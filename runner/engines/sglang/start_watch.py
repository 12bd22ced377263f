"""Watches a server start: how far it is, how long it has been quiet."""

from __future__ import annotations

from runner.clock import Clock
from runner.engines.sglang.logs import LogReader, PhaseTimes
from runner.engines.sglang.process import ServerProcess

BUSY_SHARE = 0.05  # of one core; idle threads of a hung server use less


class StartWatch:
    """Log lines and CPU time of one start; all times are on the study's clock."""

    def __init__(
        self, process: ServerProcess, log: LogReader, clock: Clock, started_s: float
    ) -> None:
        self.phases = PhaseTimes(started_s)
        self._process = process
        self._log = log
        self._clock = clock
        self._quiet_since_s = started_s
        self._cpu_s: float | None = None

    def look(self) -> None:
        """Read what the log has got since the last look."""
        now_s = self._clock.now_s()
        lines = self._log.read_lines()
        for line in lines:
            self.phases.note(line, now_s)
        if lines:
            self._quiet_since_s = now_s
            self._cpu_s = None
        elif self._cpu_s is None:
            self._cpu_s = self._process.group.cpu_s()

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock.now_s() - self.phases.started_s

    def stalls(self, limit_s: float) -> bool:
        """Whether the last `limit_s` seconds brought neither a log line nor work on a CPU."""
        quiet_s = self._clock.now_s() - self._quiet_since_s
        if quiet_s < limit_s or self._cpu_s is None:
            return False
        cpu_s = self._process.group.cpu_s()
        is_busy = cpu_s - self._cpu_s > BUSY_SHARE * self._clock.wall_duration_s(quiet_s)
        if is_busy:
            self._quiet_since_s = self._clock.now_s()
            self._cpu_s = cpu_s
        return not is_busy
