"""A study whose home was copied to another machine: it continues on other GPUs, or is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.driving import Home
from tests.studies import CPU

SHORT = {
    **CPU,
    "hardware": {"gpus": 1},
    "parameters": {"max_running_requests": {"choices": [4, 8]}},
    "baselines": [],
    "workload": {"prompt_tokens": 16, "output_tokens": 64, "concurrency": [1]},
    "measure": {"precision": 0.5, "min_window_s": 10, "max_window_s": 150, "finalists": 0},
    "search": {"trials": 1, "seed": 0},
}


def copied(home: Home, folder: Path) -> Home:
    """The home on another machine: the same study, one more trial, and GPUs of another place."""
    shutil.copytree(home.folder, folder)
    there = replace(home, folder=folder, document={**SHORT, "search": {"trials": 2, "seed": 0}})
    for state in (there.study_folder / "machine").glob("gpu-*.state"):
        state.unlink()
    return there


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_study_continues_on_other_gpus_of_its_model_only(tmp_path: Path) -> None:
    home = Home(tmp_path / "here", SHORT)
    home.folder.mkdir()
    begun = home.tune("--executor", "inline")
    assert begun.returncode == 0, begun.stderr
    assert "none of its trials ran on" not in begun.stderr
    there = copied(home, tmp_path / "there")
    idle_path = there.study_folder / "machine" / "idle.json"
    ours = idle_path.read_text(encoding="utf-8")
    gpus = json.loads(ours)["gpus"]

    idle_path.write_text(ours.replace(gpus[0]["name"], "Another GPU"), encoding="utf-8")
    changed, results = idle_path.read_text(encoding="utf-8"), there.results()
    refused = there.tune("--executor", "inline")
    assert refused.returncode == 2, refused.stderr
    assert "study tiny ran on Another GPU" in refused.stderr
    assert f"here it would run on {gpus[0]['name']}" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert (idle_path.read_text(encoding="utf-8"), there.results()) == (changed, results)

    idle_path.write_text(ours, encoding="utf-8")
    moved = there.tune("--executor", "inline", "--json")
    assert moved.returncode == 0, moved.stderr
    assert "none of its trials ran on: GPU-" in moved.stderr
    assert f"before: {gpus[0]['uuid'][:12]}." in moved.stderr
    power = json.loads(moved.stdout)["power"]
    assert [gpu["reading"] for gpu in power["gpus"]] == [0, 1]
    assert power["gpus"][0] == gpus[0] != power["gpus"][1]
    assert power["idle_power_w"] > 0.0
    assert power["best_share_of_limit"] > 0.0
    reported = there.run("report", "tiny")
    assert "Measured on different GPUs (" in reported.stdout
    assert there.servers() == []
