"""Readings of GPUs for tests."""

from __future__ import annotations

from runner.trial import PowerSample


def sample(time_s: float, power_w: float | None = 100.0, energy_j: float | None = None,
           uuid: str = "GPU-a") -> PowerSample:  # fmt: skip
    return PowerSample(time_s, uuid, power_w, energy_j, 0.5, 1000, 1500.0, throttled=False)
