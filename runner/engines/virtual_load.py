"""One phase of load in virtual time: the streams of a plan drive pipelines until the rule ends it.

The counterpart of load/generator.py without sockets and without waiting. Events happen in order
of time on all engines: an engine first delivers the tokens of its last step, then runs its next.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from runner.engines.virtual_batches import VirtualBatches
from runner.load.ramp import Ramp
from runner.load.workload import PlannedRequest, RequestSource, mean_tokens
from runner.machine.front import Front
from runner.machine.hardware import REQUEST_S
from runner.measure.window import Counts, Window, WindowRule
from runner.pipeline import Pipeline, PipelineRequest, Token
from runner.trial import (
    ClientHealth,
    LoadPlan,
    LoadProtocol,
    LoadRun,
    LoadStart,
    RequestRecord,
    RequestStatus,
)

SEND_GAP_S = 50e-6  # one client sends its requests one after another
TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Engine:
    """One pipeline, the replica it belongs to, and what is told of its batches."""

    pipeline: Pipeline
    replica: int
    batches: VirtualBatches
    front: Front


@dataclass(slots=True)
class _Flight:
    """A request on its way. `stream` is its place in the concurrency."""

    planned: PlannedRequest
    stream: int
    replica: int
    send_s: float
    cached_tokens: int
    token_s: list[float] = field(default_factory=list)
    is_done: bool = False


class VirtualLoad:
    """Runs one plan on `engines`, whose clocks all stand at or before `started_s`.

    `on_time(t)` is called as time passes, at least every `TICK_S`, with times that never fall.
    """

    def __init__(
        self,
        plan: LoadPlan,
        engines: Sequence[Engine],
        started_s: float,
        on_time: Callable[[float], None],
        *,
        has_prefix_cache: bool,
    ) -> None:
        self._plan = plan
        self._engines = engines
        self._started_s = started_s
        self._on_time = on_time
        self._has_prefix_cache = has_prefix_cache
        self._source = RequestSource(plan)
        self._ramp = Ramp(plan.concurrency, mean_tokens(plan.output_tokens))
        self._rule = WindowRule(plan, started_s)
        self._next_look_s = started_s + self._rule.check_interval_s
        self._next_tick_s = started_s
        self._flights: dict[str, _Flight] = {}
        self._due: list[tuple[Token, ...]] = [()] * len(engines)
        self._held: list[deque[Token]] = [deque() for _ in engines]  # by a front that has stopped
        self._events_s = [math.inf] * len(engines)
        self._client_free_s = started_s
        self._arrivals = 0
        self._next_arrival_s = math.inf
        self._tokens = 0
        self._finished = 0
        self._answering = 0
        self.ended_s = started_s

    def run(self) -> LoadRun:
        """Drive the load to its end and drain the engines, idle from `ended_s` on."""
        self._start()
        window: Window | None = None
        now_s = self._started_s
        while window is None:
            event_s = min(self._events_s)
            now_s = min(event_s, self._next_arrival_s, self._next_look_s)
            if now_s >= self._next_tick_s:
                self._next_tick_s += TICK_S
                self._on_time(now_s)
            if now_s >= self._next_look_s:
                window = self._look(now_s)
            elif now_s >= self._next_arrival_s:
                self._arrive(now_s)
            else:
                window = self._advance(self._events_s.index(event_s), now_s)
        self._drain(now_s)
        return LoadRun(
            records=tuple(_record(flight, now_s) for flight in self._flights.values()),
            started_s=self._started_s,
            window_start_s=window.start_s,
            window_end_s=window.end_s,
            is_steady=window.is_steady,
            client=ClientHealth(cpu_share=0.0, max_lag_s=0.0),
            start=self._plan.start,
            cut_below=self._plan.worth if window.is_hopeless else None,
        )

    def _start(self) -> None:
        if self._is_open_loop:
            self._plan_arrival(self._started_s)
        elif self._is_gradual:
            self._begin_stream(self._started_s)
        else:
            while not self._ramp.is_done:
                self._begin_stream(self._started_s)

    def _look(self, now_s: float) -> Window | None:
        self._next_look_s = now_s + self._rule.check_interval_s
        return self._observe(now_s)

    def _observe(self, now_s: float) -> Window | None:
        counts = Counts(
            output_tokens=self._tokens,
            sent=len(self._flights),
            finished=self._finished,
            answering=self._answering,
            streams=self._ramp.started,
        )
        return self._rule.observe(now_s, counts)

    def _arrive(self, now_s: float) -> None:
        if self._is_open_loop:
            self._send(self._arrivals - 1, now_s, due_s=now_s)
            self._plan_arrival(now_s)
        else:
            self._begin_stream(now_s)

    def _begin_stream(self, now_s: float) -> None:
        self._send(self._ramp.start(now_s), now_s)
        self._plan_stream(now_s)

    def _plan_stream(self, now_s: float) -> None:
        due_s = None if self._ramp.is_done else self._ramp.due_s(now_s, self._tokens)
        self._next_arrival_s = math.inf if due_s is None else due_s

    def _plan_arrival(self, now_s: float) -> None:
        rate = self._plan.rate or float(self._plan.concurrency)
        self._next_arrival_s = now_s + self._source.arrival_gap(self._arrivals) / rate
        self._arrivals += 1

    def _send(self, stream: int, now_s: float, due_s: float | None = None) -> None:
        """Send the next request of a stream; streams are dealt round-robin to the engines."""
        place = stream % len(self._engines)
        engine = self._engines[place]
        planned = self._source.next()
        planned = planned if due_s is None else replace(planned, due_s=due_s)
        send_s = max(now_s, self._client_free_s)
        self._client_free_s = send_s + SEND_GAP_S
        cached_tokens = planned.shared_tokens if self._has_prefix_cache else 0
        flight = _Flight(planned, stream, engine.replica, send_s, cached_tokens)
        self._flights[planned.request_id] = flight
        request = PipelineRequest(
            planned.request_id,
            planned.prompt_tokens,
            planned.output_tokens,
            cached_tokens,
        )
        engine.pipeline.submit(request, engine.front.takes(send_s + REQUEST_S))
        self._schedule(place)

    def _schedule(self, place: int) -> None:
        """Note when an engine next has something to do."""
        due, held = self._due[place], self._held[place]
        next_s = due[0].time_s if due else self._engines[place].pipeline.next_step_s()
        next_s = math.inf if next_s is None else next_s
        self._events_s[place] = min(next_s, held[0].time_s) if held else next_s

    def _advance(self, place: int, now_s: float) -> Window | None:
        due, held = self._due[place], self._held[place]
        window = None
        if held and held[0].time_s <= now_s:
            ready: list[Token] = []
            while held and held[0].time_s <= now_s:
                ready.append(held.popleft())
            window = self._deliver(tuple(ready), now_s)
        elif due:
            self._due[place] = ()
            window = self._deliver(due, now_s)
        else:
            self._step(place)
        self._schedule(place)
        return window

    def _step(self, place: int) -> None:
        """One iteration of an engine; tokens that its front holds back leave when it goes on."""
        engine = self._engines[place]
        step = engine.pipeline.step()
        engine.batches.note(step.batches, engine.pipeline.retractions)
        tokens = tuple(engine.front.passes(step.tokens))
        if tokens and tokens[-1].time_s > step.tokens[-1].time_s:
            self._held[place] += tokens
        else:
            self._due[place] = tokens

    def _deliver(self, tokens: tuple[Token, ...], now_s: float) -> Window | None:
        flights = self._flights
        self._tokens += len(tokens)
        if self._is_gradual and not self._ramp.is_done:
            self._plan_stream(now_s)
        ended: list[_Flight] = []
        for token in tokens:
            flight = flights[token.request_id]
            if not flight.token_s:
                self._answering += 1
            flight.token_s.append(now_s)
            if token.is_last:
                flight.is_done = True
                self._answering -= 1
                ended.append(flight)
        if not ended:
            return None
        self._finished += len(ended)
        window = self._observe(now_s)
        if window is None and self._is_replacing:
            for flight in ended:
                self._send(flight.stream, now_s)
        return window

    @property
    def _is_open_loop(self) -> bool:
        return self._plan.protocol is LoadProtocol.OPEN_LOOP and not self._plan.is_warmup

    @property
    def _is_gradual(self) -> bool:
        return self._is_replacing and self._plan.start is LoadStart.GRADUAL

    @property
    def _is_replacing(self) -> bool:
        return self._plan.protocol is LoadProtocol.CLOSED_LOOP and not self._plan.is_warmup

    def _drain(self, now_s: float) -> None:
        """Abort what still runs, and step until every engine is idle."""
        for engine in self._engines:
            engine.pipeline.abort_all()
        self.ended_s = now_s
        for engine in self._engines:
            while (step_s := engine.pipeline.next_step_s()) is not None:
                self.ended_s = max(self.ended_s, step_s)
                engine.pipeline.step()
        self._on_time(self.ended_s)


def _record(flight: _Flight, stopped_s: float) -> RequestRecord:
    token_s = tuple(flight.token_s)
    return RequestRecord(
        request_id=flight.planned.request_id,
        replica=flight.replica,
        send_s=flight.send_s,
        first_token_s=token_s[0] if token_s else None,
        end_s=token_s[-1] if flight.is_done else max(stopped_s, flight.send_s),
        token_s=token_s,
        prompt_tokens=flight.planned.prompt_tokens,
        output_tokens=len(token_s),
        wanted_tokens=flight.planned.output_tokens,
        cached_tokens=flight.cached_tokens if token_s else 0,
        status=RequestStatus.OK if flight.is_done else RequestStatus.CUT,
        due_s=flight.planned.due_s,
    )
