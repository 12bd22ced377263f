"""A study beside somebody else's process, and one whose server hangs under load: the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.engines.emulator.gpu import GpuWriter, create_machine
from runner.machine.profile import load_profile
from tests.driving import Home
from tests.studies import CPU

BUSY_BYTES = 4 << 30


@pytest.mark.slow
def test_a_study_on_used_gpus_is_refused_before_anything_runs(tmp_path: Path) -> None:
    home = Home(tmp_path, {**CPU, "search": {"trials": 1, "seed": 0}})
    machine = home.study_folder / "machine"
    create_machine(machine, load_profile("cpu-blocking-pp2"))
    writer = GpuWriter(machine, 1)
    writer.hold(BUSY_BYTES)

    refused = home.tune("--executor", "inline")

    assert refused.returncode == 1
    assert "GPU 1 (" in refused.stderr
    assert "4.0 GiB in use, by process " in refused.stderr
    assert "continue with: " in refused.stderr
    assert "Traceback" not in refused.stderr
    assert home.servers() == []
    assert home.results() == []


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_server_that_hangs_under_load_fails_its_trial_and_the_study_goes_on(
    tmp_path: Path,
) -> None:
    # After the greedy prompts and the warm-up: in the middle of a measured load.
    hanging = {"name": "hanging", "pp_size": 2, "fault": "stop-sending:40requests"}
    document = {
        **CPU,
        "parameters": {"pp_size": {"choices": [1, 2]}},
        "baselines": [hanging, {"name": "sound", "pp_size": 2, "max_running_requests": 16}],
        "measure": {**CPU["measure"], "max_window_s": 3_000, "finalists": 0},
        "search": {"trials": 2, "seed": 0},
    }
    home = Home(tmp_path, document, limit_s=600.0)

    done = home.tune("--executor", "inline")

    results = home.results()
    hung = [result for result in results if result["params"].get("fault")]
    assert hung, json.dumps(results)
    for result in hung:
        assert result["outcome"] in {"failed", "infeasible"}
        assert "the server hangs: no output token came in 1" in result["reason"]
    assert "complete" in {result["outcome"] for result in results}, done.stderr
    assert home.servers() == []
