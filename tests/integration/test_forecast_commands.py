"""`runner predict` and `runner plan` as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

STUDY = """\
name: small
engine: {kind: sglang, profile: rtx-pro-6000-x8-kimi-k2.6, model: /no/such/model}
parameters:
  pp_size: {choices: [4, 8]}
  pp_async_batch_depth: {int: [0, 4]}
  pp_max_micro_batch_size: {choices: [1, 2, 6, 8]}
baselines:
  - {name: tp8, tp_size: 8, pp_size: 1}
workload: {prompt_tokens: 16, output_tokens: {uniform: [8, 16]}, concurrency: [1, 6]}
measure: {min_window_s: 0.5, max_window_s: 2, precision: 0.05}
"""
RUNG = {
    *("concurrency", "output_throughput", "ttft_s", "tpot_s", "busy_stages", "slots", "power_w"),
    *("output_throughput_p10", "output_throughput_p90"),
}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(STUDY, encoding="utf-8")
    return path


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runner.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def document(*words: object) -> dict[str, Any]:
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, "one document"
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_predict_answers_with_one_document(study: Path) -> None:
    params = "pp_size=8,tp_size=1,pp_max_micro_batch_size=2"
    found = document("predict", study, "--params", params, "--seeds", 2)
    assert list(found) == ["protocol", "output_tokens", "rungs"]
    assert (found["protocol"], found["output_tokens"]) == ("closed_loop", 12)
    assert [rung["concurrency"] for rung in found["rungs"]] == [1, 6]
    assert all(set(rung) == RUNG for rung in found["rungs"])
    assert found == document("predict", study, "--params", params, "--seeds", 2)


def test_predict_takes_overrides_and_prints_for_people(study: Path) -> None:
    words = ["predict", study, "--params", "tp_size=8", "--set", "workload.protocol=burst"]
    done = run(*words, "--seeds", 1)
    assert done.returncode == 0, done.stderr
    assert "Burst: prompt 16 tokens, output 8 - 16 tokens." in done.stdout


def test_predict_explains_what_cannot_run_and_exits_0(study: Path) -> None:
    found = document("predict", study, "--params", "tp_size=1")
    assert found["rungs"] == []
    assert "out of memory" in found["refused"]
    done = run("predict", study, "--params", "tp_size=1")
    assert done.returncode == 0
    assert "cannot run: out of memory" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--params", "pp_sze=8"], "did you mean 'pp_size'"),
        (["--params", "pp_size"], "expected name=value"),
        (["--params", "pp_size=8,pp_size=8"], "given twice"),
        (["--params", "pp_size=x"], "expected a whole number"),
        (["--params", "pp_size=8", "--seeds", "0"], "--seeds"),
        (["--params", "pp_size=8", "--set", "engine.profile=nowhere"], "choose one of"),
        (["--params", "pp_size=8", "--set", "engine.profile=null"], "engine.profile: missing"),
        ([], "--params"),
    ],
)
def test_wrong_input_is_one_message_and_exit_2(study: Path, words: list[str], message: str) -> None:
    done = run("predict", study, *words, "--json")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_plan_answers_with_one_document(study: Path) -> None:
    found = document("plan", study, "--top", 2)
    assert found["name"] == "small"
    assert found["space"] == {
        "settings": 40,
        "examined": 40,
        "runnable": 20,
        "sampled": False,
    }
    (refused,) = found["refused"]
    assert (refused["reason"], refused["count"]) == ("out of memory", 20)
    assert len(found["ranking"]) == 2
    best = found["ranking"][0]
    assert {"params", "label", "objective", "basis", "reason", "rungs"} <= set(best)
    assert best["objective"] >= found["ranking"][1]["objective"]
    assert [baseline["name"] for baseline in found["baselines"]] == ["tp8"]
    assert found["launches"] > 0
    assert found["time_s"] > 0
    assert found["energy_j"] > 0
    assert any(each["basis"] == "this load cannot tell them apart" for each in found["equivalent"])


def test_plan_prints_for_people_and_refuses_wrong_input(study: Path) -> None:
    done = run("plan", study, "--top", 2, "--set", "workload.concurrency=[2]")
    assert done.returncode == 0, done.stderr
    assert "40 settings, 20 can run" in done.stdout
    assert "Predicted, best first: output_throughput at C=2" in done.stdout
    missing = run("plan", study, "--set", "engine.profile=null", "--json")
    assert missing.returncode == 2
    assert "engine.profile: missing" in missing.stderr
    assert missing.stdout == ""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_prediction_leaves_no_process(study: Path, sent: signal.Signals) -> None:
    words = ["predict", study, "--params", "pp_size=8", "--seeds", 200]
    overrides = ["workload.output_tokens=256", "measure.min_window_s=20", "measure.max_window_s=30"]
    command = [sys.executable, "-m", "runner.cli", *map(str, words)]
    command += [word for each in overrides for word in ("--set", each)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert "simulating" in process.stderr.readline()
        workers = psutil.Process(process.pid).children()
        os.killpg(process.pid, sent) if sent is signal.SIGINT else process.kill()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == (130 if sent is signal.SIGINT else -sent)
    assert "Traceback" not in stderr
    gone, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
    assert gone or os.cpu_count() == 1
