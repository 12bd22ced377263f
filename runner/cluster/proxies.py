"""Actor handles with the methods of the plain objects, and Ray's errors turned into ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from runner.cluster.executor import LaunchReport
from runner.engines.sglang.replica import ReplicaSpec
from runner.engines.sglang.server import ServerStarted
from runner.errors import ClusterLost, RunnerError
from runner.load.client import Target
from runner.load.self_check import LoadCheck
from runner.measure.idle import IdleGpu
from runner.measure.power import GpuIdentity
from runner.measure.use import GpuUse
from runner.trial import BatchSample, GreedyOutput, LoadPlan, LoadRun, Params, PowerSample


def result_of(reference: Any) -> Any:  # noqa: ANN401 - Ray's references are untyped
    """The value of a Ray reference.

    Raises:
        RunnerError: the one the actor raised, as it was.
        ClusterLost: the actor, its node or its result was lost.
    """
    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, RunnerError):
            raise error.cause from error
        raise
    except RayError as error:
        raise ClusterLost(f"{type(error).__name__}: {first_line(str(error))}") from error


def last_line(text: str) -> str:
    """The last line of a text that says something: of a traceback, its error."""
    return first_line("\n".join(reversed(text.splitlines())))


def first_line(text: str) -> str:
    """The first line of a text that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


class ReplicaProxy:
    """A ServerActor as a ReplicaHandle."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self._actor: Any = actor  # Ray types the methods of Any actors as never returning

    def gpu_names(self) -> tuple[str, ...]:
        return cast("tuple[str, ...]", result_of(self._actor.gpu_names.remote()))

    def prepare(self, spec: ReplicaSpec) -> None:
        result_of(self._actor.prepare.remote(spec))

    def start(self) -> ServerStarted:
        return cast("ServerStarted", result_of(self._actor.start.remote()))

    def start_phase(self) -> str:
        return cast("str", result_of(self._actor.start_phase.remote()))

    def set_live(self, live: Params) -> Params:
        return cast("Params", result_of(self._actor.set_live.remote(dict(live))))

    def greedy_outputs(self) -> tuple[GreedyOutput, ...]:
        return cast("tuple[GreedyOutput, ...]", result_of(self._actor.greedy_outputs.remote()))

    def drain(self) -> None:
        result_of(self._actor.drain.remote())

    def batches(self, start_s: float, end_s: float) -> tuple[BatchSample, ...]:
        return cast(
            "tuple[BatchSample, ...]", result_of(self._actor.batches.remote(start_s, end_s))
        )

    def check_alive(self) -> None:
        result_of(self._actor.check_alive.remote())

    def stop(self) -> None:
        result_of(self._actor.stop.remote())

    def request_stop(self) -> None:
        result_of(self._actor.request_stop.remote())


class LoadProxy:
    """A LoadActor as a LoadHandle."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self._actor: Any = actor  # Ray types the methods of Any actors as never returning

    def run(self, plan: LoadPlan, targets: Sequence[Target], shard: int, shards: int) -> LoadRun:
        return cast("LoadRun", result_of(self._actor.run.remote(plan, targets, shard, shards)))

    def check(self, streams: int, shard: int, shards: int) -> LoadCheck:
        return cast("LoadCheck", result_of(self._actor.check.remote(streams, shard, shards)))

    def output_throughput(self) -> float:
        return cast("float", result_of(self._actor.output_throughput.remote()))

    def cancel(self) -> None:
        result_of(self._actor.cancel.remote())


class MeterProxy:
    """A MeterActor as a MeterHandle."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self._actor: Any = actor  # Ray types the methods of Any actors as never returning

    def gpus(self) -> tuple[GpuIdentity, ...]:
        return cast("tuple[GpuIdentity, ...]", result_of(self._actor.gpus.remote()))

    def idle(self, gpus: tuple[GpuIdentity, ...]) -> tuple[IdleGpu, ...]:
        return cast("tuple[IdleGpu, ...]", result_of(self._actor.idle.remote(gpus)))

    def use(self, gpus: tuple[GpuIdentity, ...]) -> tuple[GpuUse, ...]:
        return cast("tuple[GpuUse, ...]", result_of(self._actor.use.remote(gpus)))

    def begin(self, gpu_uuids: tuple[str, ...]) -> None:
        result_of(self._actor.begin.remote(gpu_uuids))

    def expect(self, groups: tuple[int, ...]) -> None:
        result_of(self._actor.expect.remote(groups))

    def end(self) -> None:
        result_of(self._actor.end.remote())

    def samples(self, start_s: float, end_s: float) -> tuple[PowerSample, ...]:
        return cast(
            "tuple[PowerSample, ...]", result_of(self._actor.samples.remote(start_s, end_s))
        )

    def now(self, gpu_uuids: tuple[str, ...]) -> tuple[PowerSample, ...]:
        return cast("tuple[PowerSample, ...]", result_of(self._actor.now.remote(gpu_uuids)))


class SimulatedProxy:
    """A SimulatedActor as a RunningLaunch."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self._actor: Any = actor  # Ray types the methods of Any actors as never returning

    @property
    def report(self) -> LaunchReport:
        phase_s, info, _ = self._describe()
        return LaunchReport(phase_s, (info,), (), ())

    def now_s(self) -> float:
        return self._describe()[2]

    def set_live(self, live: Params) -> Params:
        return cast("Params", result_of(self._actor.set_live.remote(dict(live))))

    def greedy_outputs(self) -> tuple[tuple[GreedyOutput, ...], ...]:
        return ()

    def run_load(self, plan: LoadPlan) -> LoadRun:
        return cast("LoadRun", result_of(self._actor.run_load.remote(plan)))

    def read_power(self, start_s: float, end_s: float) -> tuple[PowerSample, ...]:
        return cast(
            "tuple[PowerSample, ...]", result_of(self._actor.read_power.remote(start_s, end_s))
        )

    def read_batches(self, start_s: float, end_s: float) -> tuple[BatchSample, ...]:
        return cast(
            "tuple[BatchSample, ...]", result_of(self._actor.read_batches.remote(start_s, end_s))
        )

    def check_alive(self) -> None:
        result_of(self._actor.describe.remote())

    def _describe(self) -> tuple[dict[str, float], dict[str, object], float]:
        described = result_of(self._actor.describe.remote())
        return cast("tuple[dict[str, float], dict[str, object], float]", described)
