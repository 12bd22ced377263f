"""Places for servers that run on the processors of the machine: they look like GPUs without data.

SGLang runs on a CPU too (`--device cpu`). Such a study still says how many devices it may use, and
each rank takes one; nothing of them can be read.
"""

from __future__ import annotations

from runner.clock import Clock
from runner.measure.power import GpuIdentity, GpuProcess
from runner.trial import PowerSample


class ProcessorSensor:
    """As many places as a study asks for; every value is unavailable."""

    def __init__(self, count: int, clock: Clock) -> None:
        self._count = count
        self._clock = clock

    def gpus(self) -> tuple[GpuIdentity, ...]:
        """Places 0, 1, ..."""
        return tuple(
            GpuIdentity(index, f"CPU-{index}", "CPU", 0, None) for index in range(self._count)
        )

    def read(self, gpu_uuid: str) -> PowerSample:
        """A reading without values."""
        return PowerSample(
            time_s=self._clock.now_s(),
            gpu_uuid=gpu_uuid,
            power_w=None,
            energy_j=None,
            utilization=None,
            memory_used_bytes=None,
            sm_clock_mhz=None,
            throttled=None,
        )

    def processes(self, gpu_uuid: str) -> tuple[GpuProcess, ...]:
        """Nobody: `gpu_uuid` has no memory of its own."""
        del gpu_uuid
        return ()

    def close(self) -> None:
        """Nothing is held."""
