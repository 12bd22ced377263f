"""The Ray executor: a placement group and one server actor per replica, shared load actors."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import AuthenticationError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from runner.clock import Clock
from runner.cluster.actors import (
    EnvironmentActor,
    LoadActor,
    MeterActor,
    ServerActor,
    SimulatedActor,
    gpus_of_cluster,
    node_with_gpus,
    start_actor,
)
from runner.cluster.executor import NoteSight, OnSight, RunningLaunch
from runner.cluster.inline import require_gpus
from runner.cluster.placement import study_gpus
from runner.cluster.pool import GpuPool
from runner.cluster.proxies import (
    LoadProxy,
    MeterProxy,
    ReplicaProxy,
    SimulatedProxy,
    last_line,
    result_of,
)
from runner.cluster.replica import LaunchPlace, replica_spec
from runner.cluster.servers import STREAMS_PER_LOAD, HttpServers, LaunchParts, check_loads
from runner.engines.lease import end_own
from runner.engines.program import environment_for, program_for, sensor_for, with_cache
from runner.engines.sglang.environment import ServerEnvironment
from runner.engines.simulated import simulated_gpus, simulated_idle
from runner.errors import ClusterLost, Interrupted, StudyError
from runner.load.self_check import LoadCheck
from runner.measure.idle import IdleGpu
from runner.measure.power import GpuIdentity, GpuKind
from runner.measure.visible import VARIABLE, named_gpu, visible_devices
from runner.settings import EngineSettings, StudySettings
from runner.trial import EngineKind, LaunchSpec

PLACEMENT_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Server actors holding the GPUs of one launch shape; reused while the shape stays."""

    shape: tuple[int, int]
    placement: PlacementGroup
    replicas: tuple[ReplicaProxy, ...]


