# ruff: noqa: N802, N815 - the fake has the names of NVIDIA's library
"""The library pynvml as NvmlSensor sees it, with GPUs that tests can break."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace


class FakeError(Exception):
    pass


class NotSupportedError(FakeError):
    pass


class FunctionNotFoundError(FakeError):
    pass


class NoPermissionError(FakeError):
    pass


@dataclass
class FakeGpu:
    """One GPU behind the fake library; `lacks` are the calls it does not offer."""

    uuid: str
    power_mw: int = 300_000
    energy_mj: int = 5_000_000
    reasons: int = 0
    lacks: frozenset[str] = frozenset()
    processes: list[SimpleNamespace] = field(default_factory=list)
    bus_id: str = "00000000:01:00.0"
    name: str = "NVIDIA Test GPU"
    slices: list[FakeGpu] | None = None
    is_lost: bool = False
    capability: tuple[int, int] = (9, 0)


class GpuLostError(FakeError):
    pass


class FakeNvml(ModuleType):
    """The library pynvml as NvmlSensor sees it. Values as the driver gives them."""

    NVMLError = FakeError
    NVMLError_NotSupported = NotSupportedError
    NVMLError_FunctionNotFound = FunctionNotFoundError
    NVMLError_NoPermission = NoPermissionError
    NVML_CLOCK_SM = 1
    NVML_DEVICE_MIG_ENABLE = 1
    nvmlClocksThrottleReasonSwPowerCap = 4
    nvmlClocksThrottleReasonHwSlowdown = 8
    nvmlClocksThrottleReasonSwThermalSlowdown = 32
    nvmlClocksThrottleReasonHwThermalSlowdown = 64
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 128

    def __init__(self, gpus: list[FakeGpu]) -> None:
        super().__init__("pynvml")
        self.fakes = gpus
        self.is_driver_there = True
        self.is_open = False
        offered = {
            "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: gpu.energy_mj,
            "nvmlDeviceGetPowerUsage": lambda gpu: gpu.power_mw,
            "nvmlDeviceGetPowerManagementLimit": lambda _: 600_000,
            "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=87, memory=12),
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=7 << 30, total=96 << 30),
            "nvmlDeviceGetClockInfo": lambda _gpu, _kind: 2430,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: gpu.reasons,
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: gpu.processes,
            "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
            "nvmlDeviceGetName": lambda gpu: gpu.name,
            "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=gpu.bus_id.encode()),
            "nvmlDeviceGetCudaComputeCapability": lambda gpu: list(gpu.capability),
            "nvmlDeviceGetMigMode": lambda gpu: [int(gpu.slices is not None)] * 2,
            "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 0 if gpu.slices is None else 7,
        }
        for name, answer in offered.items():
            setattr(self, name, self._guard(name, answer))

    def _guard(self, name: str, answer: object) -> object:
        def call(gpu: FakeGpu, *args: object) -> object:
            if gpu.is_lost:
                raise GpuLostError("GPU is lost")
            if name in gpu.lacks:
                raise NotSupportedError(name)
            assert callable(answer)
            return answer(gpu, *args)

        return call

    def nvmlInit(self) -> None:
        if not self.is_driver_there:
            raise FakeError("Driver Not Loaded")
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.fakes)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.fakes[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        slices = [each for gpu in self.fakes for each in gpu.slices or ()]
        for gpu in [*self.fakes, *slices]:
            if gpu.uuid == uuid:
                return gpu
        raise FakeError("Not Found")

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, place: int) -> FakeGpu:
        if gpu.slices is None or place >= len(gpu.slices):
            raise FakeError("Not Found")
        return gpu.slices[place]
