# ruff: noqa: N802, N815 - the fake has the names of NVIDIA's library
from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.clock import Clock
from runner.errors import ClusterLost, StudyError
from runner.measure.energy import energy_over, longest_gap_s
from runner.measure.power import (
    GpuIdentity,
    GpuProcess,
    NvmlSensor,
    PowerMeter,
)
from runner.trial import GpuEnergy, PowerSample


def sample(time_s: float, power_w: float | None = 100.0, energy_j: float | None = None,
           uuid: str = "GPU-a") -> PowerSample:  # fmt: skip
    return PowerSample(time_s, uuid, power_w, energy_j, 0.5, 1000, 1500.0, throttled=False)


def counted(time_s: float, energy_j: float) -> PowerSample:
    return sample(time_s, 100.0, energy_j)


def energy_of(samples: list[PowerSample], start_s: float, end_s: float) -> GpuEnergy:
    (gpu,) = energy_over(samples, start_s, end_s)
    return gpu


def test_counter_is_interpolated_at_both_borders() -> None:
    samples = [counted(0.0, 1000.0), counted(1.0, 1200.0), counted(2.0, 1300.0)]
    gpu = energy_of(samples, 0.5, 1.5)
    assert gpu.energy_j == pytest.approx(1250.0 - 1100.0)
    assert gpu.power_w == pytest.approx(150.0)


def test_counter_wins_over_sampled_power() -> None:
    samples = [replace(counted(time_s, 7.0 * time_s), power_w=500.0) for time_s in (0.0, 1.0, 2.0)]
    assert energy_of(samples, 0.0, 2.0).energy_j == pytest.approx(14.0)


def test_power_is_integrated_where_there_is_no_counter() -> None:
    samples = [sample(0.0, 0.0), sample(1.0, 100.0), sample(2.0, 100.0)]
    # 50..100 W over the first half second, then 100 W.
    assert energy_of(samples, 0.5, 2.0).energy_j == pytest.approx(37.5 + 100.0)


def test_a_reset_counter_is_not_used() -> None:
    samples = [counted(0.0, 1000.0), counted(1.0, 5.0), counted(2.0, 105.0)]
    assert energy_of(samples, 0.0, 2.0).energy_j == pytest.approx(200.0)


@pytest.mark.parametrize(
    "samples",
    [
        [sample(0.0, None), sample(1.0, None), sample(2.0, None)],
        [sample(0.6), sample(1.0), sample(2.0)],
        [sample(0.0), sample(1.0), sample(1.4)],
        [sample(0.0)],
    ],
    ids=["no sensor", "starts late", "ends early", "one sample"],
)
def test_energy_that_is_not_known_is_none(samples: list[PowerSample]) -> None:
    gpu = energy_of(samples, 0.5, 1.5)
    assert gpu.energy_j is None
    assert gpu.power_w is None


def test_no_samples_no_gpus() -> None:
    assert energy_over([], 0.0, 1.0) == ()


def test_sampled_power_with_a_hole_has_no_integral() -> None:
    times_s = [0.0, 0.1, 0.2, 0.3, 2.5, 2.6, 2.7]
    assert energy_of([sample(t) for t in times_s], 0.0, 2.7).energy_j is None
    # A counter counts on through the hole, as long as no border lies in it.
    assert energy_of([counted(t, 10 * t) for t in times_s], 0.0, 2.7).energy_j == 27.0
    assert energy_of([counted(t, 10 * t) for t in times_s], 0.0, 2.0).energy_j is None


def test_wide_spacing_is_no_hole_where_it_is_usual() -> None:
    # Emulated servers at 100 times speed: 20 ms of the wall are 2 s, and one sample came late.
    samples = [sample(2.1 * place) for place in range(10) if place != 4]
    assert energy_of(samples, 0.0, 18.9).energy_j == pytest.approx(1890.0)


def test_longest_gap() -> None:
    samples = [sample(t) for t in (0.0, 0.25, 0.5, 0.75, 1.0, 4.0, 4.25, 4.5, 4.75, 5.0)]
    assert longest_gap_s(samples, 0.0, 5.0) == 3.0
    assert longest_gap_s(samples, 2.0, 5.0) == 2.0
    assert longest_gap_s(samples, 4.0, 5.0) == 0.0
    assert longest_gap_s(samples, 4.0, 6.0) == 1.0
    assert longest_gap_s([], 4.0, 6.0) == 2.0


def test_each_gpu_has_its_own_energy_in_order_of_appearance() -> None:
    samples = [
        sample(time_s, watts, uuid=uuid)
        for time_s in (0.0, 1.0)
        for uuid, watts in (("GPU-b", 50.0), ("GPU-a", 70.0))
    ]
    found = energy_over(samples, 0.0, 1.0)
    assert [(gpu.gpu_uuid, gpu.energy_j) for gpu in found] == [("GPU-b", 50.0), ("GPU-a", 70.0)]


