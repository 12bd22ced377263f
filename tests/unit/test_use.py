"""Who uses a GPU: NVIDIA's driver behind a library that tests can break, and real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from runner.clock import Clock
from runner.measure.power import NvmlSensor
from runner.measure.use import GpuUse, read_use
from tests.fake_nvml import FakeGpu, FakeNvml

GIB = 1 << 30
NO_PID = 1 << 22  # above the kernel's highest


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(["sh", "-c", "echo; read x"], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield process
        process.kill()


def use_of(monkeypatch: pytest.MonkeyPatch, *processes: SimpleNamespace) -> GpuUse:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu("GPU-a", processes=[*processes])]))
    sensor = NvmlSensor(Clock())
    (use,) = read_use(sensor, sensor.gpus())
    return use


def test_a_process_is_named_with_its_command_and_memory(
    monkeypatch: pytest.MonkeyPatch, stranger: subprocess.Popen[bytes]
) -> None:
    use = use_of(monkeypatch, SimpleNamespace(pid=stranger.pid, usedGpuMemory=6 * GIB))
    assert not use.is_free  # the fake has 7 of 96 GiB in use
    assert str(use) == (
        f"GPU 0 (GPU-a): 7.0 GiB in use, by process {stranger.pid} (sh -c echo; read x) "
        "with 6.0 GiB"
    )


def test_a_process_of_unknown_size_is_named_all_the_same(
    monkeypatch: pytest.MonkeyPatch, stranger: subprocess.Popen[bytes]
) -> None:
    use = use_of(monkeypatch, SimpleNamespace(pid=stranger.pid, usedGpuMemory=None))
    assert str(use).endswith(f"by process {stranger.pid} (sh -c echo; read x)")


def test_a_pid_of_another_place_is_judged_by_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    use = use_of(monkeypatch, SimpleNamespace(pid=NO_PID, usedGpuMemory=6 * GIB))
    assert use.holders == ()
    assert not use.is_free
    assert str(use).endswith("7.0 GiB in use, by no process that can be seen from here")


def test_a_gpu_that_does_not_tell_its_memory_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu("GPU-a", lacks=frozenset({"nvmlDeviceGetMemoryInfo"}))
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([gpu]))
    sensor = NvmlSensor(Clock())
    (use,) = read_use(sensor, sensor.gpus())
    assert use.memory_bytes is None
    assert use.is_free
