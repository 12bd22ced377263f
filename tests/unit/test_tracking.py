"""A study in MLflow: real sqlite stores, real locks, real processes."""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlflow
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from mlflow.entities import Metric, Run

from runner.canary import CanaryResult, CanaryState
from runner.clock import ClockAnchor
from runner.errors import StudyError
from runner.record.power_series import gpu_series, points_per_series, thin
from runner.record.run_content import TrialTimes, legal_name, run_metrics, run_name, run_note
from runner.record.store import StudyStore
from runner.record.tracking import Tracker
from runner.record.tracking_store import MetricPoint, MlflowStore
from runner.settings import Direction, Objective
from runner.trial import EngineKind, Outcome, PowerSample, TrialResult
from tests.record_samples import (
    GPUS,
    SCALE,
    START_S,
    complete_trial,
    demo_trials,
    write_launch,
    write_study,
    write_trial,
)
from tests.samples import PARAMS, make_result, make_settings

SETTINGS = make_settings()


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with MLflow's tables; making them takes seconds, so tests copy it."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowStore(f"sqlite:///{path}")
    return path


@pytest.fixture
def store(tmp_path: Path, empty_store: Path) -> StudyStore:
    store = StudyStore(tmp_path, "demo")
    store.studies_folder.mkdir()
    shutil.copy(empty_store, store.mlflow_path)
    return store


@pytest.fixture
def tracker(store: StudyStore) -> Tracker:
    store.create({"name": "demo"}, {})
    return Tracker(store.mlflow_uri, store, SETTINGS)


def client(store: StudyStore) -> mlflow.MlflowClient:
    return mlflow.MlflowClient(store.mlflow_uri)


def all_runs(store: StudyStore) -> list[Run]:
    found = client(store)
    experiment = found.get_experiment_by_name("demo")
    assert experiment is not None
    return list(found.search_runs([experiment.experiment_id], max_results=1000))


def children(store: StudyStore) -> dict[int, Run]:
    trials = [run for run in all_runs(store) if run.data.tags["kind"] == "trial"]
    by_number = {int(run.data.tags["trial"]): run for run in trials}
    assert len(by_number) == len(trials), "one child run for each trial"
    return by_number


def parent(store: StudyStore) -> Run:
    (run,) = [run for run in all_runs(store) if run.data.tags["kind"] == "study"]
    return run


def history(store: StudyStore, run: Run, key: str) -> list[tuple[int, int, float]]:
    points: list[Metric] = client(store).get_metric_history(run.info.run_id, key)
    return [(point.step, point.timestamp, point.value) for point in points]


def artifacts(store: StudyStore, run: Run) -> set[str]:
    root = store.artifacts_folder / "demo" / run.info.run_id / "artifacts"
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def snapshot(store: StudyStore) -> dict[str, Any]:
    """Everything that MLflow's tables say of runs, but for what time did."""
    with sqlite3.connect(store.mlflow_path) as database:
        return {
            table: sorted(database.execute(f"select * from {table}"), key=repr)
            for table in ("metrics", "latest_metrics", "params", "tags", "runs")
        }


# --- what a run says ------------------------------------------------------------------------


