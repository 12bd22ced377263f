"""The power meter of simulated servers: samples of every GPU on a fixed grid of virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.machine.hardware import GpuHardware
from runner.pipeline import GpuActivity, Pipeline
from runner.trial import PowerSample

PERIOD_S = 0.1


@dataclass(frozen=True, slots=True)
class MeteredGpus:
    """The GPUs of the engines, in their order. `memory_used_bytes` is the same on each."""

    hardware: GpuHardware
    uuids: tuple[str, ...]
    memory_used_bytes: int


class VirtualMeter:
    """Samples as time passes. Counters start at `base_j` at `start_s`."""

    def __init__(
        self, gpus: MeteredGpus, pipelines: Sequence[Pipeline], start_s: float, base_j: float
    ) -> None:
        self._gpus = gpus
        self._pipelines = pipelines
        self._start_s = start_s
        self._base_j = base_j
        self._taken = 0
        self._last = self._read(start_s)
        self.samples: list[PowerSample] = []

    def advance(self, now_s: float) -> None:
        """Take every sample that is due by `now_s`."""
        while (time_s := self._start_s + (self._taken + 1) * PERIOD_S) <= now_s:
            self._taken += 1
            self._sample(time_s)

    def _sample(self, time_s: float) -> None:
        hardware = self._gpus.hardware
        activities = self._read(time_s)
        for uuid, before, after in zip(self._gpus.uuids, self._last, activities, strict=True):
            busy = (after.busy_s - before.busy_s) / PERIOD_S
            slow = (after.slow_s - before.slow_s) / PERIOD_S
            self.samples.append(
                PowerSample(
                    time_s=time_s,
                    gpu_uuid=uuid,
                    power_w=(after.energy_j - before.energy_j) / PERIOD_S,
                    energy_j=self._base_j + after.energy_j,
                    utilization=min(max(busy, 0.0), 1.0),
                    memory_used_bytes=self._gpus.memory_used_bytes,
                    sm_clock_mhz=hardware.sm_clock_mhz * (1.0 - min(max(slow, 0.0), 1.0)),
                    throttled=False,
                )
            )
        self._last = activities

    def _read(self, time_s: float) -> tuple[GpuActivity, ...]:
        return tuple(gpu for one in self._pipelines for gpu in one.gpu_activity(time_s))
