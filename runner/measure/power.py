"""What the GPUs draw: sensors, the meter that samples them, and the energy of a window.

Power belongs to a GPU by its UUID, never by its index. This module alone knows NVML.
"""

from __future__ import annotations

import importlib
import math
import statistics
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from runner.clock import Clock
from runner.errors import ClusterLost, RunnerError, StudyError
from runner.trial import GpuEnergy, PowerSample

SHORTEST_PERIOD_S = 0.02  # of the wall: sampling must not load the machine it measures
LONGEST_GAP_S = 2.0
USUAL_GAPS = 10.0
FEWEST_SPACINGS = 5

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """One GPU of this machine. `index` is the driver's order; `uuid` is what counts."""

    index: int
    uuid: str
    name: str
    memory_total_bytes: int
    power_limit_w: float | None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory on a GPU. None: the driver does not say how much."""

    pid: int
    memory_used_bytes: int | None


class GpuSensor(Protocol):
    """Reads the GPUs of one machine. A value that a GPU does not offer is None, never 0.

    `utilization` is a share (0 to 1). `throttled` means slowed down by heat or by the board's
    power supply; running at the configured power limit is how a busy GPU works, and is not meant.
    """

    def gpus(self) -> tuple[GpuIdentity, ...]:
        """Every GPU, in the driver's order."""
        ...

    def read(self, gpu_uuid: str) -> PowerSample:
        """One reading of one GPU, stamped with the study's clock."""
        ...

    def processes(self, gpu_uuid: str) -> tuple[GpuProcess, ...]:
        """Who holds memory on this GPU."""
        ...

    def close(self) -> None:
        """Give the driver back."""
        ...


