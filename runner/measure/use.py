"""Who uses the GPUs of a study while nothing of ours runs on them: memory and its processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.measure.power import GpuIdentity, GpuSensor

BYTES_PER_GIB = 1 << 30
FREE_BYTES = BYTES_PER_GIB
FREE_SHARE = 0.01
"""What a display, monitoring and the driver itself (615 MiB of an idle H200) may hold on a GPU."""
COMMAND_CHARS = 80

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class GpuHolder:
    """A process with memory on a GPU, as seen from here; None: the driver does not say how much."""

    pid: int
    command: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class GpuUse:
    """One GPU: memory in use (None: not told) and the processes of it that can be seen.

    Inside a container the driver names processes by numbers of another place, or none: those are
    no `holders`, and the memory alone counts.
    """

    gpu: GpuIdentity
    memory_bytes: int | None
    holders: tuple[GpuHolder, ...]

    @property
    def is_free(self) -> bool:
        """Whether a server may start here: there is little memory in use, whoever's it is."""
        most_bytes = max(FREE_BYTES, FREE_SHARE * self.gpu.memory_total_bytes)
        return self.memory_bytes is None or self.memory_bytes <= most_bytes

    def __str__(self) -> str:
        held = f"{(self.memory_bytes or 0) / BYTES_PER_GIB:.1f} GiB in use"
        by = ", ".join(map(_named, self.holders)) or "by no process that can be seen from here"
        return f"GPU {self.gpu.index} ({self.gpu.uuid}): {held}, {by}"


def read_use(sensor: GpuSensor, gpus: Sequence[GpuIdentity]) -> tuple[GpuUse, ...]:
    """Who uses these GPUs now; raises ClusterLost if one cannot be read."""
    return tuple(
        GpuUse(
            gpu=gpu,
            memory_bytes=sensor.read(gpu.uuid).memory_used_bytes,
            holders=tuple(
                GpuHolder(process.pid, command, process.memory_used_bytes)
                for process in sensor.processes(gpu.uuid)
                if (command := _command(process.pid)) is not None
            ),
        )
        for gpu in gpus
    )


def _command(pid: int) -> str | None:
    """What a process was started with, its name if it hides that; None: there is none."""
    folder = _PROC / str(pid)
    try:
        words = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        name = (folder / "comm").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return " ".join((words or name).split())[:COMMAND_CHARS]


def _named(holder: GpuHolder) -> str:
    held = holder.memory_bytes
    much = "" if held is None else f" with {held / BYTES_PER_GIB:.1f} GiB"
    return f"by process {holder.pid} ({holder.command}){much}"
