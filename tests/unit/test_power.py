"""The meter, and NVIDIA's sensor behind a library that tests can break."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from runner.clock import Clock
from runner.errors import ClusterLost, StudyError
from runner.measure.energy import energy_over, longest_gap_s
from runner.measure.power import (
    GpuIdentity,
    GpuKind,
    GpuProcess,
    NvmlSensor,
    PowerMeter,
    foreign_pid,
)
from runner.trial import PowerSample
from tests.fake_nvml import FakeGpu, FakeNvml
from tests.power_samples import sample

OWN = os.getpid()


class CountingSensor:
    """Answers at once; each reading adds one joule."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.reads = 0
        self.fails = False
        self.pids: tuple[int, ...] = ()

    def gpus(self) -> tuple[GpuIdentity, ...]:
        return ()

    def read(self, gpu_uuid: str) -> PowerSample:
        if self.fails:
            raise ClusterLost(f"{gpu_uuid} cannot be read: gone")
        self.reads += 1
        return sample(self.clock.now_s(), energy_j=float(self.reads), uuid=gpu_uuid)

    def processes(self, gpu_uuid: str) -> tuple[GpuProcess, ...]:
        return tuple(GpuProcess(pid, len(gpu_uuid)) for pid in self.pids)

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


class SlowSensor(CountingSensor):
    """A sensor whose values change every `update_s`."""

    update_s = 0.1

    def read(self, gpu_uuid: str) -> PowerSample:
        now_s = self.clock.now_s()
        return replace(super().read(gpu_uuid), time_s=now_s, energy_j=now_s // self.update_s)


def test_meter_keeps_of_equal_readings_the_first_and_the_last() -> None:
    clock = Clock()
    sensor = SlowSensor(clock)
    meter = PowerMeter(sensor, ["GPU-a"], clock, period_s=0.02)
    meter.start()
    clock.sleep(0.5)
    meter.stop()
    kept = meter.samples(0.0, clock.now_s())
    assert len(kept) < sensor.reads
    counts = [each.energy_j for each in kept]
    assert max(map(counts.count, counts)) <= 2
    spacings_s = [b.time_s - a.time_s for a, b in pairwise(kept) if a.energy_j != b.energy_j]
    # The first of a new value follows the last of the old one: the change is not blurred.
    assert min(spacings_s) < sensor.update_s


def test_meter_says_now_and_then_that_a_dead_sensor_was_read() -> None:
    clock = Clock()
    sensor = SlowSensor(clock)
    sensor.update_s = 1e9
    meter = PowerMeter(sensor, ["GPU-a"], clock, period_s=0.02)
    meter.start()
    start_s = clock.now_s()
    clock.sleep(1.3)
    end_s = clock.now_s()
    meter.stop()
    assert longest_gap_s(meter.samples(start_s, end_s), start_s, end_s) == 0.0
    assert 3 <= len(meter.samples(start_s, end_s)) < sensor.reads


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_meter_stamps_readings_with_the_studys_clock(scale: float) -> None:
    clock = Clock(scale)
    meter = PowerMeter(CountingSensor(clock), ["GPU-a"], clock)
    before_s = time.monotonic() * scale
    meter.start()
    time.sleep(0.1)
    meter.stop()
    times_s = [each.time_s for each in meter.samples(0.0, clock.now_s())]
    assert before_s <= times_s[0]
    assert times_s == sorted(times_s)
    assert times_s[-1] <= time.monotonic() * scale
    assert times_s[-1] - times_s[0] >= 0.1 * scale


def test_meter_notes_who_else_uses_a_gpu() -> None:
    clock = Clock()
    sensor = CountingSensor(clock)
    meter = PowerMeter(sensor, ["GPU-a"], clock, period_s=1000.0)
    sensor.pids = (os.getpid(), 1)
    meter.start()
    meter.expect([os.getpgrp()])
    meter.stop()
    assert [each.foreign_pid for each in meter.samples(0.0, clock.now_s())] == [None, 1]


@pytest.mark.parametrize(
    ("pids", "found"),
    [
        ((), None),
        ((OWN,), None),
        ((OWN, 1), 1),
        ((1,), None),  # perhaps numbers of another namespace: our own process is not seen
        ((OWN, 2**22 + 1), None),  # gone by now
    ],
)
def test_a_stranger_is_believed_where_our_own_process_is_seen(
    pids: tuple[int, ...], found: int | None
) -> None:
    processes = [GpuProcess(pid, None) for pid in pids]
    assert foreign_pid(processes, frozenset({os.getpgrp()})) == found


def test_meter_tells_of_a_gpu_that_is_gone() -> None:
    clock = Clock()
    sensor = CountingSensor(clock)
    meter = PowerMeter(sensor, ["GPU-a"], clock, period_s=0.02)
    meter.start()
    sensor.fails = True
    meter.stop()
    with pytest.raises(ClusterLost, match="GPU-a cannot be read"):
        meter.samples(0.0, clock.now_s())


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(
        [
            FakeGpu("GPU-0000", power_mw=71_500),
            FakeGpu("GPU-1111", power_mw=402_250, energy_mj=9_000_250, reasons=4),
            FakeGpu("GPU-2222", bus_id="00000000:C1:00.0", slices=[FakeGpu("MIG-3333")]),
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
    uuids = [gpu.uuid for gpu in sensor.gpus()]
    assert uuids == ["GPU-2222", "MIG-3333", "GPU-1111", "GPU-0000"]
    assert sensor.read("GPU-0000").power_w == 71.5
    assert sensor.read("GPU-1111").power_w == 402.25


@pytest.mark.usefixtures("nvml")
def test_nvml_a_slice_has_no_power_of_its_own() -> None:
    sensor = NvmlSensor(Clock())
    taken = sensor.read("MIG-3333")  # the driver would answer with the watts of the whole GPU
    assert (taken.power_w, taken.energy_j) == (None, None)
    assert taken.memory_used_bytes == 7 << 30
    whole, piece = sensor.gpus()[2:]
    assert whole.kind is GpuKind.PARTITIONED
    bus, kind = "00000000:C1:00.0", GpuKind.SLICE
    assert piece == GpuIdentity(2, "MIG-3333", "NVIDIA Test GPU", 96 << 30, None, bus, kind, (9, 0))
    later = replace(taken, time_s=taken.time_s + 1)
    (gpu,) = energy_over([taken, later], taken.time_s, later.time_s)
    assert (gpu.energy_j, gpu.power_w) == (None, None)


@pytest.mark.usefixtures("nvml")
def test_nvml_knows_the_bus_and_the_limit_of_a_gpu() -> None:
    first = NvmlSensor(Clock()).gpus()[0]
    assert first.power_limit_w == 600.0
    assert first.pci_bus_id == "00000000:01:00.0"
    assert first.kind is GpuKind.WHOLE


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("nvmlDeviceGetTotalEnergyConsumption", "energy_j"),
        ("nvmlDeviceGetPowerUsage", "power_w"),
        ("nvmlDeviceGetUtilizationRates", "utilization"),
        ("nvmlDeviceGetMemoryInfo", "memory_used_bytes"),
        ("nvmlDeviceGetClockInfo", "sm_clock_mhz"),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", "throttled"),
    ],
)
def test_nvml_what_a_gpu_does_not_offer_is_none_and_the_rest_is_there(
    nvml: FakeNvml, call: str, value: str
) -> None:
    nvml.fakes[0].lacks = frozenset({call})
    values = {
        name: getattr(NvmlSensor(Clock()).read("GPU-0000"), name)
        for name in (
            *("energy_j", "power_w", "utilization", "memory_used_bytes"),
            *("sm_clock_mhz", "throttled"),
        )
    }
    assert [name for name, each in values.items() if each is None] == [value]


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("nvmlDeviceGetPowerManagementLimit", "power_limit_w"),
        ("nvmlDeviceGetPciInfo", "pci_bus_id"),
        ("nvmlDeviceGetMigMode", ""),
    ],
)
def test_nvml_an_identity_lacks_what_the_driver_does_not_offer(
    nvml: FakeNvml, call: str, value: str
) -> None:
    nvml.fakes[0].lacks = frozenset({call})
    gpu = NvmlSensor(Clock()).gpus()[0]
    assert (gpu.uuid, gpu.kind) == ("GPU-0000", GpuKind.WHOLE)
    lacking = [name for name in ("power_limit_w", "pci_bus_id") if getattr(gpu, name) is None]
    assert lacking == [value] * bool(value)