def test_what_else_a_gpu_did() -> None:
    busy = [
        replace(sample(0.0), utilization=0.2, memory_used_bytes=5),
        replace(sample(1.0), utilization=0.4, memory_used_bytes=9, throttled=True),
        replace(sample(2.0), utilization=None, memory_used_bytes=7, throttled=None),
        replace(sample(3.0), utilization=1.0, memory_used_bytes=99),
    ]
    gpu = energy_of(busy, 0.0, 2.0)
    assert gpu.utilization == pytest.approx(0.3)
    assert gpu.memory_used_bytes == 9
    assert gpu.throttled is True


@given(st.floats(1, 1000), st.lists(st.floats(0.01, 0.19), min_size=5, max_size=50), st.booleans())
def test_constant_power_times_time_is_the_energy(
    power_w: float, gaps_s: list[float], has_counter: bool
) -> None:
    times_s = [100.0 + sum(gaps_s[:count]) for count in range(len(gaps_s) + 1)]
    samples = [
        sample(time_s, power_w, power_w * time_s if has_counter else None) for time_s in times_s
    ]
    start_s = 100.0 + (times_s[-1] - 100.0) * 0.3
    end_s = 100.0 + (times_s[-1] - 100.0) * 0.8
    gpu = energy_of(samples, start_s, end_s)
    assert gpu.energy_j == pytest.approx(power_w * (end_s - start_s), rel=1e-6)


