"""The launch that is up now: kept while consecutive trials share it, replaced when they do not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from runner.clock import Clock
from runner.cluster.executor import (
    Executor,
    LoadSight,
    NoteSight,
    RunningLaunch,
    StartSight,
)
from runner.errors import Interrupted
from runner.insight.live import LaunchPhase, Note, RungProgress, View
from runner.launch import LaunchPlan
from runner.record.store import StudyStore
from runner.trial import LaunchSpec


@dataclass(slots=True)
class Held:
    """One running launch and what leaving it will undo."""

    spec: LaunchSpec
    servers: RunningLaunch
    stack: ExitStack


class HeldLaunch:
    """Starts launches through the executor, one at a time, and writes down each."""

    def __init__(
        self,
        open_executor: Callable[[], Executor],
        store: StudyStore,
        view: View,
        clock: Clock,
    ) -> None:
        self._open_executor = open_executor
        self._executor: Executor | None = None
        self._store = store
        self._view = view
        self._clock = clock
        self._held: Held | None = None
        self._is_interrupted = False
        self._ready_s = 0.0

    def servers_for(self, plan: LaunchPlan, *, fresh: bool) -> RunningLaunch:
        """The running launch if it has the same key (and `fresh` is not asked), else a new one.

        Raises what Executor.launch raises; nothing is held then.
        """
        if self._held is not None and self._held.spec.key == plan.key and not fresh:
            return self._held.servers
        self.release()
        spec = LaunchSpec(
            number=self._store.next_launch_number(),
            key=plan.key,
            server_args=plan.server_args,
            replicas=plan.replicas,
            gpus_per_replica=plan.gpus_per_replica,
        )
        self._held = self._start(spec)
        return self._held.servers

    @property
    def spec(self) -> LaunchSpec | None:
        """The launch that is up."""
        return None if self._held is None else self._held.spec

    @property
    def ready_s(self) -> float:
        """When the launch that started last was ready, by the study's clock."""
        return self._ready_s

    def release(self) -> None:
        """Stop the launch that is up; nothing happens when there is none."""
        if self._held is not None:
            held, self._held = self._held, None
            self._view.handle(LaunchPhase(held.spec.number, "stop"))
            has_processes = bool(held.servers.report.commands)
            begun_s = self._clock.now_s()
            held.stack.close()
            if has_processes:
                stop_s = self._clock.now_s() - begun_s
                stopped = replace(held.servers.report, stop_s=stop_s)
                self._store.write_launch(held.spec, stopped)

    def interrupt(self) -> None:
        """End what runs now (from a signal handler)."""
        self._is_interrupted = True
        if self._executor is not None:
            self._executor.interrupt()

    def close(self) -> None:
        """Stop the launch and give the executor back, even when stopping fails."""
        try:
            self.release()
        finally:
            if self._executor is not None:
                self._executor.close()

    def _start(self, spec: LaunchSpec) -> Held:
        folder = self._store.launch_folder(spec.number)
        folder.mkdir(parents=True, exist_ok=True)
        self._store.write_launch(spec, None)
        if self._executor is None:
            self._view.handle(LaunchPhase(spec.number, "prepare"))
            self._executor = self._open_executor()
        if self._is_interrupted:
            raise Interrupted("the study was asked to stop")
        self._view.handle(LaunchPhase(spec.number, "start"))
        stack = ExitStack()
        on_sight = partial(self._on_sight, spec.number)
        servers = stack.enter_context(self._executor.launch(spec, folder, on_sight))
        self._store.write_launch(spec, servers.report)
        self._ready_s = self._clock.now_s()
        return Held(spec, servers, stack)

    def _on_sight(self, launch: int, sight: LoadSight | StartSight | NoteSight) -> None:
        match sight:
            case LoadSight(output_throughput, power_w):
                self._view.handle(RungProgress(output_throughput, power_w))
            case StartSight(phase):
                self._view.handle(LaunchPhase(launch, phase))
            case NoteSight(text):
                self._view.handle(Note(text))
