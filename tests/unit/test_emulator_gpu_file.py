"""GPU files: whole records at any moment, whatever happens to their writer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.engines.emulator.gpu_file import GpuBirth, GpuFile, GpuModel, Offset, Seat

BIRTH = GpuBirth(3, "GPU-1", GpuModel("Ä GPU", 2**37, 600.0, 85.5, 345.0, 2000.0), 12.5)
# Writes ever new seats whose numbers agree with each other, until it is killed.
WRITER = """
import sys
from itertools import count
from pathlib import Path
from runner.engines.emulator.gpu_file import GpuFile, Seat
file = GpuFile(Path(sys.argv[1]), writable=True)
for n in count(1):
    file.set_seat(0, Seat(n, n, n, float(n), float(n), float(n)))
    if n == 1:
        print("writing", flush=True)
"""

seats = st.builds(
    Seat,
    pid=st.integers(0, 2**22),
    start_time=st.integers(0, 2**40),
    memory_bytes=st.integers(0, 2**40),
    extra_j=st.floats(0, 1e12),
    extra_w=st.floats(0, 1e4),
    utilization=st.floats(0, 1),
    clock_share=st.floats(0, 1),
    seen_s=st.floats(0, 1e9),
    linger_s=st.floats(0, 1e4),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "gpu-3.state"
    GpuFile.create(path, BIRTH)
    return path


def test_a_new_gpu_is_idle_and_knows_what_it_is(path: Path) -> None:
    file = GpuFile(path)
    assert file.birth == BIRTH
    assert file.offset() == Offset()
    assert set(file.seats()) == {Seat()}
    assert not Seat().is_live


def test_what_is_written_is_read_in_another_mapping(path: Path) -> None:
    writer, reader = GpuFile(path, writable=True), GpuFile(path)
    seat = Seat(1, 2, 3, 4.0, 5.0, 0.6)
    writer.set_seat(2, seat)
    writer.set_offset(Offset(50.0, 1.0, 7.0))
    assert [place for place, found in enumerate(reader.seats()) if found == seat] == [2]
    assert reader.offset() == Offset(50.0, 1.0, 7.0)


def test_an_offset_is_integrated_from_when_it_was_planted() -> None:
    assert Offset(50.0, 10.0, 3.0).watt_seconds_at(12.0) == 103.0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=seats, interrupted=seats, torn_bytes=st.integers(0, 100))
def test_a_writer_killed_half_way_leaves_the_record_before(
    path: Path, before: Seat, interrupted: Seat, torn_bytes: int
) -> None:
    writer = GpuFile(path, writable=True)
    writer.set_seat(1, before)
    old = path.read_bytes()
    writer.set_seat(1, interrupted)
    new = path.read_bytes()
    writer.close()
    changed = [place for place, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    cut = changed[0] + torn_bytes
    path.write_bytes(new[:cut] + old[cut:])
    assert GpuFile(path).seats()[1] in (before, interrupted)
    is_whole = path.read_bytes() == new
    assert GpuFile(path).seats()[1] == (interrupted if is_whole else before)


def test_a_reader_never_sees_half_a_record(path: Path) -> None:
    command = (sys.executable, "-c", WRITER, str(path))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        reader = GpuFile(path)
        read = [reader.seats()[0]]
        while len(read) < 3000 or read[-1] == read[0]:
            read.append(reader.seats()[0])
        writer.kill()
    numbers = [seat.pid for seat in read]
    assert numbers == sorted(numbers)
    assert numbers[-1] > numbers[0]
    assert all(seat == Seat(n, n, n, n, n, n) for n, seat in zip(numbers, read, strict=True))
