"""The Ray actors. They hold no logic: construct, delegate, return dataclasses.

`max_restarts` and `max_task_retries` are 0: a restarted server is another measurement.
Several threads per actor, so that a running call can be told to stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import ray
from ray.actor import ActorHandle

from runner.clock import Clock
from runner.cluster.handles import LocalLoad, LocalMeter
from runner.engines.program import environment_for, sensor_for
from runner.engines.sglang.environment import ServerEnvironment
from runner.engines.sglang.replica import ReplicaSpec
from runner.engines.sglang.server import Server, ServerStarted
from runner.engines.simulated import SimulatedServers
from runner.errors import ClusterLost, StudyError
from runner.load.client import Target
from runner.load.self_check import LoadCheck
from runner.measure.idle import IdleGpu
from runner.measure.power import GpuIdentity
from runner.measure.use import GpuUse
from runner.settings import EngineSettings, StudySettings
from runner.trial import (
    BatchSample,
    GreedyOutput,
    LaunchSpec,
    LoadPlan,
    LoadRun,
    Params,
    PowerSample,
)

THREADS = 4


def start_actor(kind: type[object], *args: object, **options: object) -> ActorHandle[Any]:
    """Start an actor; `options` are Ray's own, such as num_gpus."""
    remote: Any = ray.remote(kind)
    fixed = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": THREADS}
    return cast("ActorHandle[Any]", remote.options(**fixed, **options).remote(*args))


def gpus_of_cluster() -> int:
    """How many GPUs the nodes of the cluster have together."""
    resources: dict[str, float] = cast("Any", ray).cluster_resources()
    return int(resources.get("GPU", 0))


def node_with_gpus() -> str:
    """The id of the living node with the most GPUs; raises ClusterLost when none has any."""
    nodes: list[dict[str, Any]] = cast("Any", ray).nodes()
    counts = {str(n["NodeID"]): n["Resources"].get("GPU", 0) for n in nodes if n["Alive"]}
    best = max(counts, key=lambda node: counts[node], default=None)
    if best is None or not counts[best]:
        raise ClusterLost("no node of the cluster has a GPU")
    return best


class EnvironmentActor:
    """Finds out what the servers of a node offer; ends after that."""

    def read(self, engine: EngineSettings) -> ServerEnvironment:
        """See environment_for."""
        return environment_for(engine)


class ServerActor:
    """Holds the GPUs of one replica and one server on them at a time."""

    def __init__(self) -> None:
        self._server: Server | None = None

    def gpu_names(self) -> tuple[str, ...]:
        """The GPUs that Ray gave this actor, in no order.

        Each is an entry of the CUDA_VISIBLE_DEVICES that the node's Ray was started with, a
        number or a UUID; a number in the driver's order if that was not set.
        """
        return tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"])

    def prepare(self, spec: ReplicaSpec) -> None:
        """Take the next server; its GPUs are those that `gpu_names` answered."""
        self._server = Server(spec)

    def start(self) -> ServerStarted:
        """See Server.start."""
        return self._current().start()

    def start_phase(self) -> str:
        """See Server.start_phase."""
        return self._current().start_phase()

    def set_live(self, live: Params) -> Params:
        """See Server.set_live."""
        return self._current().set_live(live)

    def greedy_outputs(self) -> tuple[GreedyOutput, ...]:
        """See Server.greedy_outputs."""
        return self._current().greedy_outputs()

    def drain(self) -> None:
        """See Server.drain."""
        self._current().drain()

    def batches(self, start_s: float, end_s: float) -> tuple[BatchSample, ...]:
        """See Server.batches."""
        return self._current().batches(start_s, end_s)

    def check_alive(self) -> None:
        """See Server.check_alive."""
        self._current().check_alive()

    def stop(self) -> None:
        """See Server.stop."""
        self._current().stop()

    def request_stop(self) -> None:
        """See Server.request_stop."""
        self._current().request_stop()

    def _current(self) -> Server:
        if self._server is None:
            raise StudyError("the server actor was asked before it was given a server")
        return self._server


class LoadActor:
    """One load generator; lives as long as the study and serves every launch."""

    def __init__(self, clock: Clock) -> None:
        self._load = LocalLoad(clock)

    def run(self, plan: LoadPlan, targets: Sequence[Target], shard: int, shards: int) -> LoadRun:
        """See LocalLoad.run."""
        return self._load.run(plan, targets, shard, shards)

    def check(self, streams: int, shard: int, shards: int) -> LoadCheck:
        """See LocalLoad.check."""
        return self._load.check(streams, shard, shards)

    def output_throughput(self) -> float:
        """See LocalLoad.output_throughput."""
        return self._load.output_throughput()

    def cancel(self) -> None:
        """See LocalLoad.cancel."""
        self._load.cancel()


class MeterActor:
    """The power meter of a node; lives as long as the study."""

    def __init__(self, settings: StudySettings, machine_folder: Path) -> None:
        clock = Clock(settings.engine.time_scale)
        self._meter = LocalMeter(lambda: sensor_for(settings, machine_folder), clock)

    def gpus(self) -> tuple[GpuIdentity, ...]:
        """See LocalMeter.gpus."""
        return self._meter.gpus()

    def idle(self, gpus: tuple[GpuIdentity, ...]) -> tuple[IdleGpu, ...]:
        """See LocalMeter.idle."""
        return self._meter.idle(gpus)

    def use(self, gpus: tuple[GpuIdentity, ...]) -> tuple[GpuUse, ...]:
        """See LocalMeter.use."""
        return self._meter.use(gpus)

    def begin(self, gpu_uuids: tuple[str, ...]) -> None:
        """See LocalMeter.begin."""
        self._meter.begin(gpu_uuids)

    def expect(self, groups: tuple[int, ...]) -> None:
        """See LocalMeter.expect."""
        self._meter.expect(groups)

    def end(self) -> None:
        """See LocalMeter.end."""
        self._meter.end()

    def samples(self, start_s: float, end_s: float) -> tuple[PowerSample, ...]:
        """See LocalMeter.samples."""
        return self._meter.samples(start_s, end_s)

    def now(self, gpu_uuids: tuple[str, ...]) -> tuple[PowerSample, ...]:
        """See LocalMeter.now."""
        return self._meter.now(gpu_uuids)


class SimulatedActor:
    """Simulated servers, for studies that ask for Ray with the simulated engine."""

    def __init__(self, settings: StudySettings, launch: LaunchSpec) -> None:
        self._servers = SimulatedServers(settings, launch)

    def set_live(self, live: Params) -> Params:
        """See SimulatedServers.set_live."""
        return self._servers.set_live(live)

    def run_load(self, plan: LoadPlan) -> LoadRun:
        """See SimulatedServers.run_load."""
        return self._servers.run_load(plan)

    def read_power(self, start_s: float, end_s: float) -> tuple[PowerSample, ...]:
        """See SimulatedServers.read_power."""
        return self._servers.read_power(start_s, end_s)

    def read_batches(self, start_s: float, end_s: float) -> tuple[BatchSample, ...]:
        """See SimulatedServers.read_batches."""
        return self._servers.read_batches(start_s, end_s)

    def describe(self) -> tuple[dict[str, float], dict[str, object], float]:
        """Phase times, server info and the virtual time."""
        return dict(self._servers.phase_s), dict(self._servers.server_info()), self._servers.now_s()
