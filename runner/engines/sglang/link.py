"""The link to one server process: calls to it that end when it dies or when we are told to stop.

An HTTP call to a dying server can hang for long, so each runs on a thread of its own while the
caller watches the process and the stop signal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from runner.clock import Clock
from runner.engines.sglang.logs import Death, LogReader, Verdict, explain_death, shows_death
from runner.engines.sglang.logs import last_line as last_line_of
from runner.engines.sglang.process import ServerProcess
from runner.errors import Infeasible, Interrupted, ServerFailed

T = TypeVar("T")
POLL_S = 0.25
POLL_WALL_S = (0.02, 0.25)  # bounds, whatever the clock's scale
EXIT_WALL_S = 1.0  # from a server's last sign to its end, as seen from here


class PortTakenError(Exception):
    """Another program has the server's port. Never leaves this folder."""


class Link:
    """One server process, its log, and the calls to it."""

    def __init__(
        self, process: ServerProcess, log: LogReader, clock: Clock, stop: threading.Event
    ) -> None:
        self.is_ready = False
        self._process = process
        self._log = log
        self._stop = stop
        wall_s = clock.wall_duration_s(POLL_S)
        self._poll_wall_s = min(max(wall_s, POLL_WALL_S[0]), POLL_WALL_S[1])
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ask")
        self._saw_death = False

    def ask(self, call: Callable[[], T]) -> T:
        """Run an HTTP call; raises what a stop, or the server's death, means as soon as it is."""
        future = self._thread.submit(call)
        while not wait([future], timeout=self._poll_wall_s).done:
            self.check()
        try:
            answer = future.result()
        except ServerFailed:
            self._check_exit(self._process.wait_exit(EXIT_WALL_S))
            raise
        self.check()
        return answer

    def check(self) -> None:
        """Raise Interrupted if told to stop, and what the server's death means if it is dead."""
        if self._stop.is_set():
            raise Interrupted("the server was told to stop")
        self._check_exit(self._process.exit_code())

    def pause(self) -> None:
        """Wait a moment; cut short by a stop."""
        self._stop.wait(self._poll_wall_s)

    def check_alive(self) -> None:
        """Raise ServerFailed if the server is dead, or about to die: a part of it is dead."""
        exit_code = self._process.exit_code()
        self._saw_death = self._saw_death or any(map(shows_death, self._log.read_lines()))
        if exit_code is not None or self._saw_death:
            raise self._died(self._explain(exit_code))

    def failed(self, message: str) -> ServerFailed:
        """The error for a server that does not do what it should."""
        last = last_line_of(self._log.read_tail()) or "(none)"
        return ServerFailed(f"{message}; last log line: {last}", str(self._log.path))

    def dead_or(self, message: str) -> ServerFailed:
        """The error for a server that answers no more as it did: its death, if it is dying."""
        exit_code = self._process.wait_exit(EXIT_WALL_S)
        return self.failed(message) if exit_code is None else self._died(self._explain(exit_code))

    def close(self) -> None:
        """Take no more calls; one that hangs ends with the server."""
        self._thread.shutdown(wait=False)

    def _check_exit(self, exit_code: int | None) -> None:
        if exit_code is None:
            return
        death = self._explain(exit_code)
        if self.is_ready:
            raise self._died(death)
        match death.verdict:
            case Verdict.PORT:
                raise PortTakenError(death.message)
            case Verdict.INFEASIBLE:
                raise Infeasible(death.message, str(self._log.path))
            case Verdict.FAILED:
                message = f"the server died while starting: {death.message}"
                raise ServerFailed(message, str(self._log.path))

    def _explain(self, exit_code: int | None) -> Death:
        return explain_death(self._log.read_tail(), exit_code)

    def _died(self, death: Death) -> ServerFailed:
        return ServerFailed(f"the server died: {death.message}", str(self._log.path))
