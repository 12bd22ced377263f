"""What a study ran on, and what is different on the next machine."""

from __future__ import annotations

import json
import os
import platform
import socket

import pytest

from runner.record.environment import changed, describe_environment


def test_the_environment_names_versions_machine_and_gpus() -> None:
    found = describe_environment()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["python"] == platform.python_version()
    assert found["host"] == socket.gethostname()
    assert found["cpu"] == {**found["cpu"], "count": os.cpu_count()}  # type: ignore[dict-item]
    assert isinstance(found["memory_bytes"], int)
    assert found["memory_bytes"] > 2**28
    assert isinstance(found["gpus"], list)
    libraries = found["libraries"]
    assert isinstance(libraries, dict)
    assert {name for name, version in libraries.items() if version} >= {"ray", "optuna", "mlflow"}


def test_nothing_secret_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "very_secret_too")
    text = json.dumps(describe_environment())
    assert "very_secret" not in text


def test_an_unchanged_environment_has_no_changes() -> None:
    assert changed(describe_environment(), describe_environment()) == []


def test_changes_are_named_with_their_place() -> None:
    old = {"python": "3.11.2", "libraries": {"ray": "2.59.0", "mlflow": "3.17.2"}, "gpus": []}
    new = {
        "python": "3.11.2",
        "libraries": {"ray": "2.60.0", "mlflow": None},
        "gpus": [{"uuid": "GPU-1", "power_limit_w": 600.0}],
    }
    assert changed(old, new) == [  # type: ignore[arg-type]  # plain literals
        "libraries.ray: 2.59.0 -> 2.60.0",
        "libraries.mlflow: 3.17.2 -> none",
        "gpus[0].uuid: none -> GPU-1",
        "gpus[0].power_limit_w: none -> 600.0",
    ]
