"""The emulated GPUs of one machine: made once, written by the servers on them, read like NVML.

Every time is a reading of the study's clock, so watts and joules are those of the hardware that
the machine stands for.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from runner.clock import Clock
from runner.engines.emulator.gpu_file import (
    GpuBirth,
    GpuFile,
    GpuModel,
    Offset,
    Seat,
    locked,
    monotonic_s,
)
from runner.engines.processes import ProcessId, this_process
from runner.errors import StudyError
from runner.machine.hardware import Profile
from runner.measure.power import GpuIdentity, GpuProcess
from runner.pipeline import GpuActivity
from runner.trial import PowerSample

POWER_WINDOW_S = 1.0  # NVML's power reading is the mean of the last second
IDLE_CLOCK_MHZ = 345.0  # while no process holds a context


def create_machine(folder: Path, profile: Profile) -> None:
    """Make the idle GPUs of a profile's machine in `folder`; see `create_gpus`."""
    gpu = profile.gpu
    model = GpuModel(
        name=gpu.name,
        memory_total_bytes=gpu.memory_bytes,
        power_limit_w=gpu.power_limit_w,
        idle_w=gpu.idle_w,
        idle_clock_mhz=IDLE_CLOCK_MHZ,
        busy_clock_mhz=gpu.sm_clock_mhz,
    )
    create_gpus(folder, model, profile.gpus)


def create_gpus(folder: Path, model: GpuModel, count: int) -> None:
    """Make `count` idle GPUs in `folder`; what is there already, and equal, stays as it is.

    Raises StudyError when a running server uses a GPU that would have to be replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        for index in range(count):
            path = _path(folder, index)
            if path.exists() and _is_kept(path, model):
                continue
            birth = GpuBirth(index, _uuid(folder, index), model, monotonic_s())
            GpuFile.create(path, birth)
        for path in _paths(folder)[count:]:
            if GpuFile.is_one(path):
                _check_unused(path)
            path.unlink()


def plant_power_offset(folder: Path, index: int, watts: float) -> None:
    """From now on GPU `index` reads and integrates `watts` more."""
    file = GpuFile(_path(folder, index), writable=True)
    with locked(folder):
        now_s = monotonic_s()
        offset = file.offset()
        file.set_offset(Offset(offset.watts + watts, now_s, offset.watt_seconds_at(now_s)))
    file.close()


def gpu_uuids(folder: Path) -> tuple[str, ...]:
    """The UUIDs of the machine in `folder`, by index."""
    uuids: list[str] = []
    for path in _paths(folder):
        file = GpuFile(path)
        uuids.append(file.birth.uuid)
        file.close()
    return tuple(uuids)


def visible_gpus(visible_devices: str | None, uuids: Sequence[str]) -> tuple[int, ...]:
    """Which GPUs a process sees with this CUDA_VISIBLE_DEVICES, as the driver reads it.

    Entries are indices or UUIDs (or their beginnings); the first unknown one ends the list.
    """
    if visible_devices is None:
        return tuple(range(len(uuids)))
    found: list[int] = []
    for entry in visible_devices.split(","):
        index = _find(entry.strip(), uuids)
        if index is None or index in found:
            break
        found.append(index)
    return tuple(found)


class EmulatedGpus:
    """Reads the emulated GPUs of one machine; a `GpuSensor`."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._clock = clock
        files = [GpuFile(path) for path in _paths(folder)]
        if not files:
            raise StudyError(f"there are no emulated GPUs in {folder}")
        self._files = {file.birth.uuid: file for file in files}

    def gpus(self) -> tuple[GpuIdentity, ...]:
        """Every GPU, by index."""
        births = (file.birth for file in self._files.values())
        return tuple(
            GpuIdentity(
                index=birth.index,
                uuid=birth.uuid,
                name=birth.model.name,
                memory_total_bytes=birth.model.memory_total_bytes,
                power_limit_w=birth.model.power_limit_w,
            )
            for birth in births
        )

    def read(self, gpu_uuid: str) -> PowerSample:
        """One reading of one GPU; a GPU without a living process is idle."""
        file = self._files[gpu_uuid]
        birth, model = file.birth, file.birth.model
        real_s = monotonic_s()
        scale = self._clock.scale
        offset = file.offset()
        seats = file.seats()
        live = [seat for seat in seats if seat.is_live]
        clock_share = min((seat.clock_share for seat in live), default=1.0)
        energy_j = (
            model.idle_w * (real_s - birth.born_s) * scale
            + offset.watt_seconds_at(real_s) * scale
            + sum(seat.extra_j for seat in seats)
        )
        return PowerSample(
            time_s=real_s * scale,
            gpu_uuid=gpu_uuid,
            power_w=model.idle_w + offset.watts + sum(seat.extra_w for seat in live),
            energy_j=energy_j,
            utilization=min(1.0, sum(seat.utilization for seat in live)),
            memory_used_bytes=sum(seat.memory_bytes for seat in seats if seat.is_taken),
            sm_clock_mhz=model.busy_clock_mhz * clock_share if live else model.idle_clock_mhz,
            throttled=clock_share < 1.0,
        )

    def processes(self, gpu_uuid: str) -> tuple[GpuProcess, ...]:
        """The living processes on one GPU."""
        return tuple(
            GpuProcess(seat.pid, seat.memory_bytes)
            for seat in self._files[gpu_uuid].seats()
            if seat.is_live
        )

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


