"""A study in MLflow: one experiment, a parent run for the study, a child run for each trial.

Everything comes from the study's files, times included: a trial may be logged again after a
crash, and a store that was lost or exchanged is filled again when the study continues.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from pathlib import Path

from runner.cluster.executor import LaunchReport
from runner.lengths import law_words
from runner.record.run_content import (
    KIND_TAG,
    NOTE_TAG,
    STUDY_KIND,
    TRIAL_KIND,
    TRIAL_TAG,
    TrialTimes,
    run_metrics,
    run_name,
    run_note,
    run_params,
    run_status,
    run_tags,
)
from runner.record.run_views import experiment_tags
from runner.record.store import StudyState, StudyStore
from runner.record.tracking_store import MetricPoint, MlflowStore, RunSight, RunStatus
from runner.settings import Direction, StudySettings
from runner.trial import EngineKind, Outcome, TrialResult

LAUNCH_ARTIFACTS = "launch"
VERSION_TAG = "sglang_version"
ENDS = {
    StudyState.FINISHED: RunStatus.FINISHED,
    StudyState.INTERRUPTED: RunStatus.KILLED,
    StudyState.STOPPED: RunStatus.FAILED,
}


class Tracker:
    """Shows one study in MLflow. The driver alone uses it; it may do so from several threads."""

    def __init__(self, uri: str, store: StudyStore, settings: StudySettings) -> None:
        """Open (or make) experiment and parent run; log what an earlier session did not."""
        self._store = store
        self._settings = settings
        self._mlflow = MlflowStore(uri)
        artifacts = (store.artifacts_folder / settings.name).as_uri()
        self.experiment_id = self._mlflow.experiment(
            settings.name,
            artifacts if uri == store.mlflow_uri else None,
            experiment_tags(
                settings.objectives,
                [each.name for each in settings.parameters],
                has_two_laws=settings.search.output_tokens is not None,
            ),
        )
        self.parent_run_id = self._open_parent()
        self._children = {int(run.tags[TRIAL_TAG]): run for run in self._find_children()}
        self._best: TrialResult | None = None
        for result in store.results():
            self._keep_best(result)
            self.log_trial(result)

    def log_trial(self, result: TrialResult) -> str:
        """Log a finished trial as a child run, from its files; returns the run's id.

        The status comes last. A run that has its last status is complete and stays as it is.
        """
        number = result.number
        child = self._children.get(number)
        if child is not None and child.status is not RunStatus.RUNNING:
            return child.run_id
        times = self._times(result)
        report = self._report(result)
        version = self._sglang_version(report)
        tags = run_tags(result, self._settings.name, self.parent_run_id) | version
        run_id = self._begin(result, times, tags) if child is None else child.run_id
        if version:
            self._mlflow.log(self.parent_run_id, tags=version)
        self._mlflow.log(
            run_id,
            params=run_params(result),
            tags=tags | {NOTE_TAG: run_note(result, report)},
            metrics=run_metrics(
                result,
                times,
                self._store.power_samples(number),
                () if report is None else report.gpu_uuids,
            ),
        )
        self._log_files(run_id, result)
        self._log_progress(result, times)
        status = run_status(result.outcome)
        self._mlflow.end(run_id, status, times.end_ms(result))
        self._children[number] = RunSight(run_id, status, tags)
        return run_id

    def logged_trials(self) -> frozenset[int]:
        """The trials whose child run is complete."""
        ended = (n for n, run in self._children.items() if run.status is not RunStatus.RUNNING)
        return frozenset(ended)

    def terminate_stale(self, numbers: Collection[int] | None = None) -> tuple[int, ...]:
        """End child runs that are RUNNING (of these trials; default all); returns their trials."""
        stale = [
            (number, run)
            for number, run in sorted(self._children.items())
            if run.status is RunStatus.RUNNING and (numbers is None or number in numbers)
        ]
        for number, run in stale:
            self._mlflow.end(run.run_id, RunStatus.KILLED)
            self._children[number] = RunSight(run.run_id, RunStatus.KILLED, run.tags)
        return tuple(number for number, _ in stale)

    def finish(self, state: str, best: int | None = None) -> None:
        """End the parent run and name the best trial (default: the best value so far)."""
        if best is None and self._best is not None:
            best = self._best.number
        tags = {"state": StudyState(state).value}
        if best is not None:
            tags["best_trial"] = str(best)
        self.terminate_stale()
        self._mlflow.log(self.parent_run_id, tags=tags)
        self._mlflow.end(self.parent_run_id, ENDS[StudyState(state)])

    def _open_parent(self) -> str:
        query = f"tags.{KIND_TAG} = '{STUDY_KIND}' and tags.study = '{self._settings.name}'"
        found = next(self._mlflow.runs(self.experiment_id, query), None)
        if found is None:
            tags = {KIND_TAG: STUDY_KIND, "study": self._settings.name}
            run_id = self._mlflow.create_run(self.experiment_id, self._settings.name, None, tags)
        else:
            run_id = found.run_id
            self._mlflow.reopen(run_id)
        self._mlflow.log(run_id, tags=self._study_tags())
        if self._store.exists():
            self._mlflow.log_artifact(run_id, self._store.study_path)
        return run_id

    def _study_tags(self) -> dict[str, str]:
        engine, objective = self._settings.engine, self._settings.objectives[0]
        work, law = self._settings.workload, self._settings.search.output_tokens
        goal = f"{objective.direction} {objective.metric} at {objective.concurrency:g}"
        tags = {
            "state": StudyState.RUNNING.value,
            "engine": engine.kind.value,
            "profile": engine.profile,
            "model": engine.model,
            "objective": goal,
            "output_tokens": law_words(work.output_tokens),
            "search_output_tokens": None if law is None else law_words(law),
            NOTE_TAG: f"Study **{self._settings.name}**: {goal}. Its trials are the child runs; "
            "the view *Trials, best first* lists them.",
        }
        return {key: value for key, value in tags.items() if value is not None}

    def _find_children(self) -> Iterator[RunSight]:
        query = f"tags.{KIND_TAG} = '{TRIAL_KIND}' and tags.study = '{self._settings.name}'"
        return self._mlflow.runs(self.experiment_id, query)

    def _begin(self, result: TrialResult, times: TrialTimes, tags: dict[str, str]) -> str:
        start_ms = times.start_ms(result)
        run_id = self._mlflow.create_run(self.experiment_id, run_name(result), start_ms, tags)
        self._children[result.number] = RunSight(run_id, RunStatus.RUNNING, tags)
        return run_id

    def _times(self, result: TrialResult) -> TrialTimes:
        source = result.number if result.shares is None else result.shares
        spec = self._store.read_spec(source)  # readings of a clock are of the one that measured
        path = self._store.trial_folder(result.number) / "result.json"
        finished_s = path.stat().st_mtime if path.exists() else time.time()
        return TrialTimes(None if spec is None else spec.anchor, finished_s)

    def _report(self, result: TrialResult) -> LaunchReport | None:
        launch = None if result.launch is None else self._store.read_launch(result.launch)
        return None if launch is None else launch[1]

    def _sglang_version(self, report: LaunchReport | None) -> dict[str, str]:
        """A tag with the version that the servers told; none but for SGLang itself."""
        if report is None or self._settings.engine.kind is not EngineKind.SGLANG:
            return {}
        versions = (info.get("version") for info in report.server_info)
        version = next((each for each in versions if isinstance(each, str)), None)
        return {} if version is None else {VERSION_TAG: version}

    def _log_files(self, run_id: str, result: TrialResult) -> None:
        for path in sorted(self._store.trial_folder(result.number).glob("[!.]*")):
            self._mlflow.log_artifact(run_id, path)
        for path in self._launch_files(result):
            self._mlflow.log_artifact(run_id, path, LAUNCH_ARTIFACTS)

    def _launch_files(self, result: TrialResult) -> list[Path]:
        """launch.json and the server logs, of a launch that failed to start too."""
        log = None if result.log_path is None else Path(result.log_path)
        if result.launch is not None:
            folder = self._store.launch_folder(result.launch)
        elif log is not None and log.is_file():
            folder = log.parent
        else:
            return []
        if folder.parent != self._store.launch_folder(0).parent:
            return [] if log is None else [log]
        return sorted([*folder.glob("launch.json"), *folder.glob("*.log")])

    def _log_progress(self, result: TrialResult, times: TrialTimes) -> None:
        """On the parent run: this trial's value and the best so far, by trial number."""
        self._keep_best(result)
        if not _counts(result) or self._best is None:
            return
        time_ms, number = times.end_ms(result), result.number
        points = [
            MetricPoint("trial_objective", result.values[0], time_ms, number),
            MetricPoint("best_objective", self._best.values[0], time_ms, number),
        ]
        self._mlflow.log(self.parent_run_id, metrics=points)

    def _keep_best(self, result: TrialResult) -> None:
        if not _counts(result):
            return
        sign = 1 if self._settings.objectives[0].direction is Direction.MAXIMIZE else -1
        if self._best is None or sign * result.values[0] > sign * self._best.values[0]:
            self._best = result


def _counts(result: TrialResult) -> bool:
    return result.outcome is Outcome.COMPLETE and result.repeat_of is None and bool(result.values)
