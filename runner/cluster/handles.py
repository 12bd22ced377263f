"""The parts of a launch on a node, as plain objects: load and power (servers: engines/sglang).

The inline executor uses them directly; Ray actors (actors.py) hold one each and delegate.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from runner.clock import Clock
from runner.engines.sglang.server import ServerStarted
from runner.load.client import Target
from runner.load.generator import LoadGenerator, LoadProgress
from runner.load.self_check import LoadCheck, check_generator
from runner.measure.idle import IdleGpu, read_idle
from runner.measure.power import GpuIdentity, GpuSensor, PowerMeter
from runner.measure.use import GpuUse, read_use
from runner.trial import BatchSample, GreedyOutput, LoadPlan, LoadRun, Params, PowerSample

SensorFactory: TypeAlias = Callable[[], GpuSensor]


class ReplicaHandle(Protocol):
    """One server, here or in an actor; the methods of engines.sglang.server.Server."""

    def start(self) -> ServerStarted: ...
    def start_phase(self) -> str: ...
    def set_live(self, live: Params) -> Params: ...
    def greedy_outputs(self) -> tuple[GreedyOutput, ...]: ...
    def drain(self) -> None: ...
    def batches(self, start_s: float, end_s: float) -> tuple[BatchSample, ...]: ...
    def check_alive(self) -> None: ...
    def stop(self) -> None: ...
    def request_stop(self) -> None: ...


class LoadHandle(Protocol):
    """One load generator, here or in an actor."""

    def run(
        self, plan: LoadPlan, targets: Sequence[Target], shard: int, shards: int
    ) -> LoadRun: ...
    def check(self, streams: int, shard: int, shards: int) -> LoadCheck: ...
    def output_throughput(self) -> float: ...
    def cancel(self) -> None: ...


class MeterHandle(Protocol):
    """The GPUs of a node, here or in an actor."""

    def gpus(self) -> tuple[GpuIdentity, ...]: ...
    def idle(self, gpus: tuple[GpuIdentity, ...]) -> tuple[IdleGpu, ...]: ...
    def use(self, gpus: tuple[GpuIdentity, ...]) -> tuple[GpuUse, ...]: ...
    def begin(self, gpu_uuids: tuple[str, ...]) -> None: ...
    def expect(self, groups: tuple[int, ...]) -> None: ...
    def end(self) -> None: ...
    def samples(self, start_s: float, end_s: float) -> tuple[PowerSample, ...]: ...
    def now(self, gpu_uuids: tuple[str, ...]) -> tuple[PowerSample, ...]: ...


class LocalLoad:
    """A load generator that remembers its latest rate for the live view."""

    def __init__(self, clock: Clock) -> None:
        self._generator = LoadGenerator(clock)
        self._rate = 0.0

    def run(self, plan: LoadPlan, targets: Sequence[Target], shard: int, shards: int) -> LoadRun:
        """Drive this shard's part of the plan to its end."""
        self._rate = 0.0
        return self._generator.run(plan, targets, shard, shards, on_progress=self._note)

    def check(self, streams: int, shard: int, shards: int) -> LoadCheck:
        """See check_generator."""
        return check_generator(streams, shard, shards)

    def output_throughput(self) -> float:
        """The latest output tokens/s seen."""
        return self._rate

    def cancel(self) -> None:
        """Make `run` raise Interrupted promptly."""
        self._generator.cancel()

    def _note(self, progress: LoadProgress) -> None:
        self._rate = progress.output_throughput


class LocalMeter:
    """The power meter of one node. The sensor is opened where it is used, never pickled."""

    def __init__(self, open_sensor: SensorFactory, clock: Clock) -> None:
        self._sensor = open_sensor()
        self._clock = clock
        self._meter: PowerMeter | None = None
        self._lock = threading.Lock()

    def gpus(self) -> tuple[GpuIdentity, ...]:
        """The GPUs of this node."""
        return self._sensor.gpus()

    def idle(self, gpus: tuple[GpuIdentity, ...]) -> tuple[IdleGpu, ...]:
        """What these GPUs draw now, read for a few seconds."""
        return read_idle(self._sensor, gpus, self._clock)

    def use(self, gpus: tuple[GpuIdentity, ...]) -> tuple[GpuUse, ...]:
        """Who uses these GPUs now."""
        return read_use(self._sensor, gpus)

    def begin(self, gpu_uuids: tuple[str, ...]) -> None:
        """Start sampling these GPUs."""
        self.end()
        with self._lock:
            self._meter = PowerMeter(self._sensor, gpu_uuids, self._clock)
            self._meter.start()

    def expect(self, groups: tuple[int, ...]) -> None:
        """From now on, note who else uses the GPUs than these process groups."""
        with self._lock:
            if self._meter is not None:
                self._meter.expect(groups)

    def end(self) -> None:
        """Stop sampling; safe when nothing is sampled."""
        with self._lock:
            if self._meter is not None:
                self._meter.stop()
                self._meter = None

    def samples(self, start_s: float, end_s: float) -> tuple[PowerSample, ...]:
        """The samples around [start_s, end_s], one beyond each border."""
        with self._lock:
            return () if self._meter is None else self._meter.samples(start_s, end_s)

    def now(self, gpu_uuids: tuple[str, ...]) -> tuple[PowerSample, ...]:
        """One reading of each of these GPUs."""
        return tuple(self._sensor.read(uuid) for uuid in gpu_uuids)