class NvmlSensor:
    """The GPUs of this machine as NVIDIA's driver reports them."""

    def __init__(self, clock: Clock) -> None:
        # The library ships no types; `Any` stays inside this class.
        self._nvml: Any = importlib.import_module("pynvml")
        self._clock = clock
        self._handles: dict[str, Any] = {}
        self._missing = (
            self._nvml.NVMLError_NotSupported,
            self._nvml.NVMLError_FunctionNotFound,
            self._nvml.NVMLError_NoPermission,
        )
        self._slow_reasons = (
            self._nvml.nvmlClocksThrottleReasonHwSlowdown
            | self._nvml.nvmlClocksThrottleReasonHwThermalSlowdown
            | self._nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
            | self._nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        )
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as err:
            raise StudyError(
                f"the NVIDIA driver cannot be asked ({err}); "
                "install it, or choose the emulated or simulated engine"
            ) from err

    def gpus(self) -> tuple[GpuIdentity, ...]:
        """Every GPU, in the driver's order (by PCI bus)."""
        count = self._ask("the driver", self._nvml.nvmlDeviceGetCount)
        return tuple(self._identify(index) for index in range(count))

    def read(self, gpu_uuid: str) -> PowerSample:
        """One reading; the time is taken between the energy and the power reading."""
        nvml, handle = self._nvml, self._handle(gpu_uuid)
        energy_mj = self._offer(gpu_uuid, nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        time_s = self._clock.now_s()
        power_mw = self._offer(gpu_uuid, nvml.nvmlDeviceGetPowerUsage, handle)
        rates = self._offer(gpu_uuid, nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._offer(gpu_uuid, nvml.nvmlDeviceGetMemoryInfo, handle)
        clock_mhz = self._offer(gpu_uuid, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        reasons = self._offer(gpu_uuid, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        return PowerSample(
            time_s=time_s,
            gpu_uuid=gpu_uuid,
            power_w=None if power_mw is None else power_mw / 1000,
            energy_j=None if energy_mj is None else energy_mj / 1000,
            utilization=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            sm_clock_mhz=None if clock_mhz is None else float(clock_mhz),
            throttled=None if reasons is None else bool(reasons & self._slow_reasons),
        )

    def processes(self, gpu_uuid: str) -> tuple[GpuProcess, ...]:
        """Compute processes on this GPU, empty if the driver does not tell."""
        handle = self._handle(gpu_uuid)
        found = self._offer(gpu_uuid, self._nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        return tuple(GpuProcess(process.pid, process.usedGpuMemory) for process in found or ())

    def close(self) -> None:
        """Shut NVML down; the sensor cannot be used afterwards."""
        self._handles.clear()
        self._ask("the driver", self._nvml.nvmlShutdown)

    def _identify(self, index: int) -> GpuIdentity:
        nvml, name = self._nvml, f"GPU {index}"
        handle = self._ask(name, nvml.nvmlDeviceGetHandleByIndex, index)
        limit_mw = self._offer(name, nvml.nvmlDeviceGetPowerManagementLimit, handle)
        return GpuIdentity(
            index=index,
            uuid=self._ask(name, nvml.nvmlDeviceGetUUID, handle),
            name=self._ask(name, nvml.nvmlDeviceGetName, handle),
            memory_total_bytes=int(self._ask(name, nvml.nvmlDeviceGetMemoryInfo, handle).total),
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
        )

    def _handle(self, gpu_uuid: str) -> Any:  # noqa: ANN401 - an opaque pointer of the library
        if gpu_uuid not in self._handles:
            handle = self._ask(gpu_uuid, self._nvml.nvmlDeviceGetHandleByUUID, gpu_uuid)
            self._handles[gpu_uuid] = handle
        return self._handles[gpu_uuid]

    def _offer(self, gpu: str, call: Callable[..., _Value], *args: object) -> _Value | None:
        """What a call answers, None where this GPU or driver does not offer it."""
        try:
            return self._ask(gpu, call, *args)
        except self._missing:
            return None

    def _ask(self, gpu: str, call: Callable[..., _Value], *args: object) -> _Value:
        try:
            return call(*args)
        except self._missing:
            raise
        except self._nvml.NVMLError as err:
            raise ClusterLost(f"{gpu} cannot be read: {err}") from err


class PowerMeter:
    """Samples GPUs from a thread of its own, from `start` to `stop`."""

    def __init__(
        self, sensor: GpuSensor, gpu_uuids: Sequence[str], clock: Clock, period_s: float = 0.1
    ) -> None:
        self._sensor = sensor
        self._clock = clock
        self._period_wall_s = max(clock.wall_duration_s(period_s), SHORTEST_PERIOD_S)
        self._samples: dict[str, list[PowerSample]] = {uuid: [] for uuid in gpu_uuids}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: RunnerError | None = None

    def start(self) -> None:
        """Take the first sample now, then one per period; raises what the sensor raises."""
        self._sample()
        self._thread = threading.Thread(target=self._run, name="power-meter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the sampling with one last sample; a second call does nothing.

        A GPU that cannot be read any more is told of by `samples`, not here: teardown goes on.
        """
        if self._thread is None:
            return
        self._stopping.set()
        self._thread.join()
        self._thread = None
        self._try_sample()

    def samples(self, start_s: float, end_s: float) -> tuple[PowerSample, ...]:
        """Samples of every GPU in [start_s, end_s] and one beyond each border, GPU by GPU.

        A running meter whose last sample lies before `end_s` takes one more. Raises ClusterLost
        if a GPU could no longer be read.
        """
        if self._failure is not None:
            raise self._failure
        if self._thread is not None and self._is_behind(end_s):
            self._sample()
        with self._lock:
            return tuple(
                sample
                for taken in self._samples.values()
                for sample in _around(taken, start_s, end_s)
            )

    def _is_behind(self, end_s: float) -> bool:
        with self._lock:
            return any(taken and taken[-1].time_s < end_s for taken in self._samples.values())

    def _run(self) -> None:
        due_s = time.monotonic() + self._period_wall_s
        while not self._stopping.wait(max(due_s - time.monotonic(), 0.0)):
            self._try_sample()
            # A late sample moves the next ones on; it is not made up for by a burst.
            due_s = max(due_s + self._period_wall_s, time.monotonic())

    def _try_sample(self) -> None:
        if self._failure is not None:
            return
        try:
            self._sample()
        except RunnerError as err:
            self._failure = err

    def _sample(self) -> None:
        with self._lock:
            for uuid, taken in self._samples.items():
                taken.append(self._sensor.read(uuid))


def energy_over(
    samples: Sequence[PowerSample], start_s: float, end_s: float
) -> tuple[GpuEnergy, ...]:
    """The energy and mean power of each GPU over [start_s, end_s], in order of first appearance.

    The energy counter, interpolated at both borders, comes first; where it is missing or was
    reset, the integral of the sampled power. A GPU whose samples do not cover the window, or
    leave a hole (see `longest_gap_s`) where a value is needed, has no energy: None, never 0.
    """
    by_gpu: dict[str, list[PowerSample]] = {}
    for sample in samples:
        by_gpu.setdefault(sample.gpu_uuid, []).append(sample)
    return tuple(_energy_of(taken, start_s, end_s) for taken in by_gpu.values())


def energy_over_all(
    samples: Sequence[PowerSample], windows: Sequence[tuple[float, float]]
) -> tuple[GpuEnergy, ...]:
    """The energy and mean power of each GPU over several windows together (see energy_over)."""
    by_gpu: dict[str, list[tuple[GpuEnergy, float]]] = {}
    for start_s, end_s in windows:
        for gpu in energy_over(samples, start_s, end_s):
            by_gpu.setdefault(gpu.gpu_uuid, []).append((gpu, end_s - start_s))
    return tuple(_joined(parts) for parts in by_gpu.values())


def _joined(parts: Sequence[tuple[GpuEnergy, float]]) -> GpuEnergy:
    """One GPU over several windows; an energy that is missing in one is missing in all."""
    gpus, length_s = [gpu for gpu, _ in parts], sum(length_s for _, length_s in parts)
    energies = [gpu.energy_j for gpu in gpus if gpu.energy_j is not None]
    energy_j = math.fsum(energies) if len(energies) == len(gpus) else None
    busy = [(gpu.utilization, part_s) for gpu, part_s in parts if gpu.utilization is not None]
    used = [gpu.memory_used_bytes for gpu in gpus if gpu.memory_used_bytes is not None]
    slowed = [gpu.throttled for gpu in gpus if gpu.throttled is not None]
    busy_s = sum(part_s for _, part_s in busy)
    return GpuEnergy(
        gpu_uuid=gpus[0].gpu_uuid,
        energy_j=energy_j,
        power_w=energy_j / length_s if energy_j is not None and length_s > 0 else None,
        utilization=sum(u * part_s for u, part_s in busy) / busy_s if busy_s > 0 else None,
        memory_used_bytes=max(used) if used else None,
        throttled=any(slowed) if slowed else None,
    )


def longest_gap_s(samples: Sequence[PowerSample], start_s: float, end_s: float) -> float:
    """The longest part of the window that a hole between samples of one GPU touches, else 0.

    A hole is longer than 2 s and than ten times the usual (median) spacing. Time before the first
    and after the last sample counts as a hole of any length.
    """
    times_s = sorted(sample.time_s for sample in samples)
    if not times_s:
        return end_s - start_s
    limit_s = _gap_limit_s(times_s)
    missing_s = max(times_s[0] - start_s, end_s - times_s[-1], 0.0)
    holes_s = (
        min(right_s, end_s) - max(left_s, start_s)
        for left_s, right_s in pairwise(times_s)
        if right_s - left_s > limit_s
    )
    return max(missing_s, *holes_s, 0.0)


def _energy_of(taken: list[PowerSample], start_s: float, end_s: float) -> GpuEnergy:
    around = _around(sorted(taken, key=lambda sample: sample.time_s), start_s, end_s)
    inside = [sample for sample in around if start_s <= sample.time_s <= end_s] or around
    energy_j = _counted_j(around, start_s, end_s)
    if energy_j is None:
        energy_j = _integrated_j(around, start_s, end_s)
    used = [s.memory_used_bytes for s in inside if s.memory_used_bytes is not None]
    busy = [s.utilization for s in inside if s.utilization is not None]
    slowed = [s.throttled for s in inside if s.throttled is not None]
    return GpuEnergy(
        gpu_uuid=taken[0].gpu_uuid,
        energy_j=energy_j,
        power_w=None if energy_j is None else energy_j / (end_s - start_s),
        utilization=statistics.fmean(busy) if busy else None,
        memory_used_bytes=max(used) if used else None,
        throttled=any(slowed) if slowed else None,
    )


def _around(taken: list[PowerSample], start_s: float, end_s: float) -> list[PowerSample]:
    """The samples in [start_s, end_s] and one beyond each border."""
    first = bisect_right(taken, start_s, key=lambda sample: sample.time_s) - 1
    last = bisect_left(taken, end_s, key=lambda sample: sample.time_s)
    return taken[max(first, 0) : last + 1]


def _counted_j(around: list[PowerSample], start_s: float, end_s: float) -> float | None:
    """The difference of the energy counter; the samples between the borders are not needed."""
    counts = [(s.time_s, s.energy_j) for s in around if s.energy_j is not None]
    if any(later[1] < earlier[1] for earlier, later in pairwise(counts)):
        return None
    limit_s = _gap_limit_s([sample.time_s for sample in around])
    at_start = _value_at(counts, start_s, limit_s)
    at_end = _value_at(counts, end_s, limit_s)
    if at_start is None or at_end is None or end_s <= start_s:
        return None
    return at_end - at_start


def _integrated_j(around: list[PowerSample], start_s: float, end_s: float) -> float | None:
    """The trapezoid integral of the sampled power."""
    powers = [(s.time_s, s.power_w) for s in around if s.power_w is not None]
    limit_s = _gap_limit_s([sample.time_s for sample in around])
    at_start = _value_at(powers, start_s, limit_s)
    at_end = _value_at(powers, end_s, limit_s)
    if at_start is None or at_end is None or end_s <= start_s:
        return None
    between = [(time_s, power_w) for time_s, power_w in powers if start_s < time_s < end_s]
    spans = list(pairwise([(start_s, at_start), *between, (end_s, at_end)]))
    if any(right[0] - left[0] > limit_s for left, right in spans):
        return None
    return sum((left[1] + right[1]) / 2 * (right[0] - left[0]) for left, right in spans)


def _value_at(points: list[tuple[float, float]], time_s: float, limit_s: float) -> float | None:
    """Linear between the two points around a time; None outside them or in a hole."""
    after = bisect_left(points, time_s, key=lambda point: point[0])
    if after < len(points) and points[after][0] == time_s:
        return points[after][1]
    if after in (0, len(points)):
        return None
    (left_s, left), (right_s, right) = points[after - 1], points[after]
    if right_s - left_s > limit_s:
        return None
    return left + (right - left) * (time_s - left_s) / (right_s - left_s)


def _gap_limit_s(times_s: Sequence[float]) -> float:
    """How far apart two samples may be. In scaled time the usual spacing itself can be long."""
    spacings_s = [right_s - left_s for left_s, right_s in pairwise(times_s)]
    if len(spacings_s) < FEWEST_SPACINGS:
        return LONGEST_GAP_S
    return max(LONGEST_GAP_S, USUAL_GAPS * statistics.median(spacings_s))
