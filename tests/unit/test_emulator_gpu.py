"""Emulated GPUs: what a sensor reads of them, whoever writes, dies or reads half-way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.clock import Clock
from runner.engines.emulator.gpu import (
    EmulatedGpus,
    GpuWriter,
    create_gpus,
    create_machine,
    plant_power_offset,
    visible_gpus,
)
from runner.engines.emulator.gpu_file import GpuModel
from runner.errors import StudyError
from runner.machine.profile import load_profile
from runner.pipeline import GpuActivity
from runner.trial import PowerSample

MODEL = GpuModel("Test GPU", 96 * 1024**3, 600.0, 80.0, 345.0, 2000.0)
# A process that holds a GPU, has spent 500 J on it beyond idle and draws 100 W until it is killed.
HOLDER = """
import sys, time
from pathlib import Path
from runner.engines.emulator.gpu import GpuWriter
from runner.pipeline import GpuActivity
writer = GpuWriter(Path(sys.argv[1]), 0)
writer.hold(1000)
writer.publish(GpuActivity(0.0, 80.0 * 10), 10.0)
writer.publish(GpuActivity(4.0, 80.0 * 15 + 500), 15.0)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_gpus(tmp_path, MODEL, 3)
    return tmp_path


@pytest.fixture
def gpus(folder: Path) -> Iterator[EmulatedGpus]:
    sensor = EmulatedGpus(folder, Clock(50.0))
    yield sensor
    sensor.close()


@pytest.fixture
def holder(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = (sys.executable, "-c", HOLDER, str(folder))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def read(gpus: EmulatedGpus, index: int) -> PowerSample:
    return gpus.read(gpus.gpus()[index].uuid)


def mean_power_w(first: PowerSample, second: PowerSample) -> float:
    """What the energy counter says of the time between two readings."""
    assert first.energy_j is not None
    assert second.energy_j is not None
    assert second.time_s > first.time_s
    return (second.energy_j - first.energy_j) / (second.time_s - first.time_s)


def test_a_machine_is_that_of_its_profile(tmp_path: Path) -> None:
    profile = load_profile("cpu-blocking-pp2")
    create_machine(tmp_path / "machine", profile)
    found = EmulatedGpus(tmp_path / "machine", Clock()).gpus()
    assert [gpu.index for gpu in found] == [0, 1]
    assert {gpu.name for gpu in found} == {profile.gpu.name}
    assert {gpu.memory_total_bytes for gpu in found} == {profile.gpu.memory_bytes}
    assert {gpu.power_limit_w for gpu in found} == {profile.gpu.power_limit_w}


def test_making_the_same_machine_again_changes_nothing(folder: Path, gpus: EmulatedGpus) -> None:
    before = [path.read_bytes() for path in sorted(folder.glob("*.state"))]
    create_gpus(folder, MODEL, 3)
    assert [path.read_bytes() for path in sorted(folder.glob("*.state"))] == before
    assert len({gpu.uuid for gpu in gpus.gpus()}) == 3


def test_another_machine_in_the_same_folder_replaces_it(folder: Path) -> None:
    uuid = EmulatedGpus(folder, Clock()).gpus()[0].uuid
    other = GpuModel("Other GPU", 1024, 100.0, 10.0, 345.0, 2000.0)
    create_gpus(folder, other, 1)
    found = EmulatedGpus(folder, Clock()).gpus()
    assert [(gpu.name, gpu.uuid) for gpu in found] == [("Other GPU", uuid)]


def test_a_machine_in_use_is_not_replaced(folder: Path, holder: subprocess.Popen[bytes]) -> None:
    with pytest.raises(StudyError, match=f"process {holder.pid} uses it"):
        create_gpus(folder, GpuModel("Other GPU", 1024, 100.0, 10.0, 345.0, 2000.0), 3)


def test_a_folder_without_gpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="no emulated GPUs"):
        EmulatedGpus(tmp_path, Clock())


