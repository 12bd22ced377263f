"""The emulated GPUs that one server runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from runner.clock import Clock
from runner.engines.emulator.gpu import GpuWriter, gpu_uuids, visible_gpus
from runner.engines.emulator.serving import Serving
from runner.engines.processes import ProcessId

PUBLISH_INTERVAL_S = 0.1
MIN_PUBLISH_INTERVAL_S = 0.005  # real seconds


class ServerGpus:
    """The GPUs of one server, rank by rank; none are written without a folder."""

    def __init__(self, folder: Path | None, visible_devices: str | None, machine_gpus: int) -> None:
        self._folder = folder
        names = gpu_uuids(folder) if folder else ("",) * machine_gpus
        self._visible = visible_gpus(visible_devices, names)
        self._writers: tuple[GpuWriter, ...] = ()
        self._lent_bytes = 0

    def missing(self, ordinals: Sequence[int]) -> int | None:
        """The first rank whose GPU (an index among the visible ones) is not there."""
        for rank, ordinal in enumerate(ordinals):
            if not 0 <= ordinal < len(self._visible):
                return rank
        return None

    def take(self, ordinals: Sequence[int]) -> None:
        """Appear as a process on these GPUs."""
        if self._folder:
            folder = self._folder
            self._writers = tuple(GpuWriter(folder, self._visible[n]) for n in ordinals)

    def take_for(self, process: ProcessId, ordinals: Sequence[int], memory_bytes: int) -> None:
        """Let another process appear on these GPUs, which holds so much of the memory on each."""
        if self._folder is None:
            return
        for ordinal in ordinals:
            writer = GpuWriter(self._folder, self._visible[ordinal], process)
            writer.hold(memory_bytes)
            writer.close()
        self._lent_bytes = memory_bytes

    def keep_memory(self, seconds: float) -> None:
        """Have the memory counted as used for so many real seconds after this process's end."""
        for writer in self._writers:
            writer.keep_memory(seconds)

    def throttle(self, clock_share: float) -> None:
        """Slow every GPU down to this share of its clock."""
        for writer in self._writers:
            writer.throttle(clock_share)

    def hold(self, memory_bytes: int) -> None:
        """Hold this much memory on each GPU from now on."""
        for writer in self._writers:
            writer.hold(max(0, memory_bytes - self._lent_bytes))

    @property
    def free_bytes(self) -> int | None:
        """What other processes leave on the fullest of the GPUs; None when nobody looks."""
        return min((writer.free_bytes for writer in self._writers), default=None)

    async def publish(self, servings: Sequence[Serving], clock: Clock, ready_s: float) -> None:
        """Say what the GPUs of all replicas do, again and again, until cancelled."""
        if not self._writers:
            return
        interval_s = max(clock.wall_duration_s(PUBLISH_INTERVAL_S), MIN_PUBLISH_INTERVAL_S)
        while True:
            now_s = clock.now_s()
            activities = []
            for serving in servings:
                time_s = serving.pace.to_pipeline(now_s)
                activities += [(gpu, time_s) for gpu in serving.pipeline.gpu_activity(time_s)]
            for writer, (activity, time_s) in zip(self._writers, activities, strict=True):
                writer.publish(activity, time_s - ready_s)
            await asyncio.sleep(interval_s)

    def leave(self) -> None:
        """Be gone from the GPUs."""
        for writer in self._writers:
            writer.leave()
        self._writers = ()
