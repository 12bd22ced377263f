"""The inline executor: the same launches with plain objects in this process, no Ray."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.clock import Clock
from runner.cluster.executor import LaunchReport, NoteSight, OnSight, RunningLaunch
from runner.cluster.handles import LocalLoad, LocalMeter
from runner.cluster.placement import assign_gpus, study_gpus
from runner.cluster.pool import GpuPool
from runner.cluster.replica import LaunchPlace, replica_spec
from runner.cluster.servers import HttpServers, LaunchParts, check_loads
from runner.engines.program import environment_for, program_for, sensor_for, with_cache
from runner.engines.sglang.environment import ServerEnvironment
from runner.engines.sglang.server import Server
from runner.engines.simulated import SimulatedServers, simulated_gpus, simulated_idle
from runner.errors import Interrupted, StudyError
from runner.load.self_check import LoadCheck
from runner.measure.idle import IdleGpu
from runner.measure.power import GpuIdentity
from runner.measure.visible import VARIABLE
from runner.settings import StudySettings
from runner.trial import EngineKind, LaunchSpec


class InlineExecutor:
    """Runs launches in this process. Servers are processes all the same."""

    def __init__(self, settings: StudySettings, machine_folder: Path, leases_folder: Path) -> None:
        self._settings = settings
        self._leases_folder = leases_folder
        self._stop = threading.Event()
        self._clock = Clock(settings.engine.time_scale)
        if settings.engine.kind is EngineKind.SIMULATED:
            return
        self._load = LocalLoad(self._clock)
        self._meter = LocalMeter(lambda: sensor_for(settings, machine_folder), self._clock)
        usable = study_gpus(settings, self._meter.gpus(), os.environ)
        require_gpus(settings, len(usable))
        program = program_for(settings, machine_folder, environment_for(settings.engine))
        self._program = with_cache(program, settings, usable)
        self._pool = GpuPool(
            usable, settings.hardware.gpus, self._meter.use, self._clock, self._stop
        )

    @contextmanager
    def launch(self, spec: LaunchSpec, folder: Path, on_sight: OnSight) -> Iterator[RunningLaunch]:
        """See Executor.launch."""
        if self._stop.is_set():
            raise Interrupted("the study was asked to stop")
        if self._settings.engine.kind is EngineKind.SIMULATED:
            yield SimulatedLaunch(self._settings, spec, self._stop)
            return
        gpus = self._pool.take(lambda text: on_sight(NoteSight(text)))
        servers = HttpServers(self._parts(spec, folder, gpus), self._stop, on_sight)
        try:
            servers.start()
            yield servers
        finally:
            try:
                servers.stop()
            finally:
                self._pool.quarantine(servers.dirty)

    def server_environment(self) -> ServerEnvironment | None:
        """See Executor.server_environment."""
        if self._settings.engine.kind is EngineKind.SIMULATED:
            return None
        return self._program.environment

    def check_load(self, streams: int) -> tuple[LoadCheck, ...]:
        """See Executor.check_load."""
        return check_loads((self._load,), streams)

    def check_gpus(self) -> None:
        """See Executor.check_gpus."""
        if self._settings.engine.kind is not EngineKind.SIMULATED:
            self._pool.require(self._pool.gpus, lambda _: None)

    def gpus(self) -> tuple[GpuIdentity, ...]:
        """See Executor.gpus."""
        if self._settings.engine.kind is EngineKind.SIMULATED:
            return simulated_gpus(self._settings)
        return self._pool.gpus

    def idle_gpus(self, gpus: tuple[GpuIdentity, ...]) -> tuple[IdleGpu, ...]:
        """See Executor.idle_gpus."""
        if self._settings.engine.kind is EngineKind.SIMULATED:
            return simulated_idle(self._settings, gpus)
        return self._meter.idle(gpus)

    def interrupt(self) -> None:
        """See Executor.interrupt."""
        self._stop.set()

    def close(self) -> None:
        """Nothing outlives a launch here."""

    def _parts(self, spec: LaunchSpec, folder: Path, gpus: tuple[GpuIdentity, ...]) -> LaunchParts:
        placed = assign_gpus(spec, gpus)
        place = LaunchPlace(self._program, folder, self._leases_folder)
        replicas = tuple(
            Server(replica_spec(spec, index, own, place)) for index, own in enumerate(placed)
        )
        used = tuple(gpu.uuid for own in placed for gpu in own)
        return LaunchParts(replicas, (self._load,), self._meter, used, self._clock)


class SimulatedLaunch(SimulatedServers):
    """Simulated servers with the report of a launch; an interruption ends it between phases."""

    def __init__(self, settings: StudySettings, spec: LaunchSpec, stop: threading.Event) -> None:
        super().__init__(settings, spec)
        self._interrupted = stop

    @property
    def report(self) -> LaunchReport:
        """What is known of it."""
        return LaunchReport(self.phase_s, (self.server_info(),), (), ())

    def check_alive(self) -> None:
        """Raise Interrupted when the study was asked to stop."""
        if self._interrupted.is_set():
            raise Interrupted("the study was asked to stop")


def require_gpus(settings: StudySettings, found: int) -> None:
    """One clear message when the machine has fewer GPUs than the study asks for."""
    wanted = settings.hardware.gpus
    if found < wanted:
        raise StudyError(
            f"the study asks for {wanted} GPUs, {found} found here"
            f"{_limited_words(settings)}; lower hardware.gpus, or use "
            "--set engine.kind=emulated to try the study without GPUs"
        )


def _limited_words(settings: StudySettings) -> str:
    """Says so when it is the environment that leaves fewer GPUs than there are."""
    value = settings.engine.env.get(VARIABLE, os.environ.get(VARIABLE))
    if settings.engine.has_own_devices or value is None:
        return ""
    return f" with {VARIABLE}={value}"