class CountingSensor:
    """Answers at once; each reading adds one joule."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.reads = 0
        self.fails = False

    def gpus(self) -> tuple[GpuIdentity, ...]:
        return ()

    def read(self, gpu_uuid: str) -> PowerSample:
        if self.fails:
            raise ClusterLost(f"{gpu_uuid} cannot be read: gone")
        self.reads += 1
        return sample(self.clock.now_s(), energy_j=float(self.reads), uuid=gpu_uuid)

    def processes(self, gpu_uuid: str) -> tuple[GpuProcess, ...]:
        return (GpuProcess(1, len(gpu_uuid)),)

    def close(self) -> None:
        self.fails = True


def test_meter_brackets_what_it_is_asked_for() -> None:
    clock = Clock()
    meter = PowerMeter(CountingSensor(clock), ["GPU-a", "GPU-b"], clock, period_s=0.001)
    meter.start()
    start_s = clock.now_s()
    clock.sleep(0.1)
    end_s = clock.now_s()
    taken = meter.samples(start_s, end_s)
    meter.stop()
    for uuid in ("GPU-a", "GPU-b"):
        times_s = [each.time_s for each in taken if each.gpu_uuid == uuid]
        assert times_s == sorted(times_s)
        assert times_s[0] <= start_s < times_s[1]
        assert times_s[-2] < end_s <= times_s[-1]
    assert [each.gpu_uuid for each in taken] == sorted(each.gpu_uuid for each in taken)
    assert all(gpu.energy_j is not None for gpu in energy_over(taken, start_s, end_s))


def test_meter_samples_at_start_and_stop_even_with_a_long_period() -> None:
    clock = Clock()
    sensor = CountingSensor(clock)
    meter = PowerMeter(sensor, ["GPU-a"], clock, period_s=1000.0)
    meter.start()
    assert sensor.reads == 1
    meter.stop()
    meter.stop()
    assert sensor.reads == 2
    assert len(meter.samples(0.0, clock.now_s())) == 2


def test_meter_never_samples_faster_than_the_wall_allows() -> None:
    # 0.1 s at 1,000 times speed would be 10,000 readings per second.
    clock = Clock(1000.0)
    sensor = CountingSensor(clock)
    meter = PowerMeter(sensor, ["GPU-a"], clock, period_s=0.1)
    start_s = time.monotonic()
    meter.start()
    time.sleep(0.1)
    meter.stop()
    # One at each end and one per 20 ms between.
    assert sensor.reads <= 2 + (time.monotonic() - start_s) / 0.02


def test_meter_tells_of_a_gpu_that_is_gone() -> None:
    clock = Clock()
    sensor = CountingSensor(clock)
    meter = PowerMeter(sensor, ["GPU-a"], clock, period_s=0.02)
    meter.start()
    sensor.fails = True
    meter.stop()
    with pytest.raises(ClusterLost, match="GPU-a cannot be read"):
        meter.samples(0.0, clock.now_s())


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


class FakeNvml(ModuleType):
    """The library pynvml as NvmlSensor sees it. Values as the driver gives them."""

    NVMLError = FakeError
    NVMLError_NotSupported = NotSupportedError
    NVMLError_FunctionNotFound = FunctionNotFoundError
    NVMLError_NoPermission = NoPermissionError
    NVML_CLOCK_SM = 1
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
            "nvmlDeviceGetName": lambda _: "NVIDIA Test GPU",
        }
        for name, answer in offered.items():
            setattr(self, name, self._guard(name, answer))

    def _guard(self, name: str, answer: object) -> object:
        def call(gpu: FakeGpu, *args: object) -> object:
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
        for gpu in self.fakes:
            if gpu.uuid == uuid:
                return gpu
        raise FakeError("Not Found")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(
        [
            FakeGpu("GPU-0000", power_mw=71_500),
            FakeGpu("GPU-1111", power_mw=402_250, energy_mj=9_000_250, reasons=4),
            FakeGpu(
                "MIG-2222",
                lacks=frozenset(
                    {
                        "nvmlDeviceGetTotalEnergyConsumption",
                        "nvmlDeviceGetPowerUsage",
                        "nvmlDeviceGetPowerManagementLimit",
                        "nvmlDeviceGetUtilizationRates",
                        "nvmlDeviceGetCurrentClocksThrottleReasons",
                        "nvmlDeviceGetComputeRunningProcesses",
                    }
                ),
            ),
        ]
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.mark.usefixtures("nvml")
def test_nvml_values_become_si() -> None:
    taken = NvmlSensor(Clock()).read("GPU-1111")
    assert taken == PowerSample(
        time_s=taken.time_s,
        gpu_uuid="GPU-1111",
        power_w=402.25,
        energy_j=9000.25,
        utilization=0.87,
        memory_used_bytes=7 << 30,
        sm_clock_mhz=2430.0,
        throttled=False,
    )


def test_nvml_gpu_is_found_by_uuid_whatever_its_index(nvml: FakeNvml) -> None:
    sensor = NvmlSensor(Clock())
    nvml.fakes.reverse()
    assert [gpu.uuid for gpu in sensor.gpus()] == ["MIG-2222", "GPU-1111", "GPU-0000"]
    assert sensor.read("GPU-0000").power_w == 71.5
    assert sensor.read("GPU-1111").power_w == 402.25


@pytest.mark.usefixtures("nvml")
def test_nvml_what_a_gpu_does_not_offer_is_none() -> None:
    sensor = NvmlSensor(Clock())
    taken = sensor.read("MIG-2222")
    assert (taken.power_w, taken.energy_j, taken.utilization, taken.throttled) == (None,) * 4
    assert taken.memory_used_bytes == 7 << 30
    assert sensor.gpus()[2] == GpuIdentity(2, "MIG-2222", "NVIDIA Test GPU", 96 << 30, None)
    assert sensor.gpus()[0].power_limit_w == 600.0
    assert sensor.processes("MIG-2222") == ()
    later = replace(taken, time_s=taken.time_s + 1)
    assert energy_of([taken, later], taken.time_s, later.time_s).energy_j is None


@pytest.mark.parametrize(
    ("reasons", "throttled"), [(0, False), (4, False), (8, True), (32, True), (64 | 4, True)]
)
def test_nvml_heat_is_throttling_and_the_power_limit_is_not(
    nvml: FakeNvml, reasons: int, *, throttled: bool
) -> None:
    nvml.fakes[0].reasons = reasons
    assert NvmlSensor(Clock()).read("GPU-0000").throttled is throttled


def test_nvml_processes(nvml: FakeNvml) -> None:
    nvml.fakes[0].processes = [
        SimpleNamespace(pid=41, usedGpuMemory=1024),
        SimpleNamespace(pid=42, usedGpuMemory=None),
    ]
    found = NvmlSensor(Clock()).processes("GPU-0000")
    assert found == (GpuProcess(41, 1024), GpuProcess(42, None))


@pytest.mark.usefixtures("nvml")
def test_nvml_gpu_that_is_not_there_is_a_loss() -> None:
    with pytest.raises(ClusterLost, match="GPU-9999 cannot be read: Not Found"):
        NvmlSensor(Clock()).read("GPU-9999")


def test_nvml_without_a_driver_says_what_to_do(nvml: FakeNvml) -> None:
    nvml.is_driver_there = False
    with pytest.raises(StudyError, match=r"Driver Not Loaded.*choose the emulated"):
        NvmlSensor(Clock())


def test_nvml_is_given_back(nvml: FakeNvml) -> None:
    sensor = NvmlSensor(Clock())
    assert nvml.is_open
    sensor.close()
    assert not nvml.is_open


def test_nvml_names_exist_in_the_real_library() -> None:
    import pynvml

    fake = FakeNvml([])
    names = [name for name in {*vars(fake), *vars(FakeNvml)} if name.lower().startswith("nvml")]
    assert len(names) > 20
    assert [name for name in names if not hasattr(pynvml, name)] == []
