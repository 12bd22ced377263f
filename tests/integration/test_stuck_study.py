"""Studies that cannot run: refused before anything begins, or ended once nothing was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.cli import main
from tests.driving import Home

TOO_SMALL: dict[str, Any] = {
    "name": "stuck",
    "engine": {"kind": "simulated", "profile": "rtx-pro-6000-x8-kimi-k2.6"},
    "parameters": {
        "tp_size": {"choices": [1, 2]},
        "mem_fraction_static": {"float": [0.5, 0.9]},
    },
    "workload": {"prompt_tokens": 16, "output_tokens": 8, "concurrency": [1]},
    "search": {"trials": 24, "seed": 0},
}


def test_study_that_no_machine_of_its_profile_can_run_begins_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path, {**TOO_SMALL, "hardware": {"gpus": 16}})
    done = home.tune()
    assert done.returncode == 2
    assert "no setting of study stuck can run" in done.stderr
    assert "hardware.gpus is 16" in done.stderr
    assert not home.study_folder.exists()


FEW = 4


@pytest.fixture
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with real servers: that a setting cannot run is learned by launching."""
    monkeypatch.setattr("runner.search.study.known_refusal", lambda _: lambda _: None)
    monkeypatch.setattr("runner.search.study.MOST_UNMEASURED", FEW)
    monkeypatch.setattr("runner.forecast.refusals.check_runnable", lambda _: None)


@pytest.mark.usefixtures("nothing_is_known")
def test_study_that_measures_nothing_stops_and_continues(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = Home(tmp_path, TOO_SMALL)
    words = ["tune", str(home.study_file), "--home", str(tmp_path)]
    for session in (1, 2):
        assert main(words) == 1
        said = capfd.readouterr().err
        assert f"{FEW} trials in a row could not be measured" in said
        assert f"  {FEW} x infeasible, as #{FEW * (session - 1)}: " in said
        assert "continue with: runner tune" in said
        assert len(home.results()) == session * FEW
    study = json.loads((home.study_folder / "state.json").read_text(encoding="utf-8"))
    assert study["state"] == "stopped"
