"""The running server, between its routes and its pipeline: who is served, what is counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from runner.clock import Clock
from runner.engines.emulator.faults.kind import FaultKind
from runner.engines.emulator.faults.requests import RequestFaults
from runner.engines.emulator.lateness import Lateness
from runner.engines.emulator.log import BatchLog, ServerLog
from runner.engines.emulator.prefix_cache import PrefixCache
from runner.engines.emulator.reply import Reply
from runner.engines.emulator.serving import Demand, Serving
from runner.engines.emulator.setup import ServerSetup
from runner.engines.emulator.stats import Gauge, Stats
from runner.machine.front import Front
from runner.pipeline import BatchReport, Pipeline

HEALTH_POLL_S = 1.0
HEALTH_POLLS = 20
STREAM_ABORT_DELAY_S = 2.0  # SGLang notices a client that went away this late
DOCUMENT_ABORT_DELAY_S = 4.0
CRASH_DELAY_S = 5.0
HEALTH = Demand(prompt_tokens=1, output_tokens=1)


class Status(StrEnum):
    """What /health goes by."""

    STARTING = "Starting"
    UP = "Up"
    UNHEALTHY = "UnHealthy"
    STOPPING = "Stopping"


@dataclass(frozen=True, slots=True)
class Job:
    """One request for tokens. `prompt` is a hash of the prompt's content."""

    request_id: str
    prompt: int
    demand: Demand