class GpuWriter:
    """The seat of a process on one GPU: it holds memory, and spends energy once it serves.

    `owner`: whose seat it is; default the calling process's.
    """

    def __init__(self, folder: Path, index: int, owner: ProcessId | None = None) -> None:
        self._file = GpuFile(_path(folder, index), writable=True)
        self._idle_w = self._file.birth.model.idle_w
        self._trail: deque[tuple[float, float, float]] = deque()
        own = owner or this_process()
        with locked(folder):
            seats = self._file.seats()
            self.free_bytes = self._file.birth.model.memory_total_bytes - sum(
                seat.memory_bytes for seat in seats if seat.is_taken
            )
            self._place = next((i for i, seat in enumerate(seats) if not seat.is_taken), None)
            if self._place is None:
                raise StudyError(f"emulated GPU {index} has no room for another process")
            self._before_j = seats[self._place].extra_j
            self._seat = Seat(own.pid, own.start_time, extra_j=self._before_j)
            self._write()

    def hold(self, memory_bytes: int) -> None:
        """Say how much memory this process holds from now on."""
        self._seat = replace(self._seat, memory_bytes=memory_bytes)
        self._write()

    def keep_memory(self, seconds: float) -> None:
        """Have the memory counted as used for so many real seconds after the process's end."""
        self._seat = replace(self._seat, linger_s=seconds)
        self._write()

    def throttle(self, clock_share: float) -> None:
        """Slow the GPU down to this share of its clock."""
        self._seat = replace(self._seat, clock_share=clock_share)
        self._write()

    def publish(self, activity: GpuActivity, elapsed_s: float) -> None:
        """Say what this GPU did in the `elapsed_s` seconds since the server was ready.

        These are seconds at full clock: a GPU that is slowed down takes longer for them.
        """
        extra_j = max(0.0, activity.energy_j - self._idle_w * elapsed_s)
        trail = self._trail
        trail.append((elapsed_s, extra_j, activity.busy_s))
        while len(trail) > 2 and trail[1][0] <= elapsed_s - POWER_WINDOW_S:  # noqa: PLR2004
            trail.popleft()
        then_s, then_j, then_busy_s = trail[0]
        window_s = elapsed_s - then_s
        if window_s <= 0:
            return
        self._seat = replace(
            self._seat,
            extra_j=max(self._seat.extra_j, self._before_j + extra_j),
            extra_w=max(0.0, (extra_j - then_j) / window_s) * self._seat.clock_share,
            utilization=min(1.0, max(0.0, (activity.busy_s - then_busy_s) / window_s)),
        )
        self._write()

    def leave(self) -> None:
        """Give the seat back; the joules spent stay, and memory that is slow to be freed."""
        seat = self._seat
        self._seat = Seat(extra_j=seat.extra_j)
        if seat.linger_s > 0:
            self._seat = replace(self._seat, memory_bytes=seat.memory_bytes, linger_s=seat.linger_s)
        self._write()
        self.close()

    def close(self) -> None:
        """Write no more; the seat stays."""
        self._file.close()

    def _write(self) -> None:
        if self._seat.linger_s > 0:
            self._seat = replace(self._seat, seen_s=monotonic_s())
        self._file.set_seat(self._place or 0, self._seat)


def _path(folder: Path, index: int) -> Path:
    return folder / f"gpu-{index}.state"


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("gpu-*.state"), key=lambda path: int(path.stem.split("-")[1]))


def _uuid(folder: Path, index: int) -> str:
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_URL, f'{folder.resolve()}/{index}')}"


def _find(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(uuids) else None
    matches = [index for index, name in enumerate(uuids) if entry and name.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _is_kept(path: Path, model: GpuModel) -> bool:
    if not GpuFile.is_one(path):
        return False  # another version's, which no server of this one uses
    file = GpuFile(path)
    # A birth in the future belongs to a boot before this one.
    is_kept = file.birth.model == model and file.birth.born_s <= monotonic_s()
    file.close()
    if not is_kept:
        _check_unused(path)
    return is_kept


def _check_unused(path: Path) -> None:
    file = GpuFile(path)
    pids = [seat.pid for seat in file.seats() if seat.is_live]
    file.close()
    if pids:
        raise StudyError(
            f"emulated GPU {path} is of another kind than this study needs and process "
            f"{pids[0]} uses it; wait for that study or choose another home"
        )
