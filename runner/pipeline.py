"""The pipeline model: how SGLang's event loop fills its pipeline, and what that costs in time.

One `Pipeline` is one server. Pure, no I/O; time goes on only as `step` is called, so it runs in
virtual time (simulated engine, predict) and in real time (emulated server) alike.

With stages it is SGLang's event_loop_pp: in iteration k every rank visits slot k mod L, where
L = pp_size + depth. A rank first hears of iteration k from the rank before it, launches its
stage when that rank's output is there, and then waits for the result of the next slot, which
the last rank ships `depth` iterations after its launch and which travels around the ring. A
slot is not launched again before its own result is processed. Without stages it is the normal
loop, whose CPU work overlaps the GPU's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from runner.machine.batch import Batch, BatchReport, PipelineRequest, Token
from runner.machine.graphs import Launching
from runner.machine.hardware import Profile
from runner.machine.noise import NOISE_DRAWS, NOISE_STRIDE, noise_factors
from runner.machine.scheduler import Limits, Scheduler
from runner.machine.shape import (
    ResolvedShape,
    ServerShape,
    refusal,
    resolve,
    shape_of,
    slots,
)
from runner.machine.stage import StageModel

__all__ = [
    "BatchReport",
    "GpuActivity",
    "Pipeline",
    "PipelineRequest",
    "Profile",
    "ResolvedShape",
    "ServerShape",
    "Step",
    "Token",
    "refusal",
    "resolve",
    "shape_of",
    "slots",
]


class Step(NamedTuple):
    """One iteration of the event loop."""

    tokens: tuple[Token, ...]
    batches: tuple[BatchReport, ...]


EMPTY_STEP = Step((), ())


@dataclass(frozen=True, slots=True)
class GpuActivity:
    """Cumulative since the server was ready: seconds busy, joules spent (idle power included).

    `slow_s`: seconds times the share of the full clock that the power limit took.
    """

    busy_s: float
    energy_j: float
    slow_s: float = 0.0


class Pipeline:
    """One server's event loop on one machine, deterministic in `seed`."""

    def __init__(
        self, profile: Profile, shape: ServerShape, seed: int, start_s: float = 0.0
    ) -> None:
        self.resolved = resolve(profile, shape)
        self._profile = profile
        self._start_s = start_s
        self._ranks = shape.pp_size
        self._tp_size = shape.tp_size
        self._depth = shape.pp_async_batch_depth if shape.pp_size > 1 else 0
        self._scheduler = self._make_scheduler(shape)
        self._stages = StageModel(profile, shape)
        self._noise = noise_factors(profile.noise, seed)
        self._launches = 0
        self._iteration = 0
        self._pending: deque[tuple[float, PipelineRequest]] = deque()
        self._cpu_s = [start_s] * self._ranks  # end of each rank's last iteration
        self._heard_s = [start_s] * self._ranks  # when it knew of that iteration's requests
        self._sent_s = [start_s] * self._ranks  # when it passed results on in it
        self._gpu_s = [start_s] * self._ranks  # when its GPU is free
        self._accepted_s = start_s  # when HTTP had taken in the newest request
        self._arrived_s = start_s  # when the newest request in the scheduler came
        self._free_s = start_s  # overlapped: when the CPU could turn to the next launch
        lag = slots(shape) + self._ranks
        self._recent: list[Batch | None] = [None] * lag  # newest iteration first
        self._busy_s = [0.0] * self._ranks
        self._extra_j = [0.0] * self._ranks  # beyond idle
        self._slow_s = [0.0] * self._ranks
        self._polling_w = profile.gpu.communication_w - profile.gpu.server_idle_w
        # The newest stretches of each GPU: start, end, share of it that is work, extra watts,
        # share of the clock that is lost.
        self._spans: list[deque[tuple[float, float, float, float, float]]] = [
            deque(maxlen=8 * lag + 16) for _ in range(self._ranks)
        ]

    def _make_scheduler(self, shape: ServerShape) -> Scheduler:
        resolved = self.resolved
        limits = Limits(
            slots=slots(shape),
            max_running_requests=resolved.max_running_requests,
            chunk_tokens=resolved.chunk_tokens,
            kv_tokens=resolved.max_total_tokens,
            counts_ended=self._profile.counts_ended,
        )
        return Scheduler(limits, resolved.pp_max_micro_batch_size)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits or was submitted."""
        return self._scheduler.is_empty and not self._pending

    @property
    def running(self) -> int:
        """Requests that hold a row."""
        return self._scheduler.rows

    @property
    def queued(self) -> int:
        """Requests that wait for admission."""
        return len(self._scheduler.waiting) + len(self._pending)

    @property
    def retractions(self) -> int:
        """How often a request lost its KV cache and went back to the queue."""
        return self._scheduler.retractions

    @property
    def cap(self) -> int:
        """The cap on a slot's requests as it stands."""
        return self._scheduler.cap

    def set_cap(self, cap: int) -> None:
        """Cap further admissions at `cap` requests per slot; slots keep their members."""
        self._scheduler.cap = cap

    def submit(self, request: PipelineRequest, now_s: float) -> None:
        """A request reaches the server at `now_s`, and rank 0 as soon as HTTP lets it.

        Iterations that start from then on see it.
        """
        host = self._profile.host
        if host.accept_s > 0.0:
            self._accepted_s = now_s = max(self._accepted_s, now_s) + host.accept_s
        now_s += host.http_s
        place = len(self._pending)
        while place and self._pending[place - 1][0] > now_s:
            place -= 1
        self._pending.insert(place, (now_s, request))

    def abort(self, request_id: str) -> bool:
        """Drop a request; False when it is not here. A running one leaves with its next result."""
        for entry in self._pending:
            if entry[1].request_id == request_id:
                self._pending.remove(entry)
                return True
        return self._scheduler.abort(request_id)

    def abort_all(self) -> None:
        """Drop every request; step until idle to let the running ones leave."""
        self._pending.clear()
        self._scheduler.abort_all()

    def next_step_s(self) -> float | None:
        """When the next iteration starts; None when there is nothing to do."""
        if not self._scheduler.is_empty:
            return self._cpu_s[0]
        if self._pending:
            return max(self._cpu_s[0], self._pending[0][0])
        return None

    def step(self) -> Step:
        """Run the iteration that starts at `next_step_s`; nothing when there is none."""
        start_s = self.next_step_s()
        if start_s is None:
            return EMPTY_STEP
        pending, scheduler = self._pending, self._scheduler
        seen_s = self._seen_until_s(start_s)
        while pending and pending[0][0] <= seen_s:
            self._arrived_s, request = pending.popleft()
            scheduler.submit(request)
        self._cpu_s[0] = start_s
        slot = scheduler.slots[self._iteration % len(scheduler.slots)]
        self._iteration += 1
        batch = scheduler.visit(slot)
        if batch is not None:
            self._price(batch)
        done = self._run_alone(batch) if self._ranks == 1 else self._run_stages(batch)
        if done is None:
            return EMPTY_STEP
        tokens: list[Token] = []
        report = scheduler.finish(done, self._cpu_s[0], tokens)
        return Step(tuple(tokens), (report,))

    def _seen_until_s(self, start_s: float) -> float:
        """Requests that came by then are in the iteration that starts at `start_s`.

        Overlapped, a batch is formed as soon as the one before it runs: what comes later waits for
        the one after it, a whole step more.
        """
        is_ahead = self._ranks == 1 and self._profile.host.is_overlapped
        return self._free_s if is_ahead and not self._scheduler.is_empty else start_s

    def gpu_activity(self, until_s: float) -> tuple[GpuActivity, ...]:
        """Activity of each GPU up to `until_s`, which must be recent; index pp_rank * tp + tp_rank.

        Work that starts before `until_s` but is launched by a later step is counted by then.
        """
        idle_j = self._profile.gpu.server_idle_w * (until_s - self._start_s)
        activities: list[GpuActivity] = []
        for rank in range(self._ranks):
            busy_s, extra_j = self._busy_s[rank], self._extra_j[rank]
            slow_s = self._slow_s[rank]
            for start_s, end_s, busy, watts, slow in reversed(self._spans[rank]):
                if end_s <= until_s:
                    break
                beyond_s = end_s - max(start_s, until_s)
                busy_s -= beyond_s * busy
                extra_j -= beyond_s * watts
                slow_s -= beyond_s * slow
            activities += [GpuActivity(busy_s, idle_j + extra_j, slow_s)] * self._tp_size
        return tuple(activities)

    def _price(self, batch: Batch) -> None:
        """Look up what a new batch will cost."""
        stages, host = self._stages, self._profile.host
        is_prefill = batch.is_prefill
        requests = batch.new_seqs
        batch.launching = stages.launching(batch.tokens, is_prefill=is_prefill)
        cost = stages.cost(batch.tokens, requests, batch.launching)
        batch.gpu_s, batch.launch_s, batch.lead = cost.gpu_s, cost.launch_s, cost.lead
        batch.watts = cost.busy_w - self._profile.gpu.server_idle_w
        batch.slow = 1.0 - cost.clock
        batch.result_s = host.result_s + requests * host.result_request_s
        batch.noise = self._launches
        self._launches += 1

    def _run_alone(self, batch: Batch | None) -> Batch | None:
        """The loop without stages: a step takes as long as the slower of its GPU and its CPU."""
        if batch is None:
            self._cpu_s[0] += self._profile.host.empty_slot_s
            return None
        host = self._profile.host
        start_s = self._cpu_s[0]
        noise = self._noise[batch.noise % NOISE_DRAWS]
        gpu_s = (batch.gpu_s[0] + batch.kv_tokens * self._stages.kv_s[0]) * noise
        if host.is_overlapped:
            self._overlap(batch, gpu_s, noise)
            return batch
        cpu_s = (host.schedule_s + batch.launch_s[0]) * noise + batch.result_s
        self._record(0, start_s, start_s + gpu_s, batch)
        if host.is_blocking:
            self._cpu_s[0] = start_s + gpu_s + cpu_s
        else:
            self._cpu_s[0] = start_s + max(gpu_s, cpu_s)
        return batch

    def _overlap(self, batch: Batch, gpu_s: float, noise: float) -> None:
        """SGLang's event_loop_overlap: launch a batch, then handle the result of the one before.

        So a batch is launched while the GPU runs the one before it, and its own result waits for
        the launch of the next one (of one decode more, where nothing is left to decode).
        """
        host, stages = self._profile.host, self._stages
        seen_s = max(self._free_s, self._arrived_s) + host.schedule_s * noise
        launched_s = seen_s + batch.launch_s[0] * noise
        # A graph starts when it is launched; other kernels start while later ones are launched.
        is_whole = batch.launching is Launching.GRAPH
        begin_s = max(launched_s if is_whole else seen_s, self._gpu_s[0])
        next_launch_s = batch.launch_s[0]
        if batch.is_prefill:
            running = batch.running + batch.new_seqs
            launching = stages.launching(running, is_prefill=False)
            next_launch_s = stages.cost(running, running, launching).launch_s[0]
        self._free_s = max(launched_s, self._gpu_s[0]) + batch.result_s
        self._gpu_s[0] = batch.end_s = max(begin_s + gpu_s, launched_s)
        # Time has passed to the last result already, so work that began before it counts from then.
        shown = self._spans[0]
        begin_s = max(begin_s, self._cpu_s[0], shown[-1][1] if shown else begin_s)
        self._record(0, begin_s, begin_s + gpu_s, batch)
        launched_next_s = self._free_s + (host.schedule_s + next_launch_s) * noise
        self._cpu_s[0] = max(self._cpu_s[0], launched_next_s, batch.end_s) + batch.result_s

    def _run_stages(self, batch: Batch | None) -> Batch | None:
        """Iteration k of rank 0, k - 1 of rank 1 and so on; returns what rank 0 has the result of.

        These iterations need nothing later of each other, and all that they need earlier has
        run: rank r hears of its iteration from rank r - 1, which ran that one a step ago.
        """
        recent, heard_s, cpu_s, sent_s = self._recent, self._heard_s, self._cpu_s, self._sent_s
        message_s, empty_s = self._profile.host.message_s, self._profile.host.empty_slot_s
        recent.insert(0, batch)
        recent.pop()
        # Downwards, so that a rank still finds what the one before it did a step ago. This loop
        # runs for every rank of every iteration: plain comparisons are faster than max().
        for rank in range(self._ranks - 1, -1, -1):
            now_s = cpu_s[rank]
            if rank and heard_s[rank - 1] + message_s > now_s:
                now_s = heard_s[rank - 1] + message_s
            heard_s[rank] = now_s
            visited = recent[rank]
            if visited is None:
                sent_s[rank] = cpu_s[rank] = now_s + empty_s
            else:
                self._launch(rank, visited, now_s)
        return self._take_results()

    def _launch(self, rank: int, batch: Batch, heard_s: float) -> None:
        """What a visit to a slot with a batch does, up to the launch."""
        host, gpu_s, cpu_s = self._profile.host, self._gpu_s, self._cpu_s
        now_s = heard_s + host.schedule_s
        gpu_free_s = ready_s = gpu_s[rank]
        if rank:
            # The rank before it sends its output at the end of this same iteration.
            sent_s = cpu_s[rank - 1] + host.message_s
            if sent_s > now_s:
                now_s = sent_s
            now_s += host.exchange_s
            arrived_s = gpu_s[rank - 1] + self._profile.link.hop_s
            if arrived_s > ready_s:
                ready_s = arrived_s
        noise = self._noise[(batch.noise + rank * NOISE_STRIDE) % NOISE_DRAWS]
        work_s = (batch.gpu_s[rank] + batch.kv_tokens * self._stages.kv_s[rank]) * noise
        launch_s = batch.launch_s[rank] * noise
        launched_s = now_s + launch_s
        # A graph starts when it is launched, eager kernels while later ones are launched; what was
        # launched last then still has to run.
        begin_s = now_s + batch.lead * launch_s
        if ready_s > begin_s:
            begin_s = ready_s
        if rank:
            polls_from_s = now_s if now_s > gpu_free_s else gpu_free_s
            if begin_s > polls_from_s:
                self._poll(rank, polls_from_s, begin_s)
        end_s = begin_s + work_s
        self._record(rank, begin_s, end_s, batch)
        last_s = launched_s + batch.lead * work_s
        gpu_s[rank] = batch.end_s = end_s if end_s > last_s else last_s
        cpu_s[rank] = batch.end_s if host.is_blocking else launched_s
        self._sent_s[rank] = cpu_s[rank] if self._depth == 0 else now_s

    def _take_results(self) -> Batch | None:
        """Every rank waits for and processes the result of its next slot."""
        recent, cpu_s, sent_s = self._recent, self._cpu_s, self._sent_s
        lag = len(recent) - self._ranks - 1
        hop_s, exchange_s = self._profile.link.hop_s, self._profile.host.exchange_s
        done = recent[lag]
        if done is not None:
            # The last rank ships it now, `depth` iterations after it launched it.
            arrived_s = max(sent_s[-1] + exchange_s, done.end_s) + hop_s
            cpu_s[0] = max(cpu_s[0] + exchange_s, arrived_s) + exchange_s + done.result_s
        for rank in range(1, self._ranks):
            passed = recent[lag + rank]
            if passed is not None:
                arrived_s = sent_s[rank - 1] + exchange_s + hop_s
                cpu_s[rank] = max(cpu_s[rank] + exchange_s, arrived_s)
                cpu_s[rank] += exchange_s + passed.result_s
        if exchange_s:
            for rank in range(self._ranks - 1):  # and now it sends its hidden states
                if recent[rank] is not None:
                    cpu_s[rank] += exchange_s
        return done

    def _record(self, rank: int, start_s: float, end_s: float, batch: Batch) -> None:
        watts, slow = batch.watts, batch.slow
        self._busy_s[rank] += end_s - start_s
        self._extra_j[rank] += (end_s - start_s) * watts
        if slow:
            self._slow_s[rank] += (end_s - start_s) * slow
        self._spans[rank].append((start_s, end_s, 1.0, watts, slow))

    def _poll(self, rank: int, start_s: float, end_s: float) -> None:
        """The kernel that receives from the rank before waits: energy, but no work."""
        self._extra_j[rank] += (end_s - start_s) * self._polling_w
        self._spans[rank].append((start_s, end_s, 0.0, self._polling_w, 0.0))