def test_a_trial_is_a_child_run_with_all_that_was_measured(
    store: StudyStore, tracker: Tracker
) -> None:
    result = complete_trial(12, 500.0, PARAMS)
    write_trial(store, result)
    tracker.log_trial(result)
    run = children(store)[12]
    assert run.info.run_name == "#12 pp8 d8 cap4 graph triton"
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.parentRunId"] == parent(store).info.run_id
    assert run.data.tags["outcome"] == "complete"
    assert "reason" not in run.data.tags
    assert run.data.params["pp_size"] == "8"
    assert run.data.params["cuda_graph"] == "true"
    assert run.data.params["resolved.mem_fraction_static"] == "0.88"
    assert run.data.metrics["objective"] == 500.0
    assert run.data.metrics["param.pp_max_micro_batch_size"] == 4.0
    assert "param.cuda_graph" not in run.data.metrics
    assert run.data.metrics["output_throughput"] == 500.0, "searched by its highest step"
    steps = [(step, value) for step, _, value in history(store, run, "output_throughput")]
    assert sorted(steps) == [(1, 50.0), (8, 225.0), (32, 500.0)]
    measured = {key for key in run.data.metrics if not key.startswith(("system/", "param."))}
    latencies = {
        f"{name}.{p}" for name in ("ttft_s", "tpot_s") for p in ("mean", "p50", "p90", "p99")
    }
    assert measured == latencies | {
        "objective",
        "output_throughput",
        "total_throughput",
        "request_throughput",
        "achieved_concurrency",
        "requests",
        "errors",
        "window_s",
        "power_w",
        "energy_j",
        "tokens_per_joule",
    }


def test_a_shared_measurement_names_its_source_and_has_its_times(
    store: StudyStore, tracker: Tracker
) -> None:
    first = complete_trial(12, 500.0, PARAMS)
    write_trial(store, first)
    canary = CanaryResult(CanaryState.MATCHED, tokens=320, parted=2, trial=3)
    differences = {"attention_backend": ("fa3", "triton")}
    same = replace(first, number=13, shares=12, canary=canary, differences=differences)
    spec = store.read_spec(12)
    assert spec is not None
    later = replace(spec.anchor, wall_s=spec.anchor.wall_s + 9000.0)
    store.write_spec(replace(spec.trial, number=13), None, later)
    store.write_result(same)
    for result in (first, same):
        tracker.log_trial(result)
    run, shown = children(store)[12], children(store)[13]
    assert shown.data.tags["shares"] == "12"
    assert shown.data.tags["canary"] == "matched #3: 320 tokens, 2 near ties parted"
    assert shown.data.tags["differences"] == "attention_backend fa3 was asked for, triton runs"
    assert "shares" not in run.data.tags
    assert "its servers resolve to those of #12" in shown.data.tags["mlflow.note.content"]
    assert shown.data.metrics["objective"] == run.data.metrics["objective"]
    assert shown.info.start_time == run.info.start_time
    assert shown.info.end_time == run.info.end_time


def test_the_note_shows_how_the_servers_were_started(store: StudyStore, tracker: Tracker) -> None:
    result = complete_trial(0, 500.0, PARAMS)
    write_trial(store, result)
    tracker.log_trial(result)
    note = children(store)[0].data.tags["mlflow.note.content"]
    command = "python -m sglang.launch_server --model-path /models/Kimi-K2.6 --pp-size 8"
    assert f"```\n{command}\n```" in note
    assert "| 32 | 500 | - | 1250.0 ms | 50.0 ms | 2300 |" in note


def test_files_and_logs_are_artifacts(store: StudyStore, tracker: Tracker) -> None:
    result = complete_trial(0, 500.0, PARAMS)
    write_trial(store, result)
    tracker.log_trial(result)
    assert artifacts(store, children(store)[0]) == {
        "spec.json",
        "result.json",
        "power.parquet",
        "server.parquet",
        "rung-0-c32.parquet",
        "rung-1-c8.parquet",
        "rung-2-c1.parquet",
        "launch/launch.json",
        "launch/replica-0.log",
    }
    assert artifacts(store, parent(store)) == {"study.json"}


def test_power_over_time_is_each_gpus_with_times_of_the_files(
    store: StudyStore, tracker: Tracker
) -> None:
    result = complete_trial(3, 500.0, PARAMS)
    write_trial(store, result, samples_per_gpu=60)
    tracker.log_trial(result)
    run = children(store)[3]
    series = {key for key in run.data.metrics if key.startswith("system/")}
    quantities = ("power_usage_watts", "utilization_percentage", "memory_usage_megabytes")
    assert series == {f"system/gpu_{gpu}_{name}" for gpu in range(8) for name in quantities}
    points = sorted(history(store, run, "system/gpu_5_power_usage_watts"))
    samples = [sample for sample in store.power_samples(3) if sample.gpu_uuid == GPUS[5]]
    begun_s = START_S + 60 * 3
    assert points == [
        (step, round(1000 * (begun_s + (sample.time_s - 3000) / SCALE)), sample.power_w)
        for step, sample in enumerate(samples)
    ]
    assert len(points) == 60


