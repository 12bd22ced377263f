"""A study that searches with short replies and confirms its finalists at the user's own lengths."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import optuna
import pytest
from mlflow import MlflowClient

from runner.clock import Clock
from runner.cluster.inline import InlineExecutor
from runner.config import dump, parse_study
from runner.errors import Interrupted
from runner.held_launch import HeldLaunch
from runner.insight.live import Event, TrialDone
from runner.record.background import BackgroundTracker
from runner.record.store import StudyStore
from runner.search.study import Search
from runner.sharing import Sharing
from runner.trial import TrialLengths, TrialResult
from runner.tune import Study, tune
from tests.driving import Home
from tests.search_samples import empty_database
from tests.studies import CPU

STUDY: dict[str, Any] = {
    **CPU,
    "name": "two",
    "engine": {"kind": "simulated", "profile": "cpu-blocking-pp2"},
    "workload": {
        "prompt_tokens": 16,
        "output_tokens": {"uniform": [24, 40]},
        "concurrency": [1, 4],
    },
    "search": {"trials": 4, "seed": 0, "output_tokens": 8},
    "slo": {"tpot_s": {"p99": 5.0}},
    "measure": {"precision": 0.2, "min_window_s": 2, "max_window_s": 8, "finalists": 1},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("home"), STUDY)
    done = home.tune()
    assert done.returncode == 0, done.stderr
    return home


def laws_of(home: Home, number: int) -> set[tuple[str, float, float]]:
    path = home.study_folder / "trials" / f"{number:04d}" / "spec.json"
    spec = json.loads(path.read_text())
    laws = [plan["output_tokens"] for plan in (spec["warmup"], *spec["rungs"])]
    return {(law["kind"], law["a"], law["b"]) for law in laws}


def test_re_measurements_alone_have_the_users_lengths(finished: Home) -> None:
    results = finished.results()
    again = [r["number"] for r in results if r["repeat_of"] is not None]

    assert again
    for result in results:
        number, is_own = result["number"], result["number"] in again
        assert result["lengths"] == ("workload" if is_own else "search")
        expected = ("uniform", 24, 40) if is_own else ("fixed", 8, 0.0)
        assert laws_of(finished, number) == {expected}


def test_the_report_ranks_by_the_users_lengths_and_tells_both(finished: Home) -> None:
    report = json.loads(finished.run("report", "two", "--json").stdout)
    text = " ".join(finished.run("report", "two").stdout.split())
    own, short = report["lengths"]["workload"], report["lengths"]["search"]

    assert report["best"]["number"] == own["order"][0]["number"] == report["contenders"][0]
    assert {each["number"] for each in own["order"]} == {
        r["repeat_of"] for r in report["trials"] if r["repeat_of"] is not None
    }
    values = {r["number"]: r["values"] for r in report["trials"]}
    assert all(values[each["number"]] == each["values"] for each in short["order"])
    assert "At your lengths (24 - 40 tokens)" in text
    assert "At the lengths of the search (8 tokens)" in text
    rungs = [rung for trial in report["trials"] for rung in trial["rungs"]]
    assert {rung["slo_attainment"] for rung in rungs} == {1.0}


def test_mlflow_and_optuna_know_the_lengths_of_each_trial(finished: Home) -> None:
    results = finished.results()
    lengths = [r["lengths"] for r in results]
    client = MlflowClient(f"sqlite:///{finished.folder / 'studies' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("two")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], "tags.kind = 'trial'")
    by_trial = {int(run.data.tags["trial"]): run for run in runs}

    assert [by_trial[n].data.tags["lengths"] for n in range(len(results))] == lengths
    assert by_trial[0].data.metrics["slo_attainment"] == 1.0
    storage = f"sqlite:///{finished.study_folder / 'optuna.db'}"
    trials = optuna.load_study(study_name="two", storage=storage).trials
    assert [trial.user_attrs["lengths"] for trial in trials] == lengths


def test_other_lengths_of_the_search_are_another_study(finished: Home) -> None:
    refused = finished.tune("--set", "search.output_tokens=9")

    assert refused.returncode == 2
    assert "search.output_tokens: 8 -> 9" in refused.stderr


@dataclass
class Watch:
    """A view that stops the session once a trial is done."""

    last: int

    def handle(self, event: Event) -> None:
        if isinstance(event, TrialDone) and event.result.number == self.last:
            raise Interrupted("as the test wants it")

    def close(self) -> None:
        pass


def session(folder: Path, last: int = -1) -> list[TrialResult]:
    """One session of the study in this process, without MLflow; its results, launches aside."""
    settings = parse_study(STUDY)
    store, view = StudyStore(folder, settings.name), Watch(last)
    with store.lock():
        store.create(dump(settings), {})
        database = store.folder / "optuna.db"
        if not database.exists():
            database.write_bytes(empty_database())
        search = Search(settings, store.optuna_url)
        folders = (store.machine_folder, store.leases_folder)
        launches = HeldLaunch(lambda: InlineExecutor(settings, *folders), store, view, Clock())
        tracker = create_autospec(BackgroundTracker, instance=True)
        with closing(search), closing(launches), suppress(Interrupted):
            sharing = Sharing(settings, store)
            tune(Study(settings, store, search, tracker, launches, view, sharing))
    return [replace(result, launch=None) for result in store.results()]


def test_a_study_cut_off_before_its_finalists_are_confirmed_ends_the_same(tmp_path: Path) -> None:
    whole = session(tmp_path / "whole")
    again = [r.number for r in whole if r.lengths is TrialLengths.WORKLOAD]
    assert again == list(range(4, len(whole)))

    for last in (again[0] - 1, again[0]):
        folder = tmp_path / f"cut-{last}"
        assert session(folder, last) == whole[: last + 1]
        assert session(folder) == whole