def test_nvml_processes_that_are_not_told_are_none(nvml: FakeNvml) -> None:
    nvml.fakes[0].lacks = frozenset({"nvmlDeviceGetComputeRunningProcesses"})
    assert NvmlSensor(Clock()).processes("GPU-0000") == ()


def test_nvml_without_a_counter_power_is_integrated(nvml: FakeNvml) -> None:
    nvml.fakes[0].lacks = frozenset({"nvmlDeviceGetTotalEnergyConsumption"})
    taken = NvmlSensor(Clock()).read("GPU-0000")
    later = replace(taken, time_s=taken.time_s + 2)
    (gpu,) = energy_over([taken, later], taken.time_s, later.time_s)
    assert gpu.energy_j == pytest.approx(143.0)


def test_nvml_a_gpu_that_falls_off_the_bus_in_mid_window_is_a_loss(nvml: FakeNvml) -> None:
    clock = Clock()
    meter = PowerMeter(NvmlSensor(clock), ["GPU-0000", "GPU-1111"], clock, period_s=0.02)
    meter.start()
    start_s = clock.now_s()
    nvml.fakes[1].is_lost = True
    clock.sleep(0.1)
    meter.stop()
    with pytest.raises(ClusterLost, match="GPU-1111 cannot be read: GPU is lost"):
        meter.samples(start_s, clock.now_s())


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