def test_the_version_of_sglang_is_a_tag_of_the_study_and_of_its_trials(store: StudyStore) -> None:
    engine = replace(SETTINGS.engine, kind=EngineKind.SGLANG, model="/m")
    store.create({"name": "demo"}, {})
    tracker = Tracker(store.mlflow_uri, store, replace(SETTINGS, engine=engine))
    result = complete_trial(12, 500.0, PARAMS)
    write_trial(store, result)
    launch = store.read_launch(result.launch or 0)
    assert launch is not None
    spec, report = launch
    assert report is not None
    store.write_launch(spec, replace(report, server_info=({"version": "0.5.16"},)))
    tracker.log_trial(result)
    assert children(store)[12].data.tags["sglang_version"] == "0.5.16"
    assert parent(store).data.tags["sglang_version"] == "0.5.16"


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_has_its_status_and_reason(
    store: StudyStore, tracker: Tracker, outcome: Outcome
) -> None:
    result = make_result(1, None, outcome=outcome, reason="why", launch=None, retry_of=0)
    store.write_result(result)
    tracker.log_trial(result)
    run = children(store)[1]
    good = outcome in (Outcome.COMPLETE, Outcome.PRUNED)
    assert run.info.status == ("FINISHED" if good else "FAILED")
    assert (run.data.tags["outcome"], run.data.tags["reason"]) == (outcome.value, "why")
    assert run.data.tags["retry_of"] == "0"
    assert artifacts(store, run) == {"result.json"}


def test_the_log_of_a_launch_that_failed_is_an_artifact(
    store: StudyStore, tracker: Tracker, tmp_path: Path
) -> None:
    write_launch(store, 4, PARAMS)
    log = store.launch_folder(4) / "replica-0.log"
    elsewhere = tmp_path / "elsewhere.log"
    elsewhere.write_text("out of memory")
    for number, path in enumerate([log, elsewhere, tmp_path / "gone.log"]):
        result = make_result(number, None, launch=None, log_path=str(path))
        store.write_result(result)
        tracker.log_trial(result)
    found = children(store)
    assert artifacts(store, found[0]) == {
        "result.json",
        "launch/launch.json",
        "launch/replica-0.log",
    }
    assert artifacts(store, found[1]) == {"result.json", "launch/elsewhere.log"}
    assert artifacts(store, found[2]) == {"result.json"}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "#7 pp8 d8 cap4 graph triton"),
        ({"name": "pp8-auto", "params": {"pp_size": 8}}, "#7 pp8-auto pp8"),
        ({"name": "tp8", "params": {"tp_size": 8, "pp_size": 1}}, "#7 tp8"),
        ({"params": {"cuda_graph": False, "pp_size": 2}}, "#7 pp2 eager"),
    ],
)
def test_a_run_is_named_after_its_number_and_setting(changes: dict[str, Any], name: str) -> None:
    assert run_name(make_result(7, 1.0, **changes)) == name


def test_a_rung_that_is_no_measurement_makes_no_objective() -> None:
    result = complete_trial(12, 500.0, PARAMS)
    first, *others = result.rungs
    cut = replace(result, rungs=(replace(first, valid=False, cut_below=900.0), *others))
    keys = [point.key for point in run_metrics(cut, TrialTimes(None, 0.0), (), ())]
    assert "objective" not in keys
    assert "output_throughput" in keys
    assert f"| {first.concurrency} | {first.output_throughput:.0f} (not valid) |" in run_note(
        cut, None
    )


