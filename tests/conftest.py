"""What every test starts from: an environment that says nothing about the machine."""

from __future__ import annotations

import os
import shutil

import pytest

PREFIXES = ("RUNNER_", "MLFLOW_", "OPTUNA_", "SGLANG_")
NAMES = (
    "RAY_ADDRESS",
    "RAY_AUTH_TOKEN",
    "CUDA_VISIBLE_DEVICES",
    "NO_COLOR",
    "FORCE_COLOR",
    "COLUMNS",
    "LINES",
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what a user may have set, and keep the libraries from phoning home."""
    for name in tuple(os.environ):
        if name.startswith(PREFIXES) or name in NAMES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests that need a browser where there is none, and say what would help."""
    if item.get_closest_marker("browser") is None:
        return
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found; scripts/test --all installs them")
