"""MLflow kept off the measuring thread: opened and written by one thread of its own, in order.

Opening MLflow takes seconds and logging a trial up to one; meanwhile the next launch starts. The
study's files are the truth: what is not logged when a driver dies, the next session logs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

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