def test_further_objectives_are_numbered() -> None:
    result = make_result(0, 1.0, values=(3.0, 4.0), rungs=())
    points = run_metrics(result, TrialTimes(None, 1.0), (), ())
    values = {point.key: point.value for point in points}
    assert (values["objective"], values["objective.2"]) == (3.0, 4.0)


def test_names_that_mlflow_refuses_are_replaced(store: StudyStore, tracker: Tracker) -> None:
    params = {"json_model_override_args[a=b]%": 3, "plain-name.x/y z:1": 4}
    result = make_result(0, None, params=params, launch=None)
    store.write_result(result)
    tracker.log_trial(result)
    assert children(store)[0].data.params["json_model_override_args_a_b__"] == "3"
    assert children(store)[0].data.metrics["param.plain-name.x/y z:1"] == 4.0


@given(st.text(min_size=1))
def test_any_name_becomes_legal(name: str) -> None:
    assert set(legal_name(name)) <= {*map(chr, range(128))}
    assert len(legal_name(name)) == len(name)


# --- idempotence and resuming ---------------------------------------------------------------


def test_logging_again_changes_nothing(store: StudyStore, tracker: Tracker) -> None:
    results = write_study(store, SETTINGS)
    for result in results:
        tracker.log_trial(result)
    before = snapshot(store)
    assert sorted(children(store)) == list(range(10))
    assert tracker.logged_trials() == frozenset(range(10))
    for result in results:
        tracker.log_trial(result)
    again = Tracker(store.mlflow_uri, store, SETTINGS)
    assert again.parent_run_id == tracker.parent_run_id
    assert snapshot(store) == before


class Killed(Exception):
    """Stands for a SIGKILL at this call."""


