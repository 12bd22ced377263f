"""The state of one emulated GPU: a small file that servers write and sensors read.

The file holds an identity that never changes, a planted power offset, and one seat per process
that uses the GPU. Power and energy add up: the idle power since the GPU exists, the offset since
it was planted, and what each process drew beyond idle. So a process that dies leaves nothing
behind but the joules it spent, and the energy counter never falls.

Offset and seats are kept in two copies, each with a sequence number and a checksum. A writer
overwrites the older copy only, so even a writer killed in the middle leaves a whole one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from runner.engines.processes import ProcessId, is_running

MAGIC = b"GPUFILE2"
SEATS = 4
_IDENTITY = struct.Struct("<8sI64s64sQdddddd")
_OFFSET = struct.Struct("<ddd")
_SEAT = struct.Struct("<qqqdddddd")
_SEQUENCE = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")

Values: TypeAlias = tuple[int | float, ...]


@dataclass(frozen=True, slots=True)
class GpuModel:
    """What all GPUs of an emulated machine have in common."""

    name: str
    memory_total_bytes: int
    power_limit_w: float
    idle_w: float
    idle_clock_mhz: float
    busy_clock_mhz: float


@dataclass(frozen=True, slots=True)
class GpuBirth:
    """Which GPU a file stands for, and the monotonic second since when it draws idle power."""

    index: int
    uuid: str
    model: GpuModel
    born_s: float


@dataclass(frozen=True, slots=True)
class Offset:
    """Power planted on top: watts since a monotonic second, and what earlier offsets added up to.

    Files know no time scale, so both are in real seconds; the reader scales them.
    """

    watts: float = 0.0
    since_s: float = 0.0
    watt_seconds: float = 0.0

    def watt_seconds_at(self, monotonic_s: float) -> float:
        """Everything planted so far, in watts times real seconds."""
        return self.watt_seconds + self.watts * (monotonic_s - self.since_s)


@dataclass(frozen=True, slots=True)
class Seat:
    """One process on one GPU: who, and what it says of itself.

    `extra_j` is everything this seat's processes ever drew beyond idle power. `clock_share` is
    below 1 while the GPU is slowed down. A driver that is slow to free memory is one whose
    `linger_s`, real seconds after the process was last `seen_s` alive, is above 0.
    """

    pid: int = 0
    start_time: int = 0
    memory_bytes: int = 0
    extra_j: float = 0.0
    extra_w: float = 0.0
    utilization: float = 0.0
    clock_share: float = 1.0
    seen_s: float = 0.0
    linger_s: float = 0.0

    @property
    def is_live(self) -> bool:
        """Whether the process that took the seat still runs."""
        return self.pid > 0 and is_running(ProcessId(self.pid, self.start_time))

    @property
    def is_taken(self) -> bool:
        """Whether its memory is in use: the process runs, or it ended only just."""
        return self.is_live or monotonic_s() < self.seen_s + self.linger_s


class _Cell:
    """One record in two copies; see the module's text."""

    def __init__(self, start: int, layout: struct.Struct) -> None:
        self._layout = layout
        self._copy = _SEQUENCE.size + layout.size
        self._stride = self._copy + _CHECKSUM.size
        self._start = start
        self.end = start + 2 * self._stride

    def encode(self, sequence: int, values: Values) -> bytes:
        body = _SEQUENCE.pack(sequence) + self._layout.pack(*values)
        return body + _CHECKSUM.pack(zlib.crc32(body))

    def fresh(self, values: Values) -> bytes:
        """Both copies of a new record."""
        return self.encode(1, values) + self.encode(2, values)

    def read(self, memory: mmap.mmap) -> Values:
        return self._newest(memory)[1]

    def write(self, memory: mmap.mmap, values: Values) -> None:
        """Replace the record. One writer at a time; readers need no lock."""
        sequence = self._newest(memory)[0] + 1
        place = self._start if sequence % 2 else self._start + self._stride
        memory[place : place + self._stride] = self.encode(sequence, values)

    def _newest(self, memory: mmap.mmap) -> tuple[int, Values]:
        raw = memory[self._start : self.end]
        while True:
            copies = [
                copy
                for place in (0, self._stride)
                if (copy := self._decode(raw[place : place + self._stride]))
            ]
            if len(copies) == 2:  # noqa: PLR2004 - both copies
                return max(copies, key=lambda copy: copy[0])
            # One copy is torn. Still torn and nothing moved: its writer died, the other holds.
            again = memory[self._start : self.end]
            if again == raw and copies:
                return copies[0]
            raw = again

    def _decode(self, raw: bytes) -> tuple[int, Values] | None:
        body = raw[: self._copy]
        if zlib.crc32(body) != _CHECKSUM.unpack_from(raw, self._copy)[0]:
            return None
        (sequence,) = _SEQUENCE.unpack_from(body)
        return sequence, self._layout.unpack_from(body, _SEQUENCE.size)


