"""What a study says when its files and its search storage no longer agree."""

from __future__ import annotations

import shutil
from pathlib import Path

import optuna
import pytest

from tests.driving import Home
from tests.studies import DEMO

SHORT = {
    **DEMO,
    "baselines": [],
    "search": {"trials": 2, "seed": 0},
    "measure": {**DEMO["measure"], "finalists": 0},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("home"), SHORT)
    assert home.tune().returncode == 0
    return home


@pytest.fixture
def home(finished: Home, tmp_path: Path) -> Home:
    """A copy to damage."""
    shutil.copytree(finished.folder / "studies", tmp_path / "studies")
    return Home(tmp_path, SHORT)


def states(home: Home) -> list[str]:
    storage = f"sqlite:///{home.study_folder / 'optuna.db'}"
    trials = optuna.load_study(study_name="small", storage=storage).trials
    return [trial.state.name for trial in trials]


def test_a_lost_result_is_named_and_nothing_is_written(home: Home) -> None:
    (home.study_folder / "trials" / "0001" / "result.json").unlink()
    before = states(home)

    refused = home.tune()

    assert refused.returncode == 1
    assert "trials [1] ended, but have no result.json" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert states(home) == before


def test_a_deleted_search_storage_is_named_and_no_trial_begun(home: Home) -> None:
    (home.study_folder / "optuna.db").unlink()

    for _ in range(2):
        refused = home.tune()

        assert refused.returncode == 1
        assert "the search storage does not know trials [0, 1]" in refused.stderr
    assert states(home) == []


def test_a_deleted_mlflow_store_is_filled_again(home: Home) -> None:
    for path in (home.folder / "studies").glob("mlflow.db*"):
        path.unlink()

    assert home.tune().returncode == 0
    assert (home.folder / "studies" / "mlflow.db").exists()


def test_a_study_that_measured_nothing_takes_corrections(tmp_path: Path) -> None:
    baseline = {"name": "today", "tp_size": 8, "pp_size": 1, "attention_backend": "fa3"}
    wrong = {**SHORT, "baselines": [baseline], "search": {"trials": 1, "seed": 0}}
    wrong["parameters"] = {"tp_size": {"choices": [8]}}
    wrong["constraints"] = []
    first = Home(tmp_path, wrong).tune()
    assert first.returncode == 0, first.stderr  # its baseline cannot run here, the rest can
    assert "#0 tp8 fa3 infeasible" in first.stderr
    shutil.rmtree(tmp_path / "studies" / "small" / "trials")

    corrected = Home(tmp_path, SHORT).tune()

    assert corrected.returncode == 0, corrected.stderr
    assert len(Home(tmp_path, SHORT).results()) == 2


def test_a_profile_that_is_not_there_begins_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path, {**SHORT, "engine": {"kind": "simulated", "profile": "h100"}})

    refused = home.tune()

    assert refused.returncode == 2
    assert "there is no hardware profile 'h100'" in refused.stderr
    assert not home.study_folder.exists()