def test_an_idle_gpu_draws_idle_power_on_the_emulated_clock(gpus: EmulatedGpus) -> None:
    first, second = read(gpus, 0), read(gpus, 0)
    assert mean_power_w(first, second) == pytest.approx(80.0, rel=1e-6)
    assert second.power_w == 80.0
    assert second.utilization == 0.0
    assert second.memory_used_bytes == 0
    assert second.sm_clock_mhz == 345.0
    assert second.throttled is False
    assert gpus.processes(second.gpu_uuid) == ()


def test_a_planted_offset_changes_the_joules_of_that_gpu_only(
    folder: Path, gpus: EmulatedGpus
) -> None:
    plant_power_offset(folder, 1, 50.0)
    first = [read(gpus, index) for index in range(3)]
    second = [read(gpus, index) for index in range(3)]
    assert [sample.power_w for sample in second] == [80.0, 130.0, 80.0]
    drawn = [mean_power_w(a, b) for a, b in zip(first, second, strict=True)]
    assert drawn == pytest.approx([80.0, 130.0, 80.0], rel=1e-6)


def test_offsets_add_up_and_what_they_drew_stays(folder: Path, gpus: EmulatedGpus) -> None:
    plant_power_offset(folder, 0, 50.0)
    first = read(gpus, 0)
    plant_power_offset(folder, 0, -50.0)
    second, third = read(gpus, 0), read(gpus, 0)
    assert 80.0 <= mean_power_w(first, second) <= 130.0
    assert mean_power_w(second, third) == pytest.approx(80.0, rel=1e-6)


def test_a_working_server_shows_on_its_gpus(folder: Path, gpus: EmulatedGpus) -> None:
    idle = read(gpus, 2)
    writer = GpuWriter(folder, 2)
    writer.hold(70 * 1024**3)
    writer.publish(GpuActivity(busy_s=0.0, energy_j=0.0), 0.0)
    writer.publish(GpuActivity(busy_s=0.6, energy_j=300.0), 1.0)
    busy = read(gpus, 2)
    assert busy.power_w == pytest.approx(300.0)
    assert busy.utilization == pytest.approx(0.6)
    assert busy.memory_used_bytes == 70 * 1024**3
    assert busy.sm_clock_mhz == 2000.0
    assert busy.energy_j is not None
    assert idle.energy_j is not None
    since_s = busy.time_s - idle.time_s
    assert busy.energy_j - idle.energy_j == pytest.approx(80.0 * since_s + 220.0)
    assert read(gpus, 0).power_w == 80.0
    writer.leave()
    gone = read(gpus, 2)
    assert (gone.power_w, gone.memory_used_bytes) == (80.0, 0)
    assert mean_power_w(busy, gone) == pytest.approx(80.0, rel=1e-6)


def test_the_power_reading_is_the_mean_of_the_last_second(folder: Path, gpus: EmulatedGpus) -> None:
    writer = GpuWriter(folder, 0)
    for tenth in range(21):  # one second at 80 W, then one at 280 W
        extra_j = 200.0 * max(0, tenth - 10) / 10
        elapsed_s = tenth / 10
        writer.publish(GpuActivity(0.0, 80.0 * elapsed_s + extra_j), elapsed_s)
        if tenth == 15:
            assert read(gpus, 0).power_w == pytest.approx(180.0)
    assert read(gpus, 0).power_w == pytest.approx(280.0)
    writer.leave()


def test_the_energy_counter_never_falls(folder: Path, gpus: EmulatedGpus) -> None:
    writer = GpuWriter(folder, 0)
    writer.publish(GpuActivity(0.0, 0.0), 0.0)
    writer.publish(GpuActivity(0.5, 500.0), 1.0)
    before = read(gpus, 0)
    writer.publish(GpuActivity(0.4, 400.0), 1.1)
    after = read(gpus, 0)
    assert mean_power_w(before, after) == pytest.approx(80.0, rel=1e-6)
    writer.leave()


