"""Running HTTP servers of one launch: replicas, load and power put together.

The same code with plain objects (inline) and with actor proxies (Ray): every handle's methods
block, so they are called from a small thread pool and watched for an interruption.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

from runner.clock import Clock
from runner.cluster.executor import LaunchReport, LoadSight, OnSight, StartSight
from runner.cluster.handles import LoadHandle, MeterHandle, ReplicaHandle
from runner.cluster.pool import MEMORY_DEADLINE_S
from runner.engines.sglang.server import ServerStarted
from runner.errors import ClusterLost, Interrupted, LoadFailed
from runner.load.client import Target
from runner.load.generator import merge_runs
from runner.load.self_check import LoadCheck
from runner.trial import BatchSample, GreedyOutput, LoadPlan, LoadRun, Params, PowerSample

T = TypeVar("T")
TICK_S = 0.5
STREAMS_PER_LOAD = 512
"""Streams one load generator serves before another one is worth its core."""
DEATH_LOOKS = 20
DEATH_LOOK_WALL_S = 0.1
MEMORY_SLACK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class LaunchParts:
    """The handles a launch is made of."""

    replicas: tuple[ReplicaHandle, ...]
    loads: tuple[LoadHandle, ...]
    meter: MeterHandle
    gpu_uuids: tuple[str, ...]
    clock: Clock


def check_loads(loads: Sequence[LoadHandle], streams: int) -> tuple[LoadCheck, ...]:
    """Try as many generators as so many streams are worth, all at once: they share the machine.

    Raises LoadFailed when one cannot be tried.
    """
    shards = shards_for(streams, len(loads))
    with ThreadPoolExecutor(max_workers=shards) as pool:
        tried = [pool.submit(loads[shard].check, streams, shard, shards) for shard in range(shards)]
    return tuple(each.result() for each in tried)


def shards_for(streams: int, loads: int) -> int:
    """How many of the generators share so many streams."""
    return min(loads, 1 + (streams - 1) // STREAMS_PER_LOAD)


class HttpServers:
    """A launch over HTTP; implements cluster.executor.RunningLaunch."""

    def __init__(self, parts: LaunchParts, stop: threading.Event, on_sight: OnSight) -> None:
        self._parts = parts
        self._stop = stop
        self._on_sight = on_sight
        self._pool = ThreadPoolExecutor(
            max_workers=len(parts.replicas) + len(parts.loads), thread_name_prefix="launch"
        )
        self._started: tuple[ServerStarted, ...] = ()
        self._memory_bytes: dict[str, int] = {}
        self._memory_s: float | None = None
        self.dirty: dict[str, str] = {}
        """GPUs, by UUID, whose memory was not given back when the launch ended, and why."""

    def start(self) -> None:
        """Start every replica; on any failure the others are told to give up, then it is raised."""
        self._memory_bytes = self._memory_used()
        self._parts.meter.begin(self._parts.gpu_uuids)
        self._started = tuple(
            self._on_all(lambda replica: replica.start(), on_tick=self._sight_start)
        )
        self._parts.meter.expect(tuple(started.pid for started in self._started))

    def stop(self) -> None:
        """End every replica and wait until their GPU memory is back."""
        stopping = [self._pool.submit(replica.stop) for replica in self._parts.replicas]
        wait(stopping)
        self._pool.shutdown(wait=True)
        self._parts.meter.end()
        try:
            for each in stopping:
                each.result()
        except ClusterLost as error:
            self.dirty = dict.fromkeys(self._held(), str(error))
            raise
        self._await_memory()

    @property
    def report(self) -> LaunchReport:
        """Phase times of the slowest replica, and what each server says of itself."""
        slowest = max(self._started, key=lambda started: started.phase_s.get("total", 0.0))
        return LaunchReport(
            phase_s=slowest.phase_s,
            server_info=tuple(started.server_info for started in self._started),
            commands=tuple(started.command for started in self._started),
            gpu_uuids=self._parts.gpu_uuids,
            memory_s=self._memory_s,
        )

    def now_s(self) -> float:
        """The clock of records and samples."""
        return self._parts.clock.now_s()

    def set_live(self, live: Params) -> Params:
        """Set the live parameters on every replica; all must resolve to the same values."""
        resolved = self._on_all(lambda replica: replica.set_live(live))
        return resolved[0]

    def greedy_outputs(self) -> tuple[tuple[GreedyOutput, ...], ...]:
        """What every replica says to the canary's prompts."""
        return tuple(self._on_all(lambda replica: replica.greedy_outputs()))

    def run_load(self, plan: LoadPlan) -> LoadRun:
        """Drive the plan with as many generators as its concurrency is worth."""
        shards = shards_for(plan.concurrency, len(self._parts.loads))
        targets = tuple(
            Target(index, started.url, vocabulary=started.vocabulary)
            for index, started in enumerate(self._started)
        )
        loads = self._parts.loads[:shards]
        futures = [
            self._pool.submit(load.run, plan, targets, shard, shards)
            for shard, load in enumerate(loads)
        ]
        try:
            self._watch(futures, on_tick=lambda: self._sight(loads), cancel=self._cancel_loads)
        except LoadFailed:
            self._explain_failure()
            raise
        run = merge_runs([future.result() for future in futures])
        self._on_all(lambda replica: replica.drain())
        return run

    def read_power(self, start_s: float, end_s: float) -> tuple[PowerSample, ...]:
        """The samples of every GPU of the launch around the window."""
        return self._parts.meter.samples(start_s, end_s)

    def read_batches(self, start_s: float, end_s: float) -> tuple[BatchSample, ...]:
        """What every server said of its batches around the window."""
        told = self._on_all(lambda replica: replica.batches(start_s, end_s))
        return tuple(sample for samples in told for sample in samples)

    def _explain_failure(self) -> None:
        """Requests that fail may mean a dead server, which shows a moment later: that is raised."""
        for _ in range(DEATH_LOOKS):
            self.check_alive()
            time.sleep(DEATH_LOOK_WALL_S)

    def check_alive(self) -> None:
        """Raise if any replica is gone."""
        for replica in self._parts.replicas:
            replica.check_alive()

    def _on_all(
        self, call: Callable[[ReplicaHandle], T], on_tick: Callable[[], None] = lambda: None
    ) -> list[T]:
        futures = [self._pool.submit(call, replica) for replica in self._parts.replicas]
        self._watch(futures, on_tick=on_tick, cancel=self._cancel_replicas)
        return [future.result() for future in futures]

    def _watch(
        self,
        futures: Sequence[Future[T]],
        on_tick: Callable[[], None],
        cancel: Callable[[], None],
    ) -> None:
        """Wait for all; one failure or an interruption cancels the rest; raises the first cause."""
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=TICK_S, return_when=FIRST_EXCEPTION)
            failed = next((each for each in done if each.exception() is not None), None)
            if failed is not None or self._stop.is_set():
                cancel()
                wait(pending)
                if failed is not None:
                    failed.result()
                raise Interrupted("the study was asked to stop")
            on_tick()

    def _sight_start(self) -> None:
        self._on_sight(StartSight(self._parts.replicas[0].start_phase()))

    def _sight(self, loads: Sequence[LoadHandle]) -> None:
        readings = [sample.power_w for sample in self._parts.meter.now(self._parts.gpu_uuids)]
        known = [watts for watts in readings if watts is not None]
        power_w = sum(known) if len(known) == len(readings) else None
        rate = sum(load.output_throughput() for load in loads)
        self._on_sight(LoadSight(rate or None, power_w))

    def _cancel_loads(self) -> None:
        for load in self._parts.loads:
            load.cancel()

    def _cancel_replicas(self) -> None:
        for replica in self._parts.replicas:
            replica.request_stop()

    def _memory_used(self) -> dict[str, int]:
        samples = self._parts.meter.now(self._parts.gpu_uuids)
        return {
            sample.gpu_uuid: sample.memory_used_bytes
            for sample in samples
            if sample.memory_used_bytes is not None
        }

    def _await_memory(self) -> None:
        """A killed server's memory may take seconds to come back; the next start needs it."""
        ended_s = self.now_s()
        while True:
            held = self._held()
            waited_s = self.now_s() - ended_s
            if not held:
                self._memory_s = waited_s if self._memory_bytes else None
                return
            if waited_s > MEMORY_DEADLINE_S:
                why = f"was not given back within {MEMORY_DEADLINE_S:.0f} s after the servers ended"
                self.dirty = dict.fromkeys(held, f"the memory of a server {why}")
                raise ClusterLost(
                    f"GPU memory of {', '.join(held)} {why}; nvidia-smi names its owner"
                )
            self._parts.clock.sleep(0.2)

    def _held(self) -> list[str]:
        """GPUs with much more memory in use than before the launch."""
        return [
            uuid
            for uuid, used in self._memory_used().items()
            if used > self._memory_bytes.get(uuid, used) + MEMORY_SLACK_BYTES
        ]
