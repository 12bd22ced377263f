"""One SGLang server, from its start to the end of its last process.

Drives real SGLang and the emulated server alike: both are programs with SGLang's flags, log lines
and HTTP. A server is started once; after `stop` (or `request_stop`) it can only be stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from runner.engines.lease import Lease, remove_lease, write_lease
from runner.engines.ports import HeldPorts, hold_ports
from runner.engines.processes import ProcessGroup, ProcessId
from runner.engines.sglang.batch_watch import BatchWatch
from runner.engines.sglang.control import Control
from runner.engines.sglang.flags import internal_states, resolved_params
from runner.engines.sglang.greedy import greedy_outputs
from runner.engines.sglang.jit_cache import hold_cache
from runner.engines.sglang.link import Link, PortTakenError
from runner.engines.sglang.logs import LogReader
from runner.engines.sglang.process import Command, ServerProcess, spawn
from runner.engines.sglang.replica import HOST, ReplicaSpec, command_of, lease_of, shown
from runner.engines.sglang.start_limits import limits_for
from runner.engines.sglang.start_watch import StartWatch
from runner.errors import ClusterLost, Infeasible, Interrupted, ServerFailed
from runner.launch import CAP, MAX_RUNNING, as_int, live_cap
from runner.load.vocabulary import vocabulary_size
from runner.trial import BatchSample, GreedyOutput, Params, ParamValue

MAX_QUEUED = "max_queued_requests"
PORT_TRIES = 4
IDLE_PROOFS = 2  # empty once may be between two steps of the pipeline
MIN_DRAIN_WALL_S = 3.0
METRICS_WALL_S = 2.0


@dataclass(frozen=True, slots=True)
class ServerStarted:
    """A server that is ready. `command` is what a person would type to start it again.

    `vocabulary`: how many tokens its model has, where its folder tells.
    """

    url: str
    port: int
    pid: int
    command: str
    server_info: Mapping[str, object]
    phase_s: Mapping[str, float]
    vocabulary: int | None = None


@dataclass(frozen=True, slots=True)
class _Running:
    """A server that is ready, what it resolved to at its start, who listened on its port, and
    who watches its batches.
    """

    link: Link
    control: Control
    at_start: Params
    group: ProcessGroup
    port: int
    listeners: frozenset[ProcessId]
    batches: BatchWatch
    vocabulary: int | None

    def check_same(self) -> None:
        """Raise ServerFailed when another process has taken the place of the one that started.

        The program that we start may be a wrapper, which lives on and starts the server again.
        """
        now = self.group.listeners(self.port)
        if not self.listeners or self.listeners & now:
            return
        before = ", ".join(str(process.pid) for process in self.listeners)
        by = ", ".join(str(process.pid) for process in now) or "none"
        raise self.link.dead_or(
            f"the server was restarted while it was measured: process {before} listened on its "
            f"port at the start, now {by}"
        )


class Server:
    """One server. `request_stop`, `stop` and `check_alive` may be called from any thread.

    Args:
        spec: What to start, and where its log and lease go.
        hold: Where free ports come from.
    """

    def __init__(self, spec: ReplicaSpec, hold: Callable[[int], HeldPorts] = hold_ports) -> None:
        self._spec = spec
        self._hold = hold
        self._clock = spec.program.clock
        self._log_path = str(spec.log_path)
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._undo = ExitStack()
        self._running: _Running | None = None
        self._changed: set[str] = set()
        self._watch: StartWatch | None = None

    def start(self) -> ServerStarted:
        """Start the server and wait until it has answered a real request.

        Raises:
            Infeasible: The setting cannot run here.
            ServerFailed: The server crashed, hung, or was not ready by its deadline.
            ClusterLost: Every port that was tried was taken by another program.
            Interrupted: `request_stop` or `stop` was called.
        """
        with self._lock:
            if self._running is not None:
                raise RuntimeError("a server is started once")
            for attempt in range(1, PORT_TRIES + 1):
                if self._stop.is_set():
                    raise Interrupted("the server was told to stop")
                try:
                    return self._start_once(attempt)
                except PortTakenError:
                    continue
        raise ClusterLost(
            f"replica {self._spec.index} of launch {self._spec.launch_number}: {PORT_TRIES} ports "
            f"in a row were taken by other programs before the server could bind them; see "
            f"{self._log_path}"
        )

    def set_live(self, live: Params) -> Params:
        """Drain, set the live parameters, read them back, empty the cache.

        A parameter that an earlier call has set and this one leaves out gets its first value back.
        Returns the resolved parameters. Raises Infeasible if the server keeps another value.
        """
        with self._lock:
            self.drain()
            running = self._require_running()
            before = {name: running.at_start[name] for name in sorted(self._changed)}
            live = _settable(live, running.at_start)
            wanted = {name: as_int(value) for name, value in {**before, **live}.items()}
            if wanted:
                running.link.ask(lambda: running.control.set_internal_state(wanted))
                self._changed.update(live)
            info = running.link.ask(running.control.server_info)
            for name, value in wanted.items():
                self._check_applied(info, name, value)
            if not running.link.ask(running.control.flush_cache):
                raise running.link.failed("the server is busy right after it was drained")
            return self._resolved(info)

    def greedy_outputs(self) -> tuple[GreedyOutput, ...]:
        """Have the canary's prompts continued, then drain and empty the cache.

        Raises ServerFailed when one is not answered, or the server is not idle afterwards.
        """
        with self._lock:
            running = self._require_running()
            url, queue = running.control.url, self._spec.server_args.get(MAX_QUEUED)
            outputs = running.link.ask(
                partial(
                    greedy_outputs,
                    url,
                    self._log_path,
                    self._clock,
                    running.vocabulary,
                    None if queue is None else as_int(queue),
                )
            )
            self.drain()
            return outputs

    def drain(self) -> None:
        """Abort what runs or waits; returns when the server is proven idle.

        The counters of its batches are read first: this is where a load has ended.
        """
        with self._lock:
            running = self._require_running()
            running.batches.look()
            link, control = running.link, running.control
            limit_s = max(self._spec.program.drain_deadline_s, MIN_DRAIN_WALL_S * self._clock.scale)
            deadline_s = self._clock.now_s() + limit_s
            proofs = 0
            while True:
                if proofs == 0:
                    link.ask(control.abort_all)
                is_idle = link.ask(control.waiting_requests) == 0
                proofs = proofs + 1 if is_idle and link.ask(control.flush_cache) else 0
                if proofs == IDLE_PROOFS:
                    return
                if self._clock.now_s() > deadline_s:
                    raise link.failed(f"requests still run {limit_s:.0f} s after all were aborted")
                link.pause()

    def batches(self, start_s: float, end_s: float) -> tuple[BatchSample, ...]:
        """What the server said of its batches in [start_s, end_s]; see BatchWatch.samples."""
        return self._require_running().batches.samples(start_s, end_s)

    def check_alive(self) -> None:
        """Raise ServerFailed with the reason if the server is dead, in part, or was replaced."""
        running = self._require_running()
        running.link.check_alive()
        running.check_same()

    def start_phase(self) -> str:
        """The phase of the start that runs now; from any thread."""
        return "spawn" if self._watch is None else self._watch.phases.current()

    def request_stop(self) -> None:
        """Make start, set_live and drain raise Interrupted promptly, now and from now on."""
        self._stop.set()

    def stop(self) -> None:
        """End every process of the server; safe at any point, and twice."""
        self._stop.set()
        with self._lock:
            self._undo.close()

    def _start_once(self, attempt: int) -> ServerStarted:
        """One try. What is undone if it fails is what `stop` undoes if it does not."""
        with ExitStack() as undo:
            ports = self._hold(2)
            undo.callback(ports.release)
            command = command_of(self._spec, attempt, *ports.numbers)
            cache = self._spec.program.cache_folder
            if cache is not None:
                command = replace(command, keep_fds=(undo.enter_context(hold_cache(cache)),))
            process = self._spawn(command, ports.numbers[0], undo)
            log = LogReader(self._spec.log_path, process.log_start_bytes)
            link = Link(process, log, self._clock, self._stop)
            undo.callback(link.close)
            control = Control(f"http://{HOST}:{ports.numbers[0]}", self._log_path)
            undo.callback(control.close)
            limits = limits_for(self._spec.program.limits, self._spec.server_args)
            watch = self._watch = StartWatch(process, log, self._clock, limits)
            info = self._await_ready(link, control, watch, ports.numbers)
            link.is_ready = True
            port, group = ports.numbers[0], process.group
            listeners = group.listeners(port)
            batches = self._watch_batches(control.url)
            undo.callback(batches.stop)
            vocabulary = vocabulary_size(str(info.get("model_path", "")))
            self._running = _Running(
                link, control, self._resolved(info), group, port, listeners, batches, vocabulary
            )
            self._undo = undo.pop_all()
        return ServerStarted(
            url=control.url,
            port=ports.numbers[0],
            pid=process.pid,
            command=shown(self._spec, command),
            server_info=info,
            phase_s=watch.phases.durations_s(self._clock.now_s()),
            vocabulary=vocabulary,
        )

    def _watch_batches(self, url: str) -> BatchWatch:
        """What the server says from now on; its start and its warm-up are no evidence."""
        log = LogReader(self._spec.log_path, self._spec.log_path.stat().st_size)
        control = Control(url, self._log_path, METRICS_WALL_S)
        watch = BatchWatch(self._spec.index, log, control, self._clock)
        watch.start()
        return watch

    def _spawn(self, command: Command, port: int, undo: ExitStack) -> ServerProcess:
        """Start the process, with its lease; undoing ends it and then removes the lease."""
        leases: list[Lease] = []

        def lease(group: ProcessGroup) -> None:
            leases.append(lease_of(self._spec, group, port))
            write_lease(self._spec.lease_folder, leases[0])

        process = spawn(command, before_exec=lease)
        undo.callback(self._end, process, leases[0])
        return process

    def _await_ready(
        self, link: Link, control: Control, watch: StartWatch, ports: tuple[int, ...]
    ) -> Mapping[str, object]:
        """Wait until the server says that it is up and proves it; returns /server_info."""
        while not link.ask(control.is_healthy):
            watch.look()
            reason = watch.verdict()
            if reason is not None:
                raise link.failed(reason)
            link.pause()
        info = link.ask(control.server_info)
        if (info.get("port", ports[0]), info.get("nccl_port", ports[1])) != ports:
            raise PortTakenError("another SGLang server answers here")
        link.ask(control.generate_one)
        watch.look()
        return info

    def _check_applied(self, info: Mapping[str, object], name: str, asked: int) -> None:
        kept = [state.get(name) for state in internal_states(info)] or [info.get(name)]
        wrong = [value for value in kept if value != asked]
        if not wrong:
            return
        resolved = self._resolved(info)
        highest = as_int(resolved.get("max_running_requests", 0)) // as_int(
            resolved.get("pp_size", 1)
        )
        why = "was refused" if 1 <= asked <= highest else f"is outside 1..{highest}"
        raise Infeasible(f"the server kept {name} {wrong[0]}; {asked} {why}", self._log_path)

    def _end(self, process: ServerProcess, lease: Lease) -> None:
        """End the group, then its lease."""
        if not process.end():
            raise ClusterLost(
                f"server {process.pid} on GPUs {list(self._spec.gpu_indices)} cannot be killed; "
                "its GPUs are lost until it is gone"
            )
        self._running = None
        remove_lease(self._spec.lease_folder, lease)

    def _require_running(self) -> _Running:
        if self._stop.is_set():
            raise Interrupted("the server was told to stop")
        if self._running is None:
            raise ServerFailed("the server is not running", self._log_path)
        return self._running

    def _resolved(self, info: Mapping[str, object]) -> dict[str, ParamValue]:
        return dict(resolved_params(info, self._spec.server_args))


def _settable(live: Params, at_start: Params) -> Params:
    """The live parameters by the names under which a server takes them."""
    if MAX_RUNNING not in live:
        return live
    return {CAP: live_cap(live, as_int(at_start[MAX_RUNNING]))}