def test_a_killed_process_leaves_an_idle_gpu_and_its_joules(
    gpus: EmulatedGpus, holder: subprocess.Popen[bytes]
) -> None:
    held = read(gpus, 0)
    assert [process.pid for process in gpus.processes(held.gpu_uuid)] == [holder.pid]
    assert (held.power_w, held.memory_used_bytes) == (180.0, 1000)
    holder.kill()
    holder.wait()
    gone = read(gpus, 0)
    assert gpus.processes(gone.gpu_uuid) == ()
    assert (gone.power_w, gone.memory_used_bytes, gone.utilization) == (80.0, 0, 0.0)
    assert mean_power_w(held, gone) == pytest.approx(80.0, rel=1e-6)


def test_the_next_process_takes_a_dead_ones_seat_with_its_joules(
    folder: Path, gpus: EmulatedGpus, holder: subprocess.Popen[bytes]
) -> None:
    held = read(gpus, 0)
    holder.kill()
    holder.wait()
    writer = GpuWriter(folder, 0)
    writer.publish(GpuActivity(0.0, 0.0), 0.0)
    writer.publish(GpuActivity(0.0, 80.0 + 30.0), 1.0)
    now = read(gpus, 0)
    assert held.energy_j is not None
    assert now.energy_j is not None
    since_s = now.time_s - held.time_s
    assert now.energy_j - held.energy_j == pytest.approx(80.0 * since_s + 30.0)
    writer.leave()


def test_processes_on_one_gpu_add_up(
    folder: Path, gpus: EmulatedGpus, holder: subprocess.Popen[bytes]
) -> None:
    writer = GpuWriter(folder, 0)
    assert writer.free_bytes == MODEL.memory_total_bytes - 1000
    writer.hold(2000)
    sample = read(gpus, 0)
    assert sample.memory_used_bytes == 3000
    assert {process.pid for process in gpus.processes(sample.gpu_uuid)} > {holder.pid}
    writer.leave()


UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("2,0", (2, 0)),
        (" 1 , 2 ", (1, 2)),
        ("GPU-bb33,GPU-aa11", (2, 0)),
        ("GPU-bb", (2,)),
        ("GPU-aa", ()),  # two begin so
        ("0,7,1", (0,)),  # the first unknown one ends the list
        ("0,-1,1", (0,)),
        ("1,1", (1,)),
    ],
)
def test_visible_devices_are_read_as_the_driver_does(
    value: str | None, expected: tuple[int, ...]
) -> None:
    assert visible_gpus(value, UUIDS) == expected


def test_a_slowed_down_gpu_says_so_and_draws_less(folder: Path, gpus: EmulatedGpus) -> None:
    writer = GpuWriter(folder, 0)
    writer.throttle(0.7)
    writer.publish(GpuActivity(0.0, 0.0), 0.0)
    writer.publish(GpuActivity(0.6, 280.0), 1.0)  # 200 J beyond idle, in 1 / 0.7 seconds
    hot = read(gpus, 0)
    assert hot.throttled is True
    assert hot.sm_clock_mhz == pytest.approx(1400.0)
    assert hot.power_w == pytest.approx(80.0 + 140.0)
    writer.leave()
    cool = read(gpus, 0)
    assert (cool.throttled, cool.sm_clock_mhz) == (False, 345.0)


def test_kept_memory_stays_in_use_for_its_seconds(folder: Path, gpus: EmulatedGpus) -> None:
    writer = GpuWriter(folder, 0)
    writer.hold(1000)
    writer.keep_memory(3600.0)
    writer.leave()
    left = read(gpus, 0)
    assert left.memory_used_bytes == 1000
    assert (left.power_w, gpus.processes(left.gpu_uuid)) == (80.0, ())
    following = GpuWriter(folder, 0)
    assert following.free_bytes == MODEL.memory_total_bytes - 1000
    following.hold(500)
    following.keep_memory(1e-9)
    following.leave()
    assert read(gpus, 0).memory_used_bytes == 1000


def test_gpus_of_another_version_are_made_anew(folder: Path) -> None:
    path = folder / "gpu-1.state"
    path.write_bytes(b"GPUFILE1" + path.read_bytes()[8:-96])
    create_gpus(folder, MODEL, 3)
    found = EmulatedGpus(folder, Clock())
    assert [gpu.index for gpu in found.gpus()] == [0, 1, 2]
    found.close()