_OFFSET_CELL = _Cell(_IDENTITY.size, _OFFSET)


def _seat_cells() -> tuple[_Cell, ...]:
    cells = [_Cell(_OFFSET_CELL.end, _SEAT)]
    while len(cells) < SEATS:
        cells.append(_Cell(cells[-1].end, _SEAT))
    return tuple(cells)


_SEAT_CELLS = _seat_cells()
_SIZE = _SEAT_CELLS[-1].end


class GpuFile:
    """An open GPU file. Cheap to read from any process; a seat is written by its process only."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.path = path
        flags = os.O_RDWR if writable else os.O_RDONLY
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        descriptor = os.open(path, flags | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(descriptor, _SIZE, access=access)
        finally:
            os.close(descriptor)
        self.birth = _unpack_birth(self._memory[: _IDENTITY.size])
        self._seen = b""
        self._seats: tuple[Seat, ...] = ()

    @staticmethod
    def is_one(path: Path) -> bool:
        """Whether the file there is a GPU as this version writes it."""
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC and file.seek(0, os.SEEK_END) == _SIZE

    @staticmethod
    def create(path: Path, birth: GpuBirth) -> None:
        """Write a new, idle GPU; it appears whole or not at all."""
        cells = _OFFSET_CELL.fresh(_offset_values(Offset()))
        cells += b"".join(cell.fresh(_seat_values(Seat())) for cell in _SEAT_CELLS)
        draft = path.with_suffix(f".{os.getpid()}.draft")
        draft.write_bytes(_pack_birth(birth) + cells)
        draft.replace(path)

    def offset(self) -> Offset:
        return Offset(*_OFFSET_CELL.read(self._memory))

    def set_offset(self, offset: Offset) -> None:
        _OFFSET_CELL.write(self._memory, _offset_values(offset))

    def seats(self) -> tuple[Seat, ...]:
        raw = self._memory[_OFFSET_CELL.end :]
        if raw != self._seen:  # most readings find nothing new
            self._seen = raw
            self._seats = tuple(_seat(cell.read(self._memory)) for cell in _SEAT_CELLS)
        return self._seats

    def set_seat(self, place: int, seat: Seat) -> None:
        _SEAT_CELLS[place].write(self._memory, _seat_values(seat))

    def close(self) -> None:
        self._memory.close()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Alone in this folder: for making GPUs, taking seats and planting offsets."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def monotonic_s() -> float:
    """Real seconds of the clock that every process of this machine shares."""
    return time.monotonic()


def _offset_values(offset: Offset) -> Values:
    return (offset.watts, offset.since_s, offset.watt_seconds)


def _seat(values: Values) -> Seat:
    pid, ticks, memory, *others = values
    return Seat(int(pid), int(ticks), int(memory), *others)


def _seat_values(seat: Seat) -> Values:
    return (
        seat.pid,
        seat.start_time,
        seat.memory_bytes,
        seat.extra_j,
        seat.extra_w,
        seat.utilization,
        seat.clock_share,
        seat.seen_s,
        seat.linger_s,
    )


def _pack_birth(birth: GpuBirth) -> bytes:
    model = birth.model
    return _IDENTITY.pack(
        MAGIC, birth.index, birth.uuid.encode(), model.name.encode(), model.memory_total_bytes,
        model.power_limit_w, model.idle_w, model.idle_clock_mhz, model.busy_clock_mhz,
        birth.born_s, 0.0,
    )  # fmt: skip


def _unpack_birth(raw: bytes) -> GpuBirth:
    _, index, uuid, name, memory, limit_w, idle_w, idle_mhz, busy_mhz, born_s, _ = _IDENTITY.unpack(
        raw
    )
    model = GpuModel(name.rstrip(b"\0").decode(), memory, limit_w, idle_w, idle_mhz, busy_mhz)
    return GpuBirth(index, uuid.rstrip(b"\0").decode(), model, born_s)
