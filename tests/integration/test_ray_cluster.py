"""A study on a Ray cluster that runs already."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driving import Home
from tests.emulated_server import free_port
from tests.studies import CPU

RAY = Path(sys.executable).with_name("ray")


@pytest.fixture
def address() -> Iterator[str]:
    """A head with two (logical) GPUs."""
    port = free_port()
    head = subprocess.Popen(
        [
            *(RAY, "start", "--head", "--block", "--num-gpus=2", f"--port={port}"),
            *("--include-dashboard=false", "--disable-usage-stats"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert head.stdout is not None
    for line in head.stdout:
        if "Ray runtime started" in line:
            break
    yield f"127.0.0.1:{port}"
    head.terminate()
    head.communicate(timeout=60)


@pytest.mark.ray
@pytest.mark.slow
def test_a_study_joins_a_running_cluster(address: str, tmp_path: Path) -> None:
    home = Home(tmp_path, {**CPU, "search": {"trials": 1, "seed": 0}})

    done = home.tune("--address", address)

    assert done.returncode == 0, done.stderr
    assert [result["outcome"] for result in home.results()].count("complete") == 2
    alive = subprocess.run(
        [RAY, "status", "--address", address],
        env={**os.environ, "RAY_AUTH_MODE": "token"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert alive.returncode == 0, alive.stderr


@pytest.mark.ray
@pytest.mark.slow
def test_a_cluster_with_too_few_gpus_is_told_at_once(address: str, tmp_path: Path) -> None:
    engine = {**CPU["engine"], "profile": "h200-llama-3.1-8b"}
    home = Home(tmp_path, {**CPU, "engine": engine, "hardware": {"gpus": 4}})

    done = home.tune("--address", address)

    assert done.returncode == 1
    assert "the study asks for 4 GPUs, 2 found" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.ray
@pytest.mark.slow
def test_a_cluster_that_asks_for_another_token_says_so(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "not-the-token-of-this-cluster")
    home = Home(tmp_path, CPU)

    done = home.tune("--address", address)

    assert done.returncode == 1
    assert "asks for its token; set RAY_AUTH_TOKEN" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("127.0.0.1:1", "no Ray cluster answers there"), ("nowhere", "expected HOST:PORT")],
)
def test_a_wrong_address_begins_nothing(tmp_path: Path, wrong: str, said: str) -> None:
    home = Home(tmp_path, CPU)

    done = home.tune("--address", wrong)

    assert done.returncode == 2
    assert said in done.stderr
    assert not home.study_folder.exists()
