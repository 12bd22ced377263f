"""MLflow kept off the measuring thread: opened and written by one thread of its own, in order.

Opening MLflow takes seconds and logging a trial up to one; meanwhile the next launch starts. The
driver waits for it before it measures: it takes a core, and the load generator may be in this
process. The files of the study are the truth: what a dead driver did not log, the next session
logs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from runner.record.tracking import Tracker
from runner.trial import TrialResult


class BackgroundTracker:
    """A Tracker whose calls return at once; the first failure is raised by a later call."""

    def __init__(self, open_tracker: Callable[[], Tracker]) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        self._tracker: Future[Tracker] = self._thread.submit(open_tracker)
        self._pending: list[Future[object]] = []

    def log_trial(self, result: TrialResult) -> None:
        """Log a finished trial, after those before it."""
        self._raise_failures()
        self._submit(lambda tracker: tracker.log_trial(result))

    def wait(self) -> None:
        """Wait until all is logged, so that nothing competes with a measurement."""
        wait([self._tracker])
        wait(self._pending)
        self._raise_failures()

    def finish(self, state: str, best: int | None) -> None:
        """Wait for everything, then end the parent run."""
        self._submit(lambda tracker: tracker.finish(state, best))
        self._thread.shutdown(wait=True)
        self._raise_failures()

    def _submit(self, call: Callable[[Tracker], object]) -> None:
        self._pending.append(self._thread.submit(lambda: call(self._tracker.result())))

    def _raise_failures(self) -> None:
        done = [each for each in self._pending if each.done()]
        self._pending = [each for each in self._pending if not each.done()]
        for each in done:
            each.result()