class RayExecutor:
    """Runs launches on a Ray cluster: one that it starts, or the one at `address`."""

    def __init__(
        self,
        settings: StudySettings,
        machine_folder: Path,
        leases_folder: Path,
        address: str | None = None,
    ) -> None:
        self._settings = settings
        self._leases_folder = leases_folder
        self._stop = threading.Event()
        self._clock = Clock(settings.engine.time_scale)
        self._group: ReplicaGroup | None = None
        if address is None:
            show_gpus(settings, machine_folder)
        connect(settings, address)
        if settings.engine.kind is EngineKind.SIMULATED:
            return
        self._meter = MeterProxy(start_actor(MeterActor, settings, machine_folder))
        highest = max((*settings.workload.concurrency, 1))
        self._loads = tuple(
            LoadProxy(start_actor(LoadActor, self._clock))
            for _ in range(1 + (highest - 1) // STREAMS_PER_LOAD)
        )
        usable = self._gpus = self._meter.gpus()
        if address is None:
            usable = study_gpus(settings, self._gpus, os.environ)
            self._gpus = usable[: settings.hardware.gpus]
        self._is_own = address is None
        require_gpus(settings, len(self._gpus))
        is_here = address is None or settings.engine.kind is EngineKind.EMULATED
        find = environment_for if is_here else environment_of_cluster
        program = program_for(settings, machine_folder, find(settings.engine))
        self._program = with_cache(program, settings, self._gpus)
        self._pool = GpuPool(
            usable, settings.hardware.gpus, self._meter.use, self._clock, self._stop
        )

    @contextmanager
    def launch(self, spec: LaunchSpec, folder: Path, on_sight: OnSight) -> Iterator[RunningLaunch]:
        """See Executor.launch."""
        if self._stop.is_set():
            raise Interrupted("the study was asked to stop")
        if self._settings.engine.kind is EngineKind.SIMULATED:
            actor = start_actor(SimulatedActor, self._settings, spec)
            yield SimulatedProxy(actor)
            ray.kill(actor, no_restart=True)
            return
        try:
            servers = HttpServers(self._parts(spec, folder, on_sight), self._stop, on_sight)
            try:
                servers.start()
                yield servers
            finally:
                try:
                    servers.stop()
                finally:
                    self._pool.quarantine(servers.dirty)
        except ClusterLost:
            self._drop_group()
            end_own(self._leases_folder)  # what a lost actor could not end itself
            raise

    def server_environment(self) -> ServerEnvironment | None:
        """See Executor.server_environment."""
        if self._settings.engine.kind is EngineKind.SIMULATED:
            return None
        return self._program.environment

    def check_load(self, streams: int) -> tuple[LoadCheck, ...]:
        """See Executor.check_load."""
        return check_loads(self._loads, streams)

    def check_gpus(self) -> None:
        """See Executor.check_gpus; which GPUs a cluster that runs will give is not known yet."""
        if self._settings.engine.kind is not EngineKind.SIMULATED and self._is_own:
            self._pool.require(self._gpus, lambda _: None)

    def gpus(self) -> tuple[GpuIdentity, ...]:
        """See Executor.gpus; on a cluster that runs, all of the node that its servers run on."""
        if self._settings.engine.kind is EngineKind.SIMULATED:
            return simulated_gpus(self._settings)
        return tuple(gpu for gpu in self._gpus if gpu.kind is not GpuKind.PARTITIONED)

    def idle_gpus(self, gpus: tuple[GpuIdentity, ...]) -> tuple[IdleGpu, ...]:
        """See Executor.idle_gpus."""
        if self._settings.engine.kind is EngineKind.SIMULATED:
            return simulated_idle(self._settings, gpus)
        return self._meter.idle(gpus)

    def interrupt(self) -> None:
        """See Executor.interrupt."""
        self._stop.set()

    def close(self) -> None:
        """End the actors, and Ray with them if this process started it."""
        self._drop_group()
        ray.shutdown()

    def _parts(self, spec: LaunchSpec, folder: Path, on_sight: OnSight) -> LaunchParts:
        """The launch's actors on the GPUs that Ray gave them; they must be free.

        Ray chooses the GPUs, so none takes the place of one in quarantine.
        """
        replicas = self._replicas(spec)
        place = LaunchPlace(self._program, folder, self._leases_folder)
        used: list[GpuIdentity] = []
        for index, replica in enumerate(replicas):
            named = (named_gpu(name, self._gpus) for name in replica.gpu_names())
            gpus = tuple(sorted(named, key=lambda gpu: (gpu.index, gpu.uuid)))
            replica.prepare(replica_spec(spec, index, gpus, place))
            used.extend(gpus)
        self._pool.require(used, lambda text: on_sight(NoteSight(text)))
        uuids = tuple(gpu.uuid for gpu in used)
        return LaunchParts(replicas, self._loads, self._meter, uuids, self._clock)

    def _replicas(self, spec: LaunchSpec) -> tuple[ReplicaProxy, ...]:
        shape = (spec.replicas, spec.gpus_per_replica)
        if self._group is not None and self._group.shape == shape:
            return self._group.replicas
        self._drop_group()
        placement = placement_group([{"GPU": shape[1]}] * shape[0], strategy="STRICT_PACK")
        if not placement.wait(timeout_seconds=PLACEMENT_DEADLINE_S):
            remove_placement_group(placement)
            raise ClusterLost(
                f"Ray could not place {shape[0]} servers of {shape[1]} GPUs within "
                f"{PLACEMENT_DEADLINE_S:.0f} s; the cluster has {gpus_of_cluster()} GPUs in all, "
                "others may hold them"
            )
        replicas = tuple(
            ReplicaProxy(
                start_actor(
                    ServerActor,
                    num_gpus=shape[1],
                    scheduling_strategy=PlacementGroupSchedulingStrategy(placement, bundle),
                )
            )
            for bundle in range(shape[0])
        )
        self._group = ReplicaGroup(shape, placement, replicas)
        return replicas

    def _drop_group(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group.placement)
            self._group = None


def environment_of_cluster(engine: EngineSettings) -> ServerEnvironment:
    """What the servers offer on the node that they will run on: the one with most GPUs.

    Asked for there, since the driver's machine may have no SGLang. Takes no GPU from anybody.
    """
    node = NodeAffinitySchedulingStrategy(node_with_gpus(), soft=False)
    actor = start_actor(EnvironmentActor, scheduling_strategy=node)
    try:
        return cast("ServerEnvironment", result_of(cast("Any", actor).read.remote(engine)))
    finally:
        ray.kill(actor, no_restart=True)


def show_gpus(settings: StudySettings, machine_folder: Path) -> None:
    """Let the Ray that is started here see the study's GPUs, and name them as we do.

    Raises ConfigError when the environment names what is not there, StudyError when the GPUs
    are too few.
    """
    if settings.engine.has_own_devices:
        os.environ.pop(VARIABLE, None)  # it is about real GPUs
        return
    with closing(sensor_for(settings, machine_folder)) as sensor:
        gpus = study_gpus(settings, sensor.gpus(), os.environ)
    require_gpus(settings, len(gpus))
    os.environ[VARIABLE] = visible_devices(gpus[: settings.hardware.gpus])


def connect(settings: StudySettings, address: str | None) -> None:
    """Start Ray here, or join the cluster at `address`; one clear message when neither works."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        options["address"] = "local"  # else Ray joins any cluster that it finds on this machine
        options["include_dashboard"] = False
        if settings.engine.has_own_devices:
            options["num_gpus"] = settings.hardware.gpus
    else:
        options["address"] = address
    try:
        ray.init(**options)
    except Exception as error:  # on a slow machine Ray raises no other type
        where = "start here" if address is None else f"join the cluster at {address}"
        raise StudyError(f"Ray could not {where}: {reason_of(error)}") from error
    if settings.engine.kind is not EngineKind.SIMULATED:
        require_gpus(settings, gpus_of_cluster())


def reason_of(error: BaseException) -> str:
    """What went wrong, from the first error of a chain; Ray wraps the one that says it."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = str(cause)
    if AuthenticationError.__name__ in text:  # Ray keeps it as the text of a traceback only
        return "it asks for its token; set RAY_AUTH_TOKEN, or put the token in ~/.ray/auth_token"
    return f"{last_line(text)}. --executor inline needs no Ray"
