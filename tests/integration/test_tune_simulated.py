"""A whole study with the simulated engine: files, Optuna, MLflow, and exactness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
from mlflow import MlflowClient

from runner.config import parse_study
from runner.measure.metrics import judge_rung
from runner.record.codec import encode
from runner.record.store import StudyStore
from tests.driving import Home, kill, wait_for
from tests.studies import DEMO


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("home"), DEMO)
    done = home.tune()
    assert done.returncode == 0, done.stderr
    return home


def test_every_trial_has_its_files(finished: Home) -> None:
    results = finished.results()
    counted = [r for r in results if r["repeat_of"] is None]

    assert [r["number"] for r in results] == list(range(len(results)))
    assert len(counted) == 6
    assert {r["outcome"] for r in results} <= {"complete", "pruned"}
    for result in results:
        folder = finished.study_folder / "trials" / f"{result['number']:04d}"
        names = sorted(path.name for path in folder.iterdir())
        ladder = [32, 8, 1][: len(result["rungs"])]
        rungs = [f"rung-{position}-c{c}.parquet" for position, c in enumerate(ladder)]
        assert names == ["power.parquet", "result.json", *rungs, "server.parquet", "spec.json"]


def test_every_rung_is_computed_again_from_its_files_byte_for_byte(finished: Home) -> None:
    store = StudyStore(finished.folder, "small")
    settings = parse_study(store.read_study()["settings"])
    for result in finished.results():
        spec = store.read_spec(result["number"])
        assert spec is not None
        for rung, kept in zip(store.measured_rungs(result["number"]), result["rungs"], strict=True):
            again = judge_rung(rung, settings.slo, spec.trial.rungs[rung.position])
            assert json.dumps(encode(again)) == json.dumps(kept)


def test_a_re_measurement_claims_a_precision_from_restarts(finished: Home) -> None:
    for result in finished.results():
        for place, rung in enumerate(result["rungs"]):
            is_claimed = result["repeat_of"] is not None and place == 0
            starts = [restart["start"] for restart in rung["restarts"]]
            assert (rung["output_throughput_halfwidth"] is not None) == is_claimed
            assert starts[:4] == (["gradual", "together", "gradual", "gradual"] if is_claimed
                                  else ["gradual"])  # fmt: skip


def test_baselines_come_first_and_finalists_are_measured_again(finished: Home) -> None:
    results = finished.results()

    assert results[0]["name"] == "pp8-auto"
    assert results[0]["resolved"]["pp_max_micro_batch_size"] == 8
    best = max((r for r in results[:6] if r["values"]), key=lambda r: r["values"][0])
    assert {r["repeat_of"] for r in results[6:]} == {0, best["number"]}


def test_optuna_is_told_what_the_files_say(finished: Home) -> None:
    storage = f"sqlite:///{finished.study_folder / 'optuna.db'}"
    trials = optuna.load_study(study_name="small", storage=storage).trials
    results = finished.results()

    assert [trial.user_attrs["outcome"] for trial in trials] == [r["outcome"] for r in results]
    assert [trial.user_attrs["spec_hash"] for trial in trials] == [r["spec_hash"] for r in results]
    complete = [trial for trial in trials if trial.state == optuna.trial.TrialState.COMPLETE]
    assert [trial.values for trial in complete] == [
        r["values"] for r in results if r["outcome"] == "complete"
    ]
    assert trials[0].params["pp_max_micro_batch_size"] == 8


def test_mlflow_has_a_child_run_for_each(finished: Home) -> None:
    client = MlflowClient(f"sqlite:///{finished.folder / 'studies' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]

    assert [run.info.run_name for run in parents] == ["small"]
    assert len(children) == len(finished.results())
    assert "RUNNING" not in {run.info.status for run in runs}


def test_results_mlflow_and_report_tell_of_the_inside_of_the_servers(finished: Home) -> None:
    results = finished.results()
    told = [rung["evidence"] for result in results for rung in result["rungs"]]
    assert all(each["batch_mean"] >= 1.0 and each["schedulers"] >= 1 for each in told)
    assert {each["graph_share"] for each in told} <= {0.0, 1.0}
    assert results[0]["rungs"][0]["evidence"]["batch_max"] == 8  # the cap of the baseline

    client = MlflowClient(f"sqlite:///{finished.folder / 'studies' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], "tags.trial = '0'")
    for name in ("graph_share", "batch_mean", "batch_max", "queue_mean", "queue_max"):
        points = client.get_metric_history(run.info.run_id, name)
        assert {point.step: point.value for point in points} == {
            rung["concurrency"]: rung["evidence"][name] for rung in results[0]["rungs"]
        }

    report = " ".join(finished.run("report", "small").stdout.split())
    assert "Inside the servers of #" in report
    assert "of decode passes in a CUDA graph" in report


def test_a_finished_study_prints_its_report(finished: Home) -> None:
    again = finished.tune("--json")

    report = json.loads(again.stdout)
    assert again.returncode == 0
    assert len(report["trials"]) == len(finished.results())
    assert report["best"]["number"] in report["contenders"]
    assert [baseline["name"] for baseline in report["baselines"]] == ["pp8-auto"]


def test_status_says_how_far_it_is(finished: Home) -> None:
    status = json.loads(finished.run("status", "small", "--json").stdout)

    assert status["state"] == "finished"
    assert status["trials"]["complete"] + status["trials"]["pruned"] == 6
    assert (status["trials"]["running"], status["trials"]["wanted"]) == (0, 6)
    assert status["eta_s"] == 0.0


def test_only_the_budget_may_change(finished: Home) -> None:
    refused = finished.tune("--set", "measure.precision=0.5")

    assert refused.returncode == 2
    assert "measure.precision: 0.05 -> 0.5" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_one_driver_at_a_time(finished: Home) -> None:
    from runner.record.store import StudyStore

    with StudyStore(finished.folder, "small").lock():
        refused = finished.tune()

    assert refused.returncode == 2
    assert "is being run by process" in refused.stderr


def exact(home: Home) -> list[dict[str, Any]]:
    """What the same seed must give, bit for bit: every result, but which launch it ran on."""
    return [{**result, "launch": None} for result in home.results()]


@pytest.mark.parametrize("trial", [1, 4])
def test_a_killed_study_ends_as_if_it_had_not_been(
    finished: Home, tmp_path: Path, trial: int
) -> None:
    home = Home(tmp_path, DEMO)
    driver = home.start()
    wait_for((home.study_folder / "trials" / f"{trial:04d}" / "spec.json").exists, "the trial")
    kill(driver)

    done = home.tune()

    assert done.returncode == 0, done.stderr
    assert exact(home) == exact(finished)


def test_settings_that_differ_in_their_cap_alone_share_a_launch(tmp_path: Path) -> None:
    space = {"pp_size": {"choices": [8]}, "pp_max_micro_batch_size": {"int": [1, 8]}}
    search = {"trials": 4, "seed": 0, "sampler": "random"}
    sections = {"parameters": space, "constraints": [], "baselines": [], "search": search}
    home = Home(tmp_path, {**DEMO, **sections, "measure": {**DEMO["measure"], "finalists": 0}})

    assert home.tune().returncode == 0

    results = home.results()
    assert [result["launch"] for result in results] == [0, 0, 0, 0]
    assert len({result["resolved"]["pp_max_micro_batch_size"] for result in results}) == 4
    assert {result["resolved"]["max_running_requests"] for result in results} == {64}
    assert len(list((home.study_folder / "launches").iterdir())) == 1


def test_the_storage_may_change_when_a_study_continues(tmp_path: Path) -> None:
    home = Home(tmp_path, {**DEMO, "search": {"trials": 2, "seed": 0}})
    assert home.tune().returncode == 0
    before = home.results()
    url = f"sqlite:///{tmp_path / 'elsewhere.db'}"

    done = home.run("resume", "small", "--set", "search.trials=3", "--set", f"storage={url}")

    assert done.returncode == 0, done.stderr
    trials = optuna.load_study(study_name="small", storage=url).trials
    assert [trial.number for trial in trials] == list(range(len(home.results())))
    assert home.results()[: len(before)] == before
    assert sum(result["repeat_of"] is None for result in home.results()) == 3


def test_a_larger_budget_continues_where_the_search_stood(finished: Home, tmp_path: Path) -> None:
    """What comes after the next setting depends on values, which differ with a trial's number."""
    short = {**DEMO, "search": {"trials": 3, "seed": 0}}
    home = Home(tmp_path, short)
    assert home.tune().returncode == 0

    done = home.run("resume", "small", "--set", "search.trials=6")

    assert done.returncode == 0, done.stderr
    searched, whole = (
        [r for r in study.results() if r["repeat_of"] is None] for study in (home, finished)
    )
    assert [r["params"] for r in searched[:4]] == [r["params"] for r in whole[:4]]
    assert sum(r["outcome"] in {"complete", "pruned"} for r in searched) == 6