class RequestRefused(Exception):
    """A request that is answered with an error; `status` is its HTTP code."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message, status)
        self.message = message
        self.status = status


class EmulatedServer:
    """One server, or one replica behind its port, from the moment that this opens."""

    def __init__(
        self,
        setup: ServerSetup,
        pipeline: Pipeline,
        clock: Clock,
        log: ServerLog,
        on_crash: Callable[[str], None],
        dp_rank: int = 0,
    ) -> None:
        self.setup = setup
        self.dp_rank = dp_rank
        self.clock = clock
        self.log = log
        self.status = Status.STARTING
        self.stats = Stats()
        self.batches = BatchLog(
            log, setup.whole("decode_log_interval"), setup.token_capacity, setup.graph_label
        )
        self.prefixes = PrefixCache(setup.token_capacity, is_enabled=setup.has_prefix_cache)
        self.cap = setup.resolved.pp_max_micro_batch_size
        lateness = Lateness(clock.scale, log.write)
        front = Front(setup.profile.host)
        self.serving = Serving(pipeline, clock, self._on_batch, lateness, front, self._on_pause)
        self.faults = RequestFaults(setup.faults, self.hang)
        self._is_hung = False
        self._served: dict[str, _Served] = {}
        self._answered = 0
        self._retracted = 0
        self._result_s = clock.now_s()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._on_crash = on_crash
        self._epoch_offset_s = time.time() - clock.now_s()

    @property
    def request_ids(self) -> list[str]:
        """Requests not answered yet."""
        return list(self._served)

    def date(self) -> float:
        """Unix time on a calendar that started with the server and runs at the emulated pace."""
        return self._epoch_offset_s + self.clock.now_s()

    def freeze_gc(self) -> None:
        """Leave the garbage of the HTTP process alone from now on."""
        self.serving.front.freeze()
        self.log.write("Freezing GC in Tokenizer Manager process.")

    def check_room(self, request_id: str) -> None:
        """Raise RequestRefused when the queue is full or the id is in use."""
        if request_id in self._served:
            raise RequestRefused(f"Duplicate request ID: {request_id}")
        limit = self.setup.number("max_queued_requests")
        if limit is not None and self.serving.pipeline.queued >= limit:
            self.stats.aborted += 1
            raise RequestRefused("The request queue is full.", 503)

    def pause(self) -> None:
        """Abort everything; new requests wait until the server is resumed."""
        self._resumed.clear()
        self.abort_all()

    def resume(self) -> None:
        """Serve again what came during a pause."""
        self._resumed.set()

    async def wait_resumed(self) -> None:
        """Until no pause holds requests back."""
        await self._resumed.wait()

    @property
    def is_ready(self) -> bool:
        """Whether new requests should be sent here."""
        return self.status is Status.UP and self._resumed.is_set()

    def find_cached(self, prompt: int, tokens: int) -> int:
        """How many tokens of this prompt the radix cache holds."""
        return self.faults.cached_tokens(self.prefixes.look_up(prompt, tokens), tokens)

    def submit(self, job: Job, reply: Reply) -> None:
        """Serve a request; `reply` hears of its tokens."""
        kind = str(reply.is_stream).lower()
        self.stats.requests[kind] += 1
        self.stats.prompt_tokens[kind] += job.demand.prompt_tokens
        self.stats.cached_tokens += job.demand.cached_tokens
        self.prefixes.keep(job.prompt, job.demand.prompt_tokens)
        name = self.serving.submit(self.faults.demand(job.demand), self.faults.sink(reply))
        self._served[job.request_id] = _Served(name, reply)

    def on_end(self, request_id: str, reply: Reply) -> None:
        """A request was answered or aborted."""
        served = self._served.pop(request_id, None)
        if served is not None:
            self.serving.abort(served.name)  # what failed runs no more
        stats, times = self.stats, reply.times
        stats.generation_tokens[str(reply.is_stream).lower()] += reply.tokens
        stats.e2e_s.observe(times.e2e_s())
        if times.first_token_s is not None:
            ttft_s = times.first_token_s - times.received_s
            stats.ttft_s.observe(ttft_s)
            if reply.tokens > 1:
                stats.tpot_s.observe((times.e2e_s() - ttft_s) / (reply.tokens - 1))
        self._answered += 1
        self.faults.on_answered(self._answered)
        fault = self.setup.faults.get(FaultKind.DIE_AFTER_REQUESTS)
        if fault is not None and self._answered == fault.number:
            self.crash(f"RuntimeError: emulated fault: died after {self._answered} requests")

    def hang(self) -> None:
        """Live on and do nothing more, as a server whose schedulers wait for each other."""
        self._is_hung = True
        self.serving.freeze()

    def crash(self, reason: str) -> None:
        """Die as a server whose scheduler raised: silent streams for a while, then gone."""
        self.serving.freeze()
        self._on_crash(reason)

    def abort(self, request_id: str) -> None:
        """Abort one request, as SGLang does: by prefix, if that very id is known."""
        if request_id in self._served:
            for name in [name for name in self._served if name.startswith(request_id)]:
                self._abort(name)

    def abort_all(self) -> None:
        """Abort everything that runs or waits."""
        for name in list(self._served):
            self._abort(name)

    def forget(self, request_id: str, delay_s: float) -> None:
        """The client of this request went away: abort it a little later, as SGLang does."""
        if self.faults.ghosts.keep(request_id):
            return
        loop = asyncio.get_running_loop()
        loop.call_later(self.clock.wall_duration_s(delay_s), self.abort, request_id)

    def set_cap(self, cap: int) -> bool:
        """Change the micro-batch cap; False when it is out of range."""
        highest = self.setup.highest_cap
        if not 1 <= cap <= highest:
            self.log.write_ranks(
                f"Updating pp_max_micro_batch_size to {cap} is rejected because it is out of "
                f"the valid range [1, {highest}]."
            )
            return False
        self.cap = cap
        self.serving.pipeline.set_cap(cap)
        self.log.write_ranks(
            f"Config updated via context override: {{'pp_max_micro_batch_size': {cap}}}"
        )
        return True

    def flush(self) -> bool:
        """Empty the radix cache; False (and nothing done) unless the server is idle."""
        if self._is_hung or not self.serving.is_idle:
            self.log.write(
                "Cache not flushed because there are pending requests. "
                f"#queue-req: {self.serving.pipeline.queued}, #running-req: {self.running}"
            )
            return False
        self.prefixes.flush()
        self.batches.reset()
        self.log.write_stages("Cache flushed successfully!")
        return True

    async def prefill(self, prompt: int, tokens: int) -> None:
        """Have a prompt prefilled, and keep it for the requests that follow."""
        await self.probe(Demand(tokens, 1, self.find_cached(prompt, tokens)))
        self.prefixes.keep(prompt, tokens)

    async def probe(self, demand: Demand) -> None:
        """Serve an internal request to its end."""
        sink = _Probe()
        name = self.serving.submit(demand, sink)
        try:
            await sink.done.wait()
        finally:
            self.serving.abort(name)

    async def is_healthy(self) -> bool:
        """Whether SGLang's /health would be content.

        An idle server is asked for one real token, which takes a slot and shows in the log; a busy
        one only has to get on with what it does. Looked at once a second, for 20 seconds.
        """
        if self.status not in {Status.UP, Status.UNHEALTHY}:
            return False
        clock, started_s = self.clock, self.clock.now_s()
        sink = _Probe()
        name = self.serving.submit(HEALTH, sink) if self.serving.is_idle else None
        try:
            for _ in range(HEALTH_POLLS):
                await asyncio.sleep(clock.wall_duration_s(HEALTH_POLL_S))
                is_over = self.serving.is_idle if name is None else sink.done.is_set()
                if is_over or self._result_s > started_s:
                    self.status = Status.UP if self.status is Status.UNHEALTHY else self.status
                    return True
        finally:
            if name is not None:
                self.serving.abort(name)
        self.log.write(
            "Health check failed. Server couldn't get a response from detokenizer for last "
            f"{HEALTH_POLLS * HEALTH_POLL_S:.0f} seconds."
        )
        if self.status is Status.UP:
            self.status = Status.UNHEALTHY
        return False

    def gauges(self) -> list[Gauge]:
        """What /metrics shows of the scheduler, as of the last batch line."""
        batches, capacity = self.batches, self.setup.token_capacity
        values = {
            "num_running_reqs": self.running,
            "num_queue_reqs": self.serving.pipeline.queued,
            "num_used_tokens": batches.tokens_used,
            "token_usage": batches.usage,
            "gen_throughput": batches.gen_throughput,
            "cache_hit_rate": self.cache_hit_rate,
            "max_total_num_tokens": capacity,
            "kv_available_tokens": capacity - batches.tokens_used,
            "kv_used_tokens": batches.tokens_used,
            "page_size": 1,
            "context_len": self.setup.context_len,
            "is_cuda_graph": 0,
            "num_retracted_reqs": self._retracted,
        }
        return [Gauge(f"sglang:{name}", value) for name, value in values.items()]

    @property
    def running(self) -> int:
        """Requests in the micro-batch logged last (SGLang's gauge), 0 when idle."""
        return 0 if self.serving.is_idle else self.batches.running

    @property
    def cache_hit_rate(self) -> float:
        """Share of all prompt tokens that were cached."""
        prompt_tokens = sum(self.stats.prompt_tokens.values())
        return self.stats.cached_tokens / prompt_tokens if prompt_tokens else 0.0

    def _abort(self, request_id: str) -> None:
        served, ghosts = self._served[request_id], self.faults.ghosts
        is_ghost = request_id in ghosts or (served.reply.is_client_gone and ghosts.keep(request_id))
        if self._is_hung or is_ghost:
            return
        self.serving.abort(served.name)
        self.stats.aborted += 1
        served.reply.abort(self.clock.now_s())

    def _on_pause(self, pause_s: float) -> None:
        least_s = self.setup.args["gc_warning_threshold_secs"]
        if isinstance(least_s, int | float) and 0.0 < least_s <= pause_s:
            self.log.write(
                f"LONG GARBAGE COLLECTION DETECTED | Generation 2 | Duration: {pause_s:.4f}s | "
                "# Objects: gen0=0, gen1=0, gen2=0 | This may cause latency jitter."
            )

    def _on_batch(self, batch: BatchReport) -> None:
        self._result_s = self.clock.now_s()
        self._log_retractions()
        self.batches.record(batch)
        self.stats.record_batch(batch)

    def _log_retractions(self) -> None:
        """SGLang's warning that slots had more requests than the KV cache can hold."""
        retracted = self.serving.pipeline.retractions - self._retracted
        if retracted:
            self._retracted += retracted
            self.log.write_stages(
                f"KV cache pool is full. Retract requests. #retracted_reqs: {retracted}"
            )


@dataclass(frozen=True, slots=True)
class _Served:
    """A request under way: its name in the pipeline, and who hears of it."""

    name: str
    reply: Reply


class _Probe:
    """Waits for the last token of an internal request."""

    def __init__(self) -> None:
        self.done = asyncio.Event()

    def prepare(self, completion_tokens: int, *, is_last: bool) -> None:
        """Nothing to make."""

    def deliver(self, completion_tokens: int, now_s: float, *, is_last: bool) -> None:
        del completion_tokens, now_s
        if is_last:
            self.done.set()
