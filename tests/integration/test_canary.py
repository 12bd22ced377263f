"""A study with a setting that says wrong tokens, and two settings that resolve to the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from runner.canary import PROMPTS
from runner.clock import Clock
from runner.engines.sglang.greedy import greedy_outputs
from runner.errors import ServerFailed
from tests.driving import Home
from tests.emulated_server import emulated_server
from tests.studies import CPU

OFF = "decode CUDA graphs are off, though nobody switched them off"
DOCUMENT = {
    **CPU,
    "engine": {
        **CPU["engine"],
        "args": {"pp_size": 2, "max_running_requests": 16, "fault": "garbled-output"},
    },
    "parameters": {
        "pp_async_batch_depth": {"choices": [0, 2]},
        "cuda_graph_max_bs": {"choices": [64, 128]},
    },
    "constraints": ["pp_async_batch_depth == 0 or cuda_graph_max_bs == 64"],
    "baselines": [{"name": "plain", "pp_async_batch_depth": 0, "cuda_graph_max_bs": 64}],
    "workload": {"prompt_tokens": 16, "output_tokens": 64, "concurrency": [4]},
    "measure": {"precision": 0.2, "min_window_s": 10, "max_window_s": 60, "finalists": 0},
    "search": {"trials": 9, "seed": 0},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """No other setting is left: the study ends when its space is exhausted."""
    home = Home(tmp_path_factory.mktemp("home"), DOCUMENT)
    done = home.tune("--executor", "inline")
    assert done.returncode == 0, done.stderr
    return home


def at_depth(home: Home, depth: int) -> list[dict[str, Any]]:
    """The trials of the search at a depth, but for those that a busy machine made invalid."""
    trials = [t for t in home.results() if t["params"]["pp_async_batch_depth"] == depth]
    search = [t for t in trials if t["repeat_of"] is None]
    return [t for t in search if depth == 2 or t["outcome"] == "complete"]


def report(home: Home) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(home.run("report", "tiny", "--json").stdout)
    return document


@pytest.mark.timeout(280)
def test_wrong_tokens_do_not_win(finished: Home) -> None:
    wrong = at_depth(finished, 2)
    assert [trial["outcome"] for trial in wrong] == ["invalid", "invalid", "failed"]
    for trial in wrong:
        assert trial["stage"] == "canary"
        assert trial["reason"].startswith("wrong output: replica 0 continues prompt 0 with ")
        assert "(trial 0) with " in trial["reason"]
        assert "4.00 nats ahead" in trial["reason"]
        assert (trial["canary"]["state"], trial["canary"]["asked"]) == ("mismatched", 2)
        assert trial["rungs"] == []
    best = report(finished)["best"]
    assert best["params"]["pp_async_batch_depth"] == 0


@pytest.mark.timeout(280)
def test_the_first_good_launch_is_what_others_are_compared_with(finished: Home) -> None:
    first = next(trial for trial in at_depth(finished, 0))
    assert first["canary"]["state"] == "first"
    kept = json.loads((finished.study_folder / "canary.json").read_text())
    (reference,) = kept["references"]
    assert (reference["trial"], reference["launch"]) == (first["number"], first["launch"])
    assert {len(output["tokens"]) for output in reference["outputs"]} == {20}
    wrong = at_depth(finished, 2)[0]
    folder = finished.study_folder / "trials" / f"{wrong['number']:04d}"
    said = json.loads((folder / "canary.json").read_text())
    assert said["outputs"][0] != reference["outputs"]


@pytest.mark.timeout(280)
def test_a_setting_that_resolves_to_a_measured_one_shows_its_measurement(finished: Home) -> None:
    first, same = at_depth(finished, 0)
    assert (first["shares"], same["shares"]) == (None, first["number"])
    assert same["params"]["cuda_graph_max_bs"] == 128
    for name in ("values", "rungs", "resolved", "launch", "identity", "canary"):
        assert same[name] == first[name]
    assert same["timing_s"]["measured"] == 0.0
    folder = finished.study_folder / "trials" / f"{same['number']:04d}"
    assert sorted(path.name for path in folder.iterdir()) == ["result.json", "spec.json"]
    document = report(finished)
    assert document["best"]["number"] == first["number"]
    assert document["contenders"] == [first["number"]]
    assert f"= #{first['number']} " in finished.run("report", "tiny").stdout


@pytest.mark.timeout(280)
def test_what_runs_otherwise_than_asked_is_kept_and_shown(finished: Home) -> None:
    first, same = at_depth(finished, 0)
    assert first["differences"] == same["differences"] == {"cuda_graph": [True, False]}
    said = " ".join(finished.run("report", "tiny").stdout.split())
    assert f"Note: {OFF} (#{first['number']}, #{same['number']}, #" in said
    tags = mlflow_tags(finished)
    assert tags[same["number"]]["shares"] == str(first["number"])
    assert tags[first["number"]]["canary"].startswith("first")
    assert tags[first["number"]]["differences"] == OFF


@pytest.mark.timeout(280)
def test_a_finished_study_is_whole_when_it_is_opened_again(finished: Home) -> None:
    before = finished.results()
    done = finished.tune("--executor", "inline")
    assert done.returncode == 0, done.stderr
    assert finished.results() == before


def mlflow_tags(home: Home) -> dict[int, dict[str, str]]:
    client = MlflowClient(f"sqlite:///{Path(home.folder) / 'studies' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    return {int(run.data.tags["trial"]): run.data.tags for run in runs if "trial" in run.data.tags}


def test_a_server_with_room_for_few_waiting_requests_answers_every_prompt(tmp_path: Path) -> None:
    """Sent all at once, most would be refused: The request queue is full."""
    flags = ("--time-scale", "20", "--max-running-requests", "1", "--max-queued-requests", "2")
    log = tmp_path / "server.log"
    with emulated_server(log, *flags) as server:
        outputs = greedy_outputs(server.url, str(log), Clock(20.0), None, queue=2)
        with pytest.raises(ServerFailed, match="queue is full"):
            greedy_outputs(server.url, str(log), Clock(20.0), None)
    assert len(outputs) == len(PROMPTS)
