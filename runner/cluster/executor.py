"""Where launches run: the two seams that tune.py sees, and nothing of how they are filled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from runner.engines.sglang.environment import ServerEnvironment
from runner.load.self_check import LoadCheck
from runner.measure.idle import IdleGpu
from runner.measure.power import GpuIdentity
from runner.trial import LaunchSpec, RunningServers


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """What is known of a launch once it is ready; durations in seconds of the study's clock.

    `stop_s`: how long its servers took to end and to give their memory back; None while they run.
    `memory_s`: the part of it that passed after the last process had ended, until the GPUs' memory
    was back; None while they run and where no memory can be read.
    """

    phase_s: Mapping[str, float]
    server_info: tuple[Mapping[str, object], ...]
    commands: tuple[str, ...]
    gpu_uuids: tuple[str, ...]
    stop_s: float | None = None
    memory_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoadSight:
    """A glimpse of a running phase of load, for the live view; None: not known yet."""

    output_throughput: float | None
    power_w: float | None


@dataclass(frozen=True, slots=True)
class StartSight:
    """The phase that the first server's start is in."""

    phase: str


@dataclass(frozen=True, slots=True)
class NoteSight:
    """What the user should know of the launch that begins."""

    text: str


OnSight: TypeAlias = Callable[[LoadSight | StartSight | NoteSight], None]


class RunningLaunch(RunningServers, Protocol):
    """A launch that is up."""

    @property
    def report(self) -> LaunchReport:
        """What is known of it."""
        ...

    def now_s(self) -> float:
        """The launch's clock, the one its records are stamped with."""
        ...


class Executor(Protocol):
    """Runs launches. One launch at a time."""

    def launch(
        self, spec: LaunchSpec, folder: Path, on_sight: OnSight
    ) -> AbstractContextManager[RunningLaunch]:
        """Start every replica of `spec`, logs under `folder`; stops them on leaving.

        Raises:
            Infeasible, ServerFailed: the setting cannot run, or a server died while starting.
            ClusterLost: an actor, node or port was lost, or GPU memory was not given back.
            StudyError: others use the study's GPUs, or too few are left that are free.
            Interrupted: `interrupt` was called.
        """
        ...

    def server_environment(self) -> ServerEnvironment | None:
        """What the servers offer, as it was found when the executor was opened.

        None for simulated servers, which have no command line.
        """
        ...

    def check_load(self, streams: int) -> tuple[LoadCheck, ...]:
        """Try every load generator that `streams` streams need, for about two seconds.

        Raises LoadFailed when one cannot be tried.
        """
        ...

    def check_gpus(self) -> None:
        """Raise StudyError when others use the study's GPUs; while nothing of it runs on them."""
        ...

    def gpus(self) -> tuple[GpuIdentity, ...]:
        """The GPUs that the study may use now."""
        ...

    def idle_gpus(self, gpus: tuple[GpuIdentity, ...]) -> tuple[IdleGpu, ...]:
        """Read these of its GPUs for a few seconds, with no server of the study running.

        Raises ClusterLost if one cannot be read.
        """
        ...

    def interrupt(self) -> None:
        """End what runs now with Interrupted; callable from a signal handler."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...