@pytest.mark.parametrize("calls", [0, 1, 2, 3, 4, 8, 12, 13])
def test_a_driver_killed_while_logging_leaves_one_run_with_the_same_content(
    store: StudyStore, tracker: Tracker, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    result = complete_trial(0, 500.0, PARAMS)
    write_trial(store, result)
    left = calls

    def dying(_store: MlflowStore, call: Callable[[], Any]) -> Any:  # noqa: ANN401
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        return call()

    with monkeypatch.context() as patch:
        patch.setattr(MlflowStore, "_patiently", dying)
        try:
            tracker.log_trial(result)
        except Killed:
            pass
        else:
            pytest.fail("it makes fewer calls than this test thinks")
    continued = Tracker(store.mlflow_uri, store, SETTINGS)
    assert continued.logged_trials() == {0}
    run = children(store)[0]
    assert run.info.status == "FINISHED"
    assert len(history(store, run, "output_throughput")) == 3
    assert len(history(store, run, "system/gpu_0_power_usage_watts")) == 24
    assert len(history(store, parent(store), "best_objective")) == 1
    assert len(artifacts(store, run)) == 9


def test_a_store_that_was_lost_is_filled_again(store: StudyStore, empty_store: Path) -> None:
    write_study(store, SETTINGS)
    Tracker(store.mlflow_uri, store, SETTINGS).finish("finished")
    shutil.copy(empty_store, store.mlflow_path)
    Tracker(store.mlflow_uri, store, SETTINGS).finish("finished")
    assert sorted(children(store)) == list(range(10))
    assert {run.info.status for run in all_runs(store)} == {"FINISHED", "FAILED"}


def test_the_parent_follows_the_study(store: StudyStore, tracker: Tracker) -> None:
    assert parent(store).info.status == "RUNNING"
    tracker.finish("interrupted")
    assert parent(store).info.status == "KILLED"
    assert "best_trial" not in parent(store).data.tags
    continued = Tracker(store.mlflow_uri, store, SETTINGS)
    assert parent(store).info.status == "RUNNING"
    assert parent(store).data.tags["state"] == "running"
    values = [300.0, 200.0, 400.0]
    for number, value in enumerate(values):
        result = complete_trial(number, value, PARAMS)
        write_trial(store, result)
        continued.log_trial(result)
    repeat = complete_trial(3, 999.0, PARAMS)
    repeat = replace(repeat, repeat_of=2)
    write_trial(store, repeat)
    continued.log_trial(repeat)
    continued.finish("finished")
    run = parent(store)
    assert (run.info.status, run.data.tags["best_trial"]) == ("FINISHED", "2")
    best = [(step, value) for step, _, value in history(store, run, "best_objective")]
    assert sorted(best) == [(0, 300.0), (1, 300.0), (2, 400.0)]
    each = [(step, value) for step, _, value in history(store, run, "trial_objective")]
    assert sorted(each) == [*enumerate(values)]


def test_a_minimised_objective_has_its_best_below(store: StudyStore) -> None:
    objective = Objective("ttft_s.p99", 32, Direction.MINIMIZE)
    tracker = Tracker(store.mlflow_uri, store, make_settings(objectives=(objective,)))
    for number, value in enumerate([3.0, 1.0, 2.0]):
        result = make_result(number, 1.0, values=(value,), rungs=(), launch=None)
        store.write_result(result)
        tracker.log_trial(result)
    tracker.finish("stopped")
    assert parent(store).data.tags["best_trial"] == "1"
    assert parent(store).info.status == "FAILED"


def test_the_best_may_be_named_by_the_report(store: StudyStore, tracker: Tracker) -> None:
    tracker.finish("finished", best=17)
    assert parent(store).data.tags["best_trial"] == "17"


def test_no_child_run_stays_running(store: StudyStore, tracker: Tracker) -> None:
    for number in range(3):
        tags = {"kind": "trial", "study": "demo", "trial": str(number)}
        client(store).create_run(tracker.experiment_id, run_name="cut off", tags=tags)
    continued = Tracker(store.mlflow_uri, store, SETTINGS)
    assert continued.terminate_stale([1]) == (1,)
    assert children(store)[1].info.status == "KILLED"
    continued.finish("finished")
    assert {run.info.status for run in children(store).values()} == {"KILLED"}


def test_a_deleted_experiment_is_brought_back(store: StudyStore, tracker: Tracker) -> None:
    client(store).delete_experiment(tracker.experiment_id)
    assert Tracker(store.mlflow_uri, store, SETTINGS).experiment_id == tracker.experiment_id


def test_two_threads_may_log_at_once(store: StudyStore, tracker: Tracker) -> None:
    results = write_study(store, SETTINGS)
    failures: list[BaseException] = []

    def log(part: list[TrialResult]) -> None:
        try:
            for result in part:
                tracker.log_trial(result)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=log, args=(results[n::2],)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(children(store)) == list(range(10))
    assert mlflow.active_run() is None


# --- several processes on one store ---------------------------------------------------------

OPENER = """
import sys
from runner.record.tracking_store import MlflowStore
store = MlflowStore(sys.argv[1])
print(store.experiment(sys.argv[2], None, {}))
"""

HOLDER = """
import sqlite3, sys, time
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("begin exclusive")
print("locked", flush=True)
time.sleep(float(sys.argv[2]))
"""


def test_two_processes_make_one_fresh_store_together(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'studies' / 'mlflow.db'}"
    commands = [[sys.executable, "-c", OPENER, uri, name] for name in ("one", "two")]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate(timeout=200)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    names = {each.name for each in mlflow.MlflowClient(uri).search_experiments()}
    assert names == {"Default", "one", "two"}


def test_a_store_whose_making_was_killed_is_made_anew(tmp_path: Path) -> None:
    path, fresh = tmp_path / "mlflow.db", tmp_path / ".mlflow.db.new"
    command = [sys.executable, "-c", OPENER, f"sqlite:///{path}", "one"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as maker:
        while not (fresh.exists() and fresh.stat().st_size > 0):
            assert maker.poll() is None
            time.sleep(0.01)
        maker.kill()
    assert not path.exists()
    MlflowStore(f"sqlite:///{path}").experiment("two", None, {})
    with sqlite3.connect(path) as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)
    assert not list(tmp_path.glob(".mlflow.db.new*"))


@pytest.fixture
def locked(store: StudyStore, tracker: Tracker) -> Iterator[Callable[[float], None]]:
    """Lets another process lock the store for some seconds."""
    holders: list[subprocess.Popen[str]] = []

    def lock(seconds: float) -> None:
        command = [sys.executable, "-c", HOLDER, str(store.mlflow_path), str(seconds)]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        holders.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"

    impatient(tracker)
    yield lock
    for holder in holders:
        holder.kill()
        holder.communicate()


def impatient(tracker: Tracker) -> None:
    """Let sqlite give up at once, not after MLflow's 20 s, so that our own patience is tried."""
    engine = tracker._mlflow._client._tracking_client.store.engine  # noqa: SLF001

    @sa.event.listens_for(engine, "before_cursor_execute", retval=True)
    def shorten(_c: object, _cur: object, statement: str, params: Any, *_: Any) -> Any:  # noqa: ANN401
        return statement.replace("busy_timeout = 20000", "busy_timeout = 10"), params


def test_a_locked_store_is_waited_for(
    store: StudyStore, tracker: Tracker, locked: Callable[[float], None]
) -> None:
    result = complete_trial(0, 500.0, PARAMS)
    write_trial(store, result)
    locked(3.0)
    tracker.log_trial(result)
    assert children(store)[0].info.status == "FINISHED"


def test_a_store_that_stays_locked_is_named(
    store: StudyStore, tracker: Tracker, locked: Callable[[float], None]
) -> None:
    result = complete_trial(0, 500.0, PARAMS)
    write_trial(store, result)
    locked(60.0)
    pauses: list[float] = []
    tracker._mlflow._sleep = pauses.append  # noqa: SLF001
    with pytest.raises(StudyError, match=r"mlflow\.db stays locked .*continue the study"):
        tracker.log_trial(result)
    assert sum(pauses) >= 120
    assert all(later == min(2 * sooner, 5.0) for sooner, later in pairwise(pauses))


def test_a_file_that_is_no_store_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    path.write_text("this is no database, however long one looks at it" * 100)
    with pytest.raises(StudyError, match=rf"MLflow's store sqlite:///{path} refuses"):
        MlflowStore(f"sqlite:///{path}")


def test_a_home_may_have_any_name(tmp_path: Path, empty_store: Path) -> None:
    store = StudyStore(tmp_path / "a b #1", "demo")
    store.studies_folder.mkdir(parents=True)
    shutil.copy(empty_store, store.mlflow_path)
    result = complete_trial(0, 500.0, PARAMS)
    write_trial(store, result)
    Tracker(store.mlflow_uri, store, SETTINGS).finish("finished")
    assert len(artifacts(store, children(store)[0])) == 9


# --- values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_reaches_mlflow(
    store: StudyStore, tracker: Tracker, value: float
) -> None:
    point = MetricPoint("power_w", value, 1, 1)
    with pytest.raises(StudyError, match="metric power_w is"):
        tracker._mlflow.log(tracker.parent_run_id, metrics=[point])  # noqa: SLF001
    assert "power_w" not in parent(store).data.metrics


