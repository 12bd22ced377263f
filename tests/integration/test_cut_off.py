"""A study on emulated servers is cut off (SIGKILL, Ctrl-C once and twice) and continued."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import optuna
import psutil
import pytest
from mlflow import MlflowClient

from runner.engines.lease import read_leases, write_lease
from runner.engines.processes import LEASE_VARIABLE, identify
from tests.driving import Home, kill, wait_for
from tests.studies import CPU

# A busy machine makes a measurement invalid now and then; it is measured again, up to a limit.
ENDS = {"complete": "COMPLETE", "pruned": "PRUNED", "invalid": "FAIL", "failed": "FAIL"}
COUNTED = {"complete", "pruned"}


def check_whole(home: Home, wanted: int) -> None:
    """Each number once, nothing running, the wanted count, in Optuna, MLflow and the files."""
    storage = f"sqlite:///{home.study_folder / 'optuna.db'}"
    trials = optuna.load_study(study_name="tiny", storage=storage).trials
    results = home.results()
    assert [r["number"] for r in results] == [trial.number for trial in trials]
    assert [trial.state.name for trial in trials] == [ENDS[r["outcome"]] for r in results]
    assert [trial.user_attrs["outcome"] for trial in trials] == [r["outcome"] for r in results]
    counted = [r for r in results if r["outcome"] in COUNTED and r["repeat_of"] is None]
    assert len(counted) == wanted

    client = MlflowClient(f"sqlite:///{home.folder / 'studies' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert "RUNNING" not in {run.info.status for run in runs}
    children = Counter(
        int(run.data.tags["trial"]) for run in runs if "mlflow.parentRunId" in run.data.tags
    )
    assert children == Counter(range(len(results)))
    assert home.servers() == []
    assert list((home.study_folder / "leases").glob("*.json")) == []


def begun(home: Home, number: int) -> bool:
    return (home.study_folder / "trials" / f"{number:04d}" / "spec.json").exists()


@pytest.mark.timeout(280)
def test_a_driver_killed_twice_loses_nothing_and_runs_nothing_twice(tmp_path: Path) -> None:
    home = Home(tmp_path, {**CPU, "search": {"trials": 4, "seed": 0}})
    for number in (1, 3):
        driver = home.start("--executor", "inline")
        wait_for(lambda number=number: begun(home, number), f"trial {number} begins")  # type: ignore[misc]
        time.sleep(1.0)  # somewhere in its launch or load
        kill(driver)

    before = {path: path.stat().st_mtime_ns for path in _finished_files(home)}
    done = home.tune("--executor", "inline")

    assert done.returncode == 0, done.stderr
    check_whole(home, wanted=4)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def _finished_files(home: Home) -> list[Path]:
    folders = [path.parent for path in home.study_folder.glob("trials/*/result.json")]
    return [path for folder in folders for path in folder.iterdir()]


@pytest.mark.timeout(200)
def test_a_half_measured_trial_continues_at_its_next_rung(tmp_path: Path) -> None:
    home = Home(tmp_path, {**CPU, "search": {"trials": 1, "seed": 0}})
    first = home.study_folder / "trials" / "0000" / "rung-0-c4.parquet"
    driver = home.start("--executor", "inline")
    wait_for(first.exists, "the first rung")
    kill(driver)
    written_ns = first.stat().st_mtime_ns

    done = home.tune("--executor", "inline")

    assert done.returncode == 0, done.stderr
    assert first.stat().st_mtime_ns == written_ns
    assert "continues after 1 of its rungs" in done.stderr
    result = home.results()[0]
    measured = [rung["concurrency"] for rung in result["rungs"]]
    assert measured == ([4] if result["outcome"] == "invalid" else [4, 1])


@pytest.mark.timeout(200)
def test_servers_that_outlived_their_driver_are_found_by_their_lease(tmp_path: Path) -> None:
    home = Home(tmp_path, {**CPU, "search": {"trials": 1, "seed": 0}})
    driver = home.start("--executor", "inline")
    folder = home.study_folder / "leases"
    wait_for(lambda: bool(read_leases(folder).leases), "a lease")
    lease = read_leases(folder).leases[0]
    kill(driver)
    # The kernel ends our servers with their driver. One that it did not end looks like this.
    orphan = psutil.Popen(
        ["sleep", "600"],
        env={**os.environ, LEASE_VARIABLE: lease.token},
        start_new_session=True,
    )
    start_time = identify(orphan.pid).start_time
    left = replace(lease, pid=orphan.pid, pgid=orphan.pid, start_time=start_time)
    write_lease(folder, left)

    cleaned = home.run("clean")

    assert cleaned.returncode == 0, cleaned.stderr
    assert cleaned.stdout == f"ended pid {orphan.pid}\n"
    assert orphan.wait(timeout=10) == -signal.SIGKILL
    assert home.run("clean").stdout == "nothing to clean\n"


@pytest.mark.timeout(200)
def test_ctrl_c_once_ends_in_order_and_says_how_to_continue(tmp_path: Path) -> None:
    home = Home(tmp_path, {**CPU, "search": {"trials": 2, "seed": 0}})
    driver = home.start("--executor", "inline")
    wait_for(lambda: bool(home.servers()), "a server")

    driver.send_signal(signal.SIGINT)
    _, said = driver.communicate(timeout=60)

    assert driver.returncode == 130
    assert f"continue with: runner tune {home.study_file}" in said
    assert "Traceback" not in said
    assert home.servers() == []
    assert home.run("status", "tiny").stdout.startswith("tiny: interrupted")
    assert home.tune("--executor", "inline").returncode == 0
    check_whole(home, wanted=2)


@pytest.mark.timeout(200)
def test_ctrl_c_twice_ends_at_once(tmp_path: Path) -> None:
    home = Home(tmp_path, {**CPU, "search": {"trials": 1, "seed": 0}})
    driver = home.start("--executor", "inline")
    wait_for(lambda: bool(home.servers()), "a server")

    driver.send_signal(signal.SIGINT)
    assert driver.stderr is not None
    # Two signals that are pending together are one.
    assert any("again to stop at once" in line for line in driver.stderr)
    driver.send_signal(signal.SIGINT)
    driver.communicate(timeout=60)

    assert driver.returncode == 130
    wait_for(lambda: home.servers() == [], "no server", limit_s=10)


@pytest.mark.ray
@pytest.mark.timeout(290)
def test_raylet_and_driver_killed_together(tmp_path: Path) -> None:
    home = Home(tmp_path, {**CPU, "search": {"trials": 1, "seed": 0}})
    driver = home.start()
    wait_for(lambda: bool(home.servers()), "a server")
    raylets = [
        process
        for process in psutil.Process(driver.pid).children(recursive=True)
        if process.name() == "raylet"
    ]
    assert len(raylets) == 1
    for process in (*raylets, psutil.Process(driver.pid)):
        process.kill()
    driver.communicate()

    done = home.tune()

    assert done.returncode == 0, done.stderr
    check_whole(home, wanted=1)
