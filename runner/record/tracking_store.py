"""An MLflow store behind a few typed calls. The one file that imports mlflow, and only when used.

Runs are named by their ids everywhere; MLflow's global active run is never touched. A store that
is locked by another process is tried again for a while.
"""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from runner.errors import StudyError
from runner.record.lock import LockMode, hold_lock

T = TypeVar("T")
SQLITE = "sqlite:///"
METRICS_PER_CALL = 1000  # MLflow's own limits
PAIRS_PER_CALL = 100
RUNS_PER_PAGE = 1000
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
PATIENCE_S = 120.0
PARENT_TAG = "mlflow.parentRunId"


class RunStatus(StrEnum):
    """MLflow's words for how a run stands."""

    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    KILLED = "KILLED"


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """One value of one metric."""

    key: str
    value: float
    time_ms: int
    step: int


@dataclass(frozen=True, slots=True)
class RunSight:
    """What is asked of a run that is there."""

    run_id: str
    status: RunStatus
    tags: Mapping[str, str]


def sqlite_path(uri: str) -> Path | None:
    """The file of a sqlite store; None for a server."""
    return Path(uri.removeprefix(SQLITE)) if uri.startswith(SQLITE) else None


def store_lock(uri: str) -> AbstractContextManager[None]:
    """The lock under which a store is created and migrated; servers need none."""
    path = sqlite_path(uri)
    if path is None:
        return nullcontext()
    return hold_lock(path.with_name(f"{path.name}.lock"), LockMode.WAIT)


class MlflowStore:
    """One tracking store (a sqlite file or a server)."""

    def __init__(self, uri: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self.uri = uri
        self._sleep = sleep
        # Telemetry stays off unless the user asks for it; MLflow reads this when imported.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("DO_NOT_TRACK", "true")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        import mlflow
        from sqlalchemy.exc import SQLAlchemyError

        # `Any`: the few calls used are typed by this class.
        self._mlflow: Any = mlflow
        self._errors = (mlflow.exceptions.MlflowException, SQLAlchemyError)
        for name in ("mlflow.store.db.utils", "alembic"):  # tables being made; locks being retried
            logging.getLogger(name).setLevel(logging.CRITICAL)
        # MLflow's tables use what SQLAlchemy will drop one day; theirs to change.
        warnings.filterwarnings("ignore", "The ``noload`` loader strategy", DeprecationWarning)
        with store_lock(uri):
            self._make_tables()
            self._client: Any = self._patiently(lambda: self._open(uri))

    def experiment(self, name: str, artifacts: str | None, tags: Mapping[str, str]) -> str:
        """The id of the experiment, made or brought back if needed, with these tags set."""
        found = self._patiently(lambda: self._client.get_experiment_by_name(name))
        if found is None:
            made = self._patiently(lambda: self._client.create_experiment(name, artifacts))
            identity = str(made)
        else:
            identity = str(found.experiment_id)
            if found.lifecycle_stage == "deleted":
                self._patiently(lambda: self._client.restore_experiment(identity))
        old = {} if found is None else found.tags
        for key, value in tags.items():
            if old.get(key) != value:
                self._set_experiment_tag(identity, key, value)
        return identity

    def runs(self, experiment: str, query: str) -> Iterator[RunSight]:
        """The runs that match MLflow's search `query`, oldest first."""
        token: str | None = None
        while True:
            page = self._search(experiment, query, token)
            for run in page:
                yield RunSight(run.info.run_id, RunStatus(run.info.status), run.data.tags)
            token = page.token
            if not token:
                return

    def create_run(
        self, experiment: str, name: str, start_ms: int | None, tags: Mapping[str, str]
    ) -> str:
        """Make a run and return its id; it is RUNNING."""
        run = self._patiently(
            lambda: self._client.create_run(
                experiment, start_time=start_ms, tags=dict(tags), run_name=name
            )
        )
        return str(run.info.run_id)

    def log(
        self,
        run_id: str,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        metrics: Sequence[MetricPoint] = (),
    ) -> None:
        """Log all of it in as few calls as MLflow's limits allow.

        Raises StudyError for a value that is not finite: MLflow would store it silently.
        """
        for point in metrics:
            if not math.isfinite(point.value):
                raise StudyError(f"metric {point.key} is {point.value}, which MLflow cannot show")
        entities = self._mlflow.entities
        points = [entities.Metric(p.key, p.value, p.time_ms, p.step) for p in metrics]
        asked = [entities.Param(key, value) for key, value in (params or {}).items()]
        labels = [entities.RunTag(key, value) for key, value in (tags or {}).items()]
        for part in _chunks(asked, PAIRS_PER_CALL):
            self._log_batch(run_id, params=part)
        for part in _chunks(labels, PAIRS_PER_CALL):
            self._log_batch(run_id, tags=part)
        for part in _chunks(points, METRICS_PER_CALL):
            self._log_batch(run_id, metrics=part)

    def log_artifact(self, run_id: str, path: Path, folder: str | None = None) -> None:
        """Copy a file to the run's artifacts; the same name is replaced."""
        self._patiently(lambda: self._client.log_artifact(run_id, str(path), folder))

    def reopen(self, run_id: str) -> None:
        """Set a run back to RUNNING."""
        self._patiently(lambda: self._client.update_run(run_id, status=RunStatus.RUNNING.value))

    def end(self, run_id: str, status: RunStatus, end_ms: int | None = None) -> None:
        """Give a run its last status."""
        self._patiently(lambda: self._client.set_terminated(run_id, status.value, end_ms))

    def _make_tables(self) -> None:
        """Make a new sqlite store beside its place: one that was cut off is made anew."""
        path = sqlite_path(self.uri)
        if path is None or path.exists():
            return
        fresh = path.with_name(f".{path.name}.new")
        for leftover in path.parent.glob(f"{fresh.name}*"):
            leftover.unlink()
        self._patiently(lambda: self._open(f"{SQLITE}{fresh}"))
        fresh.replace(path)

    def _open(self, uri: str) -> object:
        """A client whose store was asked once, so that its tables are there."""
        client = self._mlflow.MlflowClient(uri)
        client.search_experiments(max_results=1)
        return client

    def _search(self, experiment: str, query: str, token: str | None) -> Any:  # noqa: ANN401
        return self._patiently(
            lambda: self._client.search_runs(
                [experiment],
                query,
                max_results=RUNS_PER_PAGE,
                order_by=["attributes.start_time ASC"],
                page_token=token,
            )
        )

    def _set_experiment_tag(self, experiment: str, key: str, value: str) -> None:
        self._patiently(lambda: self._client.set_experiment_tag(experiment, key, value))

    def _log_batch(self, run_id: str, **parts: Sequence[object]) -> None:
        self._patiently(lambda: self._client.log_batch(run_id, **parts))

    def _patiently(self, call: Callable[[], T]) -> T:
        """Call again while another process locks the store; other errors end the study."""
        pause_s, waited_s = FIRST_PAUSE_S, 0.0
        while True:
            try:
                return call()
            except self._errors as error:
                is_locked = "database is locked" in str(error)
                if not is_locked or waited_s >= PATIENCE_S:
                    raise StudyError(self._explain(error, is_locked=is_locked)) from error
            self._sleep(pause_s)
            waited_s += pause_s
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _explain(self, error: Exception, *, is_locked: bool) -> str:
        if is_locked:
            return (
                f"MLflow's store {self.uri} stays locked by another process; close that, then "
                "continue the study: what is missing in MLflow is logged again from its files"
            )
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"MLflow's store {self.uri} refuses: {why}"


def _chunks(items: Sequence[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part