def test_a_long_trial_has_at_most_1000_points_per_series(
    store: StudyStore, tracker: Tracker
) -> None:
    ten_minutes_at_10_hz = 6000
    result = complete_trial(0, 500.0, PARAMS)
    write_trial(store, result, samples_per_gpu=ten_minutes_at_10_hz)
    tracker.log_trial(result)
    counts = {
        key: len(history(store, children(store)[0], key))
        for key in children(store)[0].data.metrics
        if key.startswith("system/")
    }
    assert len(counts) == 24
    assert 50 <= min(counts.values()) <= max(counts.values()) <= 1000


finite = st.floats(-1e6, 1e6)


@given(
    st.lists(st.tuples(finite, finite), min_size=1, max_size=300).map(sorted), st.integers(1, 50)
)
def test_thinned_points_stay_within_the_limit_and_the_range(
    points: list[tuple[float, float]], limit: int
) -> None:
    thinned = thin(points, limit)
    assert 1 <= len(thinned) <= max(limit, 1)
    assert [time_s for time_s, _ in thinned] == sorted(time_s for time_s, _ in thinned)
    slack = 1e-6
    values = [value for _, value in points]
    assert all(min(values) - slack <= value <= max(values) + slack for _, value in thinned)
    if len(points) <= limit:
        assert list(thinned) == points


