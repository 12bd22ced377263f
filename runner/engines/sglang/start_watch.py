"""Watches a server start: which phase it is in, whether it gets on, and when it took too long."""

from __future__ import annotations

from collections.abc import Mapping

from runner.clock import Clock
from runner.engines.processes import GroupWork
from runner.engines.sglang.logs import LogReader, PhaseTimes, shows_hang
from runner.engines.sglang.process import ServerProcess
from runner.engines.sglang.start_limits import PhaseLimit

BUSY_SHARE = 0.05  # of one core; idle threads of a hung server use less
BUSY_BYTES_PER_S = 1 << 20  # read from a disk or the page cache; pipes carry less
LOOKS_PER_LIMIT = 4  # at processes, in the time that a phase may be without progress
DUMP_ALLOWANCE_S = 60.0
"""What a server gets to write down where it hangs, once its own watchdog has fired."""


class StartWatch:
    """Log lines, CPU time and disk reads of one start; all times are on the study's clock."""

    def __init__(
        self,
        process: ServerProcess,
        log: LogReader,
        clock: Clock,
        limits: Mapping[str, PhaseLimit],
    ) -> None:
        now_s = clock.now_s()
        self.phases = PhaseTimes(now_s)
        self._process = process
        self._log = log
        self._clock = clock
        self._limits = limits
        self._phase = self.phases.current()
        self._phase_since_s = now_s
        self._progress_s = now_s
        self._work: GroupWork | None = None
        self._work_s = now_s
        self._dump_s = 0.0

    def look(self) -> None:
        """Read what the log has got since the last look, and now and then what the group did."""
        now_s = self._clock.now_s()
        for line in self._log.read_lines():
            self.phases.note(line, now_s)
            self._progress_s = now_s
            if shows_hang(line):
                self._dump_s = DUMP_ALLOWANCE_S
        phase = self.phases.current()
        if phase != self._phase:
            self._phase, self._phase_since_s, self._progress_s = phase, now_s, now_s
        if self._work is None or now_s - self._work_s >= self._limit.quiet_s / LOOKS_PER_LIMIT:
            self._look_at_work(now_s)

    def verdict(self) -> str | None:
        """Why this start is given up, None while it may go on."""
        now_s, limit = self._clock.now_s(), self._limit
        taken_s, quiet_s = now_s - self._phase_since_s, now_s - self._progress_s
        if taken_s > limit.most_s + self._dump_s:
            return (
                f"the server hangs while starting, or is too slow: phase {self._phase} has taken "
                f"{taken_s:.0f} s, at most {limit.most_s:.0f} s are allowed"
            )
        if quiet_s > limit.quiet_s + self._dump_s:
            return (
                f"the server hangs while starting: in phase {self._phase}, which has taken "
                f"{taken_s:.0f} s, it has neither logged nor computed nor read for {quiet_s:.0f} s "
                f"(at most {limit.quiet_s:.0f} s)"
            )
        return None

    @property
    def _limit(self) -> PhaseLimit:
        return self._limits[self._phase]

    def _look_at_work(self, now_s: float) -> None:
        work, before = self._process.group.work(), self._work
        wall_s = self._clock.wall_duration_s(now_s - self._work_s)
        if before is not None and (
            work.cpu_s - before.cpu_s > BUSY_SHARE * wall_s
            or work.read_bytes - before.read_bytes > BUSY_BYTES_PER_S * wall_s
        ):
            self._progress_s = now_s
        self._work, self._work_s = work, now_s
