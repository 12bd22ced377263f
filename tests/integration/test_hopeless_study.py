"""A study in which settings are hopeless: their loads end early, and everyone says so."""

from __future__ import annotations

import json

import pytest

from runner.calibration.points import StudyRecord, evidence_of
from runner.config import parse_study
from runner.insight.summary import summarize
from runner.machine.profile import load_profile
from runner.measure.metrics import judge_rung
from runner.record.codec import encode
from runner.record.store import StudyStore
from runner.trial import Outcome
from tests.driving import Home

DOCUMENT = {
    "name": "narrow",
    "engine": {"kind": "simulated", "profile": "h200-llama-3.1-8b"},
    "hardware": {"gpus": 1},
    "parameters": {
        "max_running_requests": {"choices": [1, 2, 32, 64]},
        "cuda_graph": {"choices": [True, False]},
    },
    "baselines": [{"name": "default"}],
    "workload": {"prompt_tokens": 16, "output_tokens": 24, "concurrency": [1, 32]},
    "search": {"trials": 7, "seed": 0},
    "measure": {"min_window_s": 1, "max_window_s": 20, "finalists": 0},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("home"), DOCUMENT)
    done = home.tune()
    assert done.returncode == 0, done.stderr
    return home


def cut_numbers(home: Home) -> list[int]:
    cut = [r["number"] for r in home.results() if r["rungs"] and r["rungs"][0]["cut_below"]]
    assert cut, "no setting of this study is hopeless any more: choose another seed"
    return cut


def test_a_hopeless_trial_is_pruned_and_says_why(finished: Home) -> None:
    best = max(r["values"][0] for r in finished.results() if r["outcome"] == "complete")
    results = finished.results()
    for number in cut_numbers(finished):
        result = results[number]
        (rung,) = result["rungs"]
        assert (result["outcome"], result["name"], result["repeat_of"]) == ("pruned", None, None)
        assert result["reason"].startswith("cut short: at ")
        assert "behind" in result["reason"]
        assert rung["output_throughput"] < 0.5 * 0.8 * best
        assert not rung["valid"]
        assert not any(each["retry_of"] == number for each in results)


def test_its_load_took_less_time_than_a_measured_one(finished: Home) -> None:
    store = StudyStore(finished.folder, "narrow")
    (number, *_) = cut_numbers(finished)
    (load,) = store.measured_rungs(number)[0].loads
    durations = [r.end_s - r.send_s for r in load.records if r.end_s < load.window_end_s]
    assert load.window_end_s - load.window_start_s < 2 * max(durations)


def test_it_is_computed_again_from_its_files(finished: Home) -> None:
    store = StudyStore(finished.folder, "narrow")
    for number in cut_numbers(finished):
        spec = store.read_spec(number)
        assert spec is not None
        again = judge_rung(store.measured_rungs(number)[0], (), spec.trial.rungs[0])
        assert json.dumps(encode(again)) == json.dumps(finished.results()[number]["rungs"][0])


def test_the_report_names_it_and_does_not_rank_it(finished: Home) -> None:
    store = StudyStore(finished.folder, "narrow")
    settings = parse_study(store.read_study()["settings"])
    shown = summarize(store.results(), settings)
    said = {trial.number: (trial.outcome, trial.reason) for trial in shown.unfinished}
    for number in cut_numbers(finished):
        outcome, reason = said[number]
        assert outcome is Outcome.PRUNED
        assert reason.startswith("cut short at C=32: hopelessly behind with ")
        assert number not in [row.number for row in (*shown.rows, *shown.searched_rows)]


def test_no_profile_is_fitted_to_it(finished: Home) -> None:
    store = StudyStore(finished.folder, "narrow")
    settings = parse_study(store.read_study()["settings"])
    profile = load_profile("h200-llama-3.1-8b")
    points = evidence_of(profile, StudyRecord(settings, tuple(store.results()))).points
    assert {point.trial for point in points}.isdisjoint(cut_numbers(finished))
