"""One phase of load in progress: streams or arrivals, what they record, and when they stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runner.clock import Clock
from runner.errors import LoadFailed
from runner.load.abort import abort
from runner.load.api import post
from runner.load.client import Address, Connection, Target
from runner.load.hang import HangWatch, hang_limit_s
from runner.load.health import HealthMonitor
from runner.load.pool import Pool
from runner.load.ramp import Ramp
from runner.load.reply import Reply
from runner.load.stock import RequestStock
from runner.load.totals import Totals
from runner.load.vocabulary import Vocabulary
from runner.load.workload import PlannedRequest, RequestSource, mean_tokens
from runner.measure.counted import rule_for
from runner.measure.window import Counts, Window
from runner.trial import (
    LoadPlan,
    LoadProtocol,
    LoadRun,
    LoadStart,
    RequestRecord,
    RequestStatus,
)

SPARE_CONNECTIONS = 8
STARTS_PER_TURN = 32
PROGRESS_INTERVAL_S = 0.5  # of the wall
SHORTEST_LOOK_S = 0.005  # of the wall
MOST_STOCKED = 8192
RAMP_LOOK_S = 0.02  # of the wall


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a load is, for people to watch; the rate is that of the last half second."""

    now_s: float
    output_tokens: int
    finished: int
    output_throughput: float
    in_flight: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A request on its way."""

    request: PlannedRequest
    target: Target
    connection: Connection
    reply: Reply
    send_s: float


class Phase:
    """Drives one plan, or one shard of it, on an event loop of its own."""

    def __init__(
        self, plan: LoadPlan, targets: Sequence[Target], clock: Clock, shard: int, shards: int
    ) -> None:
        if not targets or len({(target.api, target.model) for target in targets}) != 1:
            raise ValueError("a load needs targets, all with the same interface and model")
        self._streams = range(shard, plan.concurrency, shards)
        if not self._streams:
            raise ValueError(f"{shards} shards for a concurrency of {plan.concurrency}")
        count = plan.requests
        self._plan = replace(
            plan,
            concurrency=len(self._streams),
            requests=None if count is None else len(range(shard, count, shards)),
            worth=plan.worth and plan.worth * len(self._streams) / plan.concurrency,
        )
        self._worth = plan.worth
        self._claimed = 0
        self._clock = clock
        self._shards = shards
        self._targets = targets
        known = [each.vocabulary for each in targets if each.vocabulary is not None]
        vocabulary = Vocabulary.of(min(known, default=None))
        self._source = RequestSource(plan, shard, shards, vocabulary)
        self._ramp = Ramp(len(self._streams), mean_tokens(plan.output_tokens))
        first = targets[0]
        size = min(len(self._streams), MOST_STOCKED, self._plan.requests or MOST_STOCKED)
        self._stock = RequestStock(self._source, first.api, first.model, size)
        self._pools = [Pool(Address.of(target.url), clock) for target in targets]
        self._totals = Totals()
        self._records: list[RequestRecord] = []
        self._flights: set[Flight] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, on_progress: Callable[[LoadProgress], None] | None = None) -> LoadRun:
        """Drive the load to its end; raises LoadFailed when too many requests fail."""
        loop = asyncio.get_running_loop()
        self._stopped: asyncio.Future[Window] = loop.create_future()
        loop.set_exception_handler(self._note_crash)
        self._stock.fill()
        health = HealthMonitor(self._clock)
        try:
            await self._connect()
            started_s = self._clock.now_s()
            self._rule = rule_for(self._plan, started_s)
            self._hang = HangWatch(self._targets, hang_limit_s(self._plan, self._clock), started_s)
            health.start()
            self._start(started_s)
            self._spawn(self._watch())
            if on_progress is not None:
                self._spawn(self._tell(on_progress))
            window, cut_short = await self._last(started_s)
        finally:
            health.stop()
            await self._cut()
        if self._totals.output_tokens == 0:
            silent = f"no output token came in {window.end_s - started_s:.0f} s of load"
            raise LoadFailed(cut_short or self._totals.failures() or silent)
        return LoadRun(
            records=tuple(sorted(self._records, key=lambda record: record.send_s)),
            started_s=started_s,
            window_start_s=window.start_s,
            window_end_s=window.end_s,
            is_steady=window.is_steady,
            client=health.health(window.start_s, window.end_s),
            start=self._plan.start,
            cut_short=cut_short,
            cut_below=self._worth if window.is_hopeless else None,
        )

    async def _last(self, started_s: float) -> tuple[Window, str | None]:
        """The window, and why it ends early; a load that is not a counted one raises instead."""
        try:
            return await self._stopped, None
        except (LoadFailed, asyncio.CancelledError) as err:
            if self._plan.requests is None:
                raise
            window = Window(started_s, self._clock.now_s(), is_steady=False)
            return window, str(err) or "it was interrupted"

    # What is sent.

    async def _connect(self) -> None:
        for place, pool in enumerate(self._pools):
            streams = sum(stream % len(self._pools) == place for stream in self._streams)
            is_spread = self._is_open_loop or self._is_gradual
            try:
                await pool.fill(min(SPARE_CONNECTIONS, streams) if is_spread else streams)
            except OSError as err:
                raise LoadFailed(f"cannot connect to {self._targets[place].url}: {err}") from err

    def _start(self, started_s: float) -> None:
        if self._is_open_loop or self._is_replacing:
            self._spawn(self._stock.keep_full())
        self._spawn(self._arrive(started_s) if self._is_open_loop else self._begin_streams())

    @property
    def _is_open_loop(self) -> bool:
        return self._plan.protocol is LoadProtocol.OPEN_LOOP and not self._plan.is_warmup

    @property
    def _is_replacing(self) -> bool:
        return self._plan.protocol is LoadProtocol.CLOSED_LOOP and not self._plan.is_warmup

    @property
    def _is_gradual(self) -> bool:
        return self._is_replacing and self._plan.start is LoadStart.GRADUAL

    async def _begin_streams(self) -> None:
        """Begin the streams, together or one after another (load/ramp.py).

        Those that begin together do so in turns: in between, the first replies are read in time.
        """
        for stream in self._streams:
            if self._is_gradual and self._ramp.started:
                await self._until_due()
            elif self._ramp.started % STARTS_PER_TURN == STARTS_PER_TURN - 1:
                await asyncio.sleep(0)
            self._ramp.start(self._clock.now_s())
            place = stream % len(self._targets)
            self._spawn(self._repeat(place) if self._is_replacing else self._request(place))

    async def _until_due(self) -> None:
        """Wait for the time of the next stream; it moves as the first tokens show how fast."""
        while True:
            now_s = self._clock.now_s()
            due_s = self._ramp.due_s(now_s, self._totals.output_tokens)
            if due_s is not None and due_s <= now_s:
                return
            wait_s = RAMP_LOOK_S if due_s is None else self._clock.wall_duration_s(due_s - now_s)
            await asyncio.sleep(min(wait_s, RAMP_LOOK_S))

    async def _repeat(self, place: int) -> None:
        while self._claim():
            await self._request(place)

    def _claim(self) -> bool:
        """Whether one more request may be sent; it then counts as sent."""
        if self._plan.requests is None:
            return True
        self._claimed += 1
        return self._claimed <= self._plan.requests

    async def _arrive(self, started_s: float) -> None:
        """An open loop; every shard walks through all arrivals and sends its own."""
        if self._plan.rate is None or self._plan.rate <= 0:
            raise ValueError("an open loop needs a rate above 0")
        due_s, arrival = started_s, 0
        while True:
            due_s += self._source.arrival_gap(arrival) / self._plan.rate
            if arrival % self._shards == self._streams.start:
                if not self._claim():
                    return
                wait_s = self._clock.wall_duration_s(due_s - self._clock.now_s())
                await asyncio.sleep(max(wait_s, 0.0))
                place = arrival % len(self._targets)
                self._spawn(self._request(place, due_s))
                if self._pools[place].idle < SPARE_CONNECTIONS // 2:
                    self._spawn(self._refill(place))
            arrival += 1

    async def _refill(self, place: int) -> None:
        try:
            await self._pools[place].fill(SPARE_CONNECTIONS)
        except OSError:
            return  # the next request meets the same error, and it counts there

    async def _request(self, place: int, due_s: float | None = None) -> None:
        """Send one request to a target and record how it ended; `due_s`: of an open loop."""
        target, pool = self._targets[place], self._pools[place]
        request, body = self._stock.take()
        request = request if due_s is None else replace(request, due_s=due_s)
        self._totals.sent += 1
        reply = Reply(self._totals)
        try:
            connection = await pool.take()
        except OSError as err:
            reply.fail(f"cannot connect to {target.url}: {err}")
            self._finish(request, target, reply, self._clock.now_s())
            return
        address = pool.address
        data = post(address.name, address.prefix + target.api.path, body, target.key)
        flight = Flight(request, target, connection, reply, connection.begin(data, reply))
        self._flights.add(flight)
        await connection.end()
        pool.give_back(connection)
        self._flights.discard(flight)
        self._finish(request, target, reply, flight.send_s)

    # What is recorded.

    def _finish(self, request: PlannedRequest, target: Target, reply: Reply, send_s: float) -> None:
        now_s = self._clock.now_s()
        if reply.error is None and reply.last_s is not None:
            self._record(request, target, reply, send_s, reply.last_s, RequestStatus.OK)
        else:
            reply.fail("the reply was empty")
            self._record(request, target, reply, send_s, now_s, RequestStatus.FAILED)
        self._hang.heard(target, now_s)
        self._totals.end(reply.error)
        self._check_failures()
        self._look(now_s)

    def _record(
        self,
        request: PlannedRequest,
        target: Target,
        reply: Reply,
        send_s: float,
        end_s: float,
        status: RequestStatus,
    ) -> None:
        prompt_tokens, cached_tokens = reply.usage()
        self._records.append(
            RequestRecord(
                request_id=request.request_id,
                replica=target.replica,
                send_s=send_s,
                first_token_s=reply.token_s[0] if reply.token_s else None,
                end_s=end_s,
                token_s=tuple(reply.token_s),
                prompt_tokens=request.prompt_tokens if prompt_tokens is None else prompt_tokens,
                output_tokens=len(reply.token_s),
                wanted_tokens=request.output_tokens,
                cached_tokens=cached_tokens,
                status=status,
                error=reply.error if status is RequestStatus.FAILED else None,
                due_s=request.due_s,
            )
        )

    def _check_failures(self) -> None:
        reason = self._totals.reason_to_give_up(self._plan)
        if reason is not None and not self._stopped.done():
            self._stopped.set_exception(LoadFailed(reason))

    # When it stops.

    async def _watch(self) -> None:
        interval_s = self._clock.wall_duration_s(self._rule.check_interval_s)
        while True:
            await asyncio.sleep(max(interval_s, SHORTEST_LOOK_S))
            now_s = self._clock.now_s()
            if self._plan.silence_s is None:
                self._check_hang(now_s)
            else:
                self._end_silent(now_s, self._plan.silence_s)
            self._look(now_s)

    def _end_silent(self, now_s: float, silence_s: float) -> None:
        for flight in tuple(self._flights):
            heard_s = flight.send_s if flight.reply.last_s is None else flight.reply.last_s
            if now_s - heard_s >= silence_s:
                flight.reply.fail(f"no byte of the reply came for {silence_s:g} s")
                flight.connection.close()

    def _check_hang(self, now_s: float) -> None:
        reason = self._hang.look(now_s, ((f.target, f.reply) for f in self._flights))
        if reason is not None and not self._stopped.done():
            self._stopped.set_exception(LoadFailed(reason))

    def _look(self, now_s: float) -> None:
        totals = self._totals
        counts = Counts(
            output_tokens=totals.output_tokens,
            sent=totals.sent,
            finished=totals.finished,
            answering=totals.answered - totals.finished,
            streams=self._ramp.started,
        )
        window = self._rule.observe(now_s, counts)
        if window is not None and not self._stopped.done():
            self._stopped.set_result(window)

    async def _tell(self, on_progress: Callable[[LoadProgress], None]) -> None:
        before_s, before = self._clock.now_s(), 0
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            now_s, tokens = self._clock.now_s(), self._totals.output_tokens
            rate = (tokens - before) / (now_s - before_s)
            totals = self._totals
            on_progress(
                LoadProgress(
                    now_s, tokens, totals.finished, rate, len(self._flights), totals.failed
                )
            )
            before_s, before = now_s, tokens

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (err := task.exception()) is not None:
            self._crash(err)

    def _note_crash(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error in a callback of the event loop, which nobody awaits."""
        error = context.get("exception")
        self._crash(error if error is not None else RuntimeError(context["message"]))

    def _crash(self, error: BaseException) -> None:
        if not self._stopped.done():
            self._stopped.set_exception(error)

    async def _cut(self) -> None:
        """Stop sending, record what still runs as cut, and let the servers forget it."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        now_s = self._clock.now_s()
        running = sorted(self._flights, key=lambda flight: flight.send_s)
        self._flights.clear()
        for flight in running:
            self._record(
                flight.request, flight.target, flight.reply, flight.send_s, now_s, RequestStatus.CUT
            )
            flight.connection.close()
        for pool in self._pools:
            pool.close()
        # A lone generator drops everything, which also ends requests the server lost sight of; one
        # of several shards only its own, and so does a counted load: others may use the server too.
        is_alone = self._shards == 1 and self._plan.requests is None
        for place, target in enumerate(self._targets):
            ids = [f.request.request_id for f in running if f.target is target]
            if ids:
                dropped = None if is_alone else ids
                await abort(self._pools[place].address, self._clock, target.key, dropped)
