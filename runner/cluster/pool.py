"""The GPUs a study may use: which of them the next launch gets, and which are in quarantine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from runner.clock import Clock
from runner.errors import Interrupted, StudyError
from runner.measure.power import GpuIdentity
from runner.measure.use import GpuUse
from runner.measure.visible import VARIABLE, visible_devices

Look: TypeAlias = Callable[[tuple[GpuIdentity, ...]], tuple[GpuUse, ...]]
Tell: TypeAlias = Callable[[str], None]
_Chosen: TypeAlias = tuple[GpuIdentity, ...]
_Choice: TypeAlias = tuple[_Chosen, tuple[GpuUse, ...]]

MEMORY_DEADLINE_S = 60.0
"""What a driver gets to give back the memory of processes that are gone."""
LOOK_S = 0.2


class GpuPool:
    """The usable GPUs of one node, in order; the first `wanted` that are fit are the study's.

    A GPU that did not give back the memory of our server is in quarantine until it has: others
    take its place while there are any. Memory of anybody else's process is refused.

    Args:
        usable: Every GPU that may be used.
        wanted: How many the study asks for.
        look: Reads who uses some of them now.
        clock: The study's.
        stop: Ends waiting with Interrupted.
    """

    def __init__(
        self,
        usable: Sequence[GpuIdentity],
        wanted: int,
        look: Look,
        clock: Clock,
        stop: threading.Event,
    ) -> None:
        self._usable = tuple(usable)
        self._wanted = wanted
        self._look = look
        self._clock = clock
        self._stop = stop
        self._quarantine: dict[str, str] = {}

    @property
    def gpus(self) -> tuple[GpuIdentity, ...]:
        """The study's GPUs as far as they are not in quarantine."""
        fit = (gpu for gpu in self._usable if gpu.uuid not in self._quarantine)
        return tuple(fit)[: self._wanted]

    def take(self, tell: Tell) -> tuple[GpuIdentity, ...]:
        """The GPUs for the next launch, all of them free; `tell` hears of quarantine.

        Memory whose process is gone is waited for. Raises StudyError when somebody else's process
        uses a GPU of the study, or when too few are free.
        """
        taken = self._settle(self._choose, tell)
        for uuid, reason in self._quarantine.items():
            index = next(gpu.index for gpu in self._usable if gpu.uuid == uuid)
            tell(f"GPU {index} is in quarantine: {reason}")
        return taken

    def require(self, gpus: Sequence[GpuIdentity], tell: Tell) -> None:
        """As `take`, for GPUs that somebody else chose: no other takes the place of one."""
        uuids = {gpu.uuid for gpu in gpus}

        def choose(uses: Sequence[GpuUse]) -> _Choice:
            return tuple(gpus), tuple(
                use for use in uses if use.gpu.uuid in uuids and not use.is_free
            )

        self._settle(choose, tell)

    def quarantine(self, reasons: Mapping[str, str]) -> None:
        """Use these GPUs, by UUID, no more until their memory is back; says why."""
        self._quarantine.update(reasons)

    def _settle(self, choose: Callable[[Sequence[GpuUse]], _Choice], tell: Tell) -> _Chosen:
        deadline_s = self._clock.now_s() + MEMORY_DEADLINE_S
        while True:
            uses = self._look(self._usable)
            self._release(uses, tell)
            taken, busy = choose(uses)
            if not busy:
                return taken
            strangers = tuple(use for use in busy if use.holders)
            if strangers or self._clock.now_s() > deadline_s:
                raise StudyError(self._refusal(strangers or busy, uses))
            if self._stop.wait(self._clock.wall_duration_s(LOOK_S)):
                raise Interrupted("the study was asked to stop")

    def _release(self, uses: Sequence[GpuUse], tell: Tell) -> None:
        for use in uses:
            if use.is_free and self._quarantine.pop(use.gpu.uuid, None) is not None:
                tell(f"GPU {use.gpu.index} is out of quarantine: its memory is back")

    def _choose(self, uses: Sequence[GpuUse]) -> _Choice:
        """The GPUs to take, and those in the way.

        The study's own come first; one in quarantine is replaced by a free one behind them, and
        is in the way only if there is none.
        """
        own, spare = uses[: self._wanted], uses[self._wanted :]
        held = [use for use in own if use.gpu.uuid in self._quarantine]
        busy = [use for use in own if not use.is_free and use not in held]
        free = [use.gpu for use in spare if use.is_free][: len(held)]
        if len(free) < len(held):
            busy += held
        taken = [use.gpu for use in own if use.is_free] + free
        return tuple(sorted(taken, key=self._usable.index)), tuple(busy)

    def _refusal(self, in_way: Sequence[GpuUse], uses: Sequence[GpuUse]) -> str:
        lines = [f"{use}{self._why(use)}" for use in in_way]
        free = [use.gpu for use in uses if use.is_free]
        advice = "end what uses them (or wait for it), then run the same command again"
        if len(free) >= self._wanted:
            names = visible_devices(free[: self._wanted])
            advice += f"; or use GPUs that are free: {VARIABLE}={names}"
        return (
            f"the study needs {self._wanted} free GPUs, and of its own are in use:\n  "
            + "\n  ".join(lines)
            + f"\n{advice}"
        )

    def _why(self, use: GpuUse) -> str:
        reason = self._quarantine.get(use.gpu.uuid)
        return "" if reason is None else f"; in quarantine: {reason}"