def test_thinning_takes_means_of_equal_spans() -> None:
    points = [(0.0, 1.0), (1.0, 3.0), (2.0, 5.0), (10.0, 100.0)]
    assert thin(points, 2) == ((1.0, 3.0), (10.0, 100.0))


@pytest.mark.parametrize(("series", "points"), [(0, 1000), (1, 1000), (24, 150), (1000, 50)])
def test_the_more_series_the_fewer_points(series: int, points: int) -> None:
    assert points_per_series(series) == points


def test_gpus_keep_the_order_they_are_given_and_unread_values_are_left_out() -> None:
    def sample(uuid: str, power_w: float | None) -> PowerSample:
        return PowerSample(0.0, uuid, power_w, None, 0.25, None, None, None)

    series = gpu_series([sample("c", 3.0), sample("a", None), sample("b", 2.0)], ["b", "a"])
    assert {each.name: each.points for each in series} == {
        "system/gpu_0_power_usage_watts": ((0.0, 2.0),),
        "system/gpu_0_utilization_percentage": ((0.0, 25.0),),
        "system/gpu_1_utilization_percentage": ((0.0, 25.0),),
        "system/gpu_2_power_usage_watts": ((0.0, 3.0),),
        "system/gpu_2_utilization_percentage": ((0.0, 25.0),),
    }


def test_a_continued_trial_begins_with_its_first_window() -> None:
    result = complete_trial(0, 500.0, PARAMS)
    first_s, last = result.rungs[0].window_start_s, result.rungs[-1]
    resumed = ClockAnchor(wall_s=1000.0, clock_s=first_s + 60, scale=20.0)
    times = TrialTimes(resumed, finished_s=2000.0)
    assert times.start_ms(result) == 997_000
    end_s = last.window_start_s + last.window_s
    assert times.end_ms(result) == round(1000 * (1000 + (end_s - first_s - 60) / 20))


def test_a_trial_without_rungs_ends_when_its_result_was_written() -> None:
    result = make_result(0, None)
    times = TrialTimes(ClockAnchor(1000.0, 0.0, 1.0), finished_s=1007.5)
    assert (times.start_ms(result), times.end_ms(result)) == (1_000_000, 1_007_500)
    assert TrialTimes(None, 5.0).start_ms(result) == 5000


def test_the_experiment_opens_as_a_list_of_trials(store: StudyStore, tracker: Tracker) -> None:
    tags = client(store).get_experiment(tracker.experiment_id).tags
    view = json.loads(tags["mlflow.sharedViewState.trials"])
    assert view["name"] == "Trials, best first"
    assert view["state"].startswith("deflate;")
    assert len(tags["mlflow.sharedViewState.trials"]) < 5000, "MLflow's limit for a tag"
    assert tags["mlflow.experimentKind"] == "custom_model_development"


def test_the_demo_trials_of_these_tests_cover_the_outcomes() -> None:
    outcomes = {result.outcome for result in demo_trials()}
    assert outcomes == {Outcome.COMPLETE, Outcome.PRUNED, Outcome.INFEASIBLE, Outcome.FAILED}
