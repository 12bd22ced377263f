"""What the GPUs draw: sensors, the meter that samples them, and the energy of a window.

Power belongs to a GPU by its UUID, never by its index. This module alone knows NVML.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from runner.clock import Clock
from runner.errors import ClusterLost, RunnerError, StudyError
from runner.measure.energy import around
from runner.trial import PowerSample

SHORTEST_PERIOD_S = 0.02  # of the wall: sampling must not load the machine it measures
LONGEST_RUN_S = 1.0  # that one pair of equal readings stands for
LOOK_EVERY = 10  # sampling periods from one look at the processes to the next

SLICE_PREFIX = "MIG-"

_Value = TypeVar("_Value")


class GpuKind(StrEnum):
    """A whole GPU, one that is cut into slices (MIG) and cannot be used as a whole, or a slice."""

    WHOLE = "whole"
    PARTITIONED = "partitioned"
    SLICE = "slice"


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """One GPU of this machine. `index` is the driver's order; `uuid` is what counts.

    `capability` is CUDA's compute capability, (9, 0) for SM90; None: not told. A slice has the
    index and the PCI bus id of its GPU and no power limit of its own.
    """

    index: int
    uuid: str
    name: str
    memory_total_bytes: int
    power_limit_w: float | None
    pci_bus_id: str | None = None
    kind: GpuKind = GpuKind.WHOLE
    capability: tuple[int, int] | None = None


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
        """Every GPU, in the driver's order (by PCI bus); its slices follow it."""
        count = self._ask("the driver", self._nvml.nvmlDeviceGetCount)
        return tuple(gpu for index in range(count) for gpu in self._identify(index))

    def read(self, gpu_uuid: str) -> PowerSample:
        """One reading; its time is the middle of the energy reading.

        A slice has no power of its own: the driver answers with that of the whole GPU.
        """
        nvml, handle = self._nvml, self._handle(gpu_uuid)
        is_slice = gpu_uuid.startswith(SLICE_PREFIX)
        before_s = self._clock.now_s()
        energy_mj = power_mw = None
        if not is_slice:
            energy_mj = self._offer(gpu_uuid, nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        time_s = (before_s + self._clock.now_s()) / 2
        if not is_slice:
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

    def _identify(self, index: int) -> Iterator[GpuIdentity]:
        """One GPU and its slices."""
        nvml, name = self._nvml, f"GPU {index}"
        handle = self._ask(name, nvml.nvmlDeviceGetHandleByIndex, index)
        limit_mw = self._offer(name, nvml.nvmlDeviceGetPowerManagementLimit, handle)
        bus = self._offer(name, nvml.nvmlDeviceGetPciInfo, handle)
        modes = self._offer(name, nvml.nvmlDeviceGetMigMode, handle)
        capability = self._offer(name, nvml.nvmlDeviceGetCudaComputeCapability, handle)
        is_cut = modes is not None and modes[0] == nvml.NVML_DEVICE_MIG_ENABLE
        gpu = GpuIdentity(
            index=index,
            uuid=self._ask(name, nvml.nvmlDeviceGetUUID, handle),
            name=self._ask(name, nvml.nvmlDeviceGetName, handle),
            memory_total_bytes=self._memory_bytes(name, handle),
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
            pci_bus_id=None if bus is None else _text(bus.busId),
            kind=GpuKind.PARTITIONED if is_cut else GpuKind.WHOLE,
            capability=None if capability is None else (int(capability[0]), int(capability[1])),
        )
        yield gpu
        if is_cut:
            most = self._offer(name, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
            for place in range(most):
                yield from self._slice(gpu, handle, place)

    def _slice(self, gpu: GpuIdentity, parent: object, place: int) -> Iterator[GpuIdentity]:
        """The slice at a place of a partitioned GPU, if there is one."""
        nvml, name = self._nvml, f"slice {place} of GPU {gpu.index}"
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, place)
        except nvml.NVMLError:
            return  # places are counted up to the most that there could be
        yield replace(
            gpu,
            uuid=self._ask(name, nvml.nvmlDeviceGetUUID, handle),
            name=self._offer(name, nvml.nvmlDeviceGetName, handle) or gpu.name,
            memory_total_bytes=self._memory_bytes(name, handle),
            power_limit_w=None,
            kind=GpuKind.SLICE,
        )

    def _memory_bytes(self, name: str, handle: object) -> int:
        memory = self._offer(name, self._nvml.nvmlDeviceGetMemoryInfo, handle)
        return 0 if memory is None else int(memory.total)

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
    """Samples GPUs from a thread of its own, from `start` to `stop`.

    Of readings that repeat each other, because the sensor is slower than the sampling, the first
    and the last are kept: all that is known, when a value changed included.
    """

    def __init__(
        self, sensor: GpuSensor, gpu_uuids: Sequence[str], clock: Clock, period_s: float = 0.1
    ) -> None:
        self._sensor = sensor
        self._clock = clock
        self._period_wall_s = max(clock.wall_duration_s(period_s), SHORTEST_PERIOD_S)
        self._own_groups: frozenset[int] = frozenset()
        self._foreign: dict[str, int | None] = {}
        self._rounds = 0
        self._samples: dict[str, list[PowerSample]] = {uuid: [] for uuid in gpu_uuids}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: RunnerError | None = None

    def expect(self, groups: Sequence[int]) -> None:
        """From now on, note who else uses the GPUs than these process groups."""
        with self._lock:
            self._own_groups = frozenset(groups)
            self._rounds = 0

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
                for sample in around(taken, start_s, end_s)
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
            if self._own_groups and self._rounds % LOOK_EVERY == 0:
                for uuid in self._samples:
                    self._foreign[uuid] = foreign_pid(
                        self._sensor.processes(uuid), self._own_groups
                    )
            self._rounds += 1
            for uuid, taken in self._samples.items():
                sample = self._sensor.read(uuid)
                self._keep(taken, replace(sample, foreign_pid=self._foreign.get(uuid)))

    def _keep(self, taken: list[PowerSample], sample: PowerSample) -> None:
        if (
            len(taken) > 1
            and sample.time_s - taken[-2].time_s <= LONGEST_RUN_S
            and all(replace(each, time_s=sample.time_s) == sample for each in taken[-2:])
        ):
            taken[-1] = sample
        else:
            taken.append(sample)


def foreign_pid(processes: Sequence[GpuProcess], own_groups: frozenset[int]) -> int | None:
    """A process on a GPU that belongs to none of our process groups; None: none is seen.

    Inside a container the driver may name processes by numbers that mean nothing here. So
    strangers are believed only where our own processes are seen as well.
    """
    groups = {process.pid: _group_of(process.pid) for process in processes}
    if not own_groups & set(groups.values()):
        return None
    strangers = (
        pid for pid, group in groups.items() if group is not None and group not in own_groups
    )
    return min(strangers, default=None)


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
