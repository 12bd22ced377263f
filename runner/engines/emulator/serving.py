"""Runs the pipeline model in scaled wall-clock time and hands out each token when it is due.

The pipeline's times are readings of the server's clock. An iteration is computed when the clock
reaches its start, with everything submitted until then; each token is delivered when the clock
reaches the token's own time. The schedule is the pipeline's, so lateness never adds up: a server
that falls behind keeps the times it should have had, and says so in its log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from runner.clock import Clock
from runner.engines.emulator.alarm import Alarm
from runner.engines.emulator.heartbeat import Heartbeat
from runner.engines.emulator.lateness import Lateness
from runner.engines.emulator.pace import Pace
from runner.machine.front import Front
from runner.pipeline import BatchReport, Pipeline, PipelineRequest, Token

STEPS_PER_TURN = 16  # then sockets get their turn


class TokenSink(Protocol):
    """Where the tokens of one request go: each is announced, and delivered when it is due."""

    def prepare(self, completion_tokens: int, *, is_last: bool) -> None:
        """The request will soon have `completion_tokens` tokens."""
        ...

    def deliver(self, completion_tokens: int, now_s: float, *, is_last: bool) -> None:
        """The request has `completion_tokens` tokens now."""
        ...


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request costs."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


class Serving:
    """One pipeline, served in real time on one event loop."""

    def __init__(
        self,
        pipeline: Pipeline,
        clock: Clock,
        on_batch: Callable[[BatchReport], None],
        lateness: Lateness,
        front: Front,
        on_pause: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.pipeline = pipeline
        self.front = front
        self._on_pause = on_pause
        self.pace = Pace()
        self._clock = clock
        self._on_batch = on_batch
        self._lateness = lateness
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop, self._run)
        self._heartbeat = Heartbeat(self._loop, clock, self._note_lateness)
        self._names = count()
        self._sinks: dict[str, TokenSink] = {}
        self._due: deque[Token] = deque()
        self._is_scheduled = False
        self._is_frozen = False
        self._slot_s: dict[int, float] = {}  # when each slot's last result was there
        self._round_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits or is about to be delivered."""
        return not self._sinks and self.pipeline.is_idle

    def submit(self, demand: Demand, sink: TokenSink) -> str:
        """Queue a request, whose tokens go to `sink`; returns a name of its own for it.

        Names are never used twice: a client may use its own again while the pipeline still
        carries the aborted request that had it.
        """
        name = str(next(self._names))
        request = PipelineRequest(
            name, demand.prompt_tokens, demand.output_tokens, demand.cached_tokens
        )
        self._sinks[name] = sink
        self.pipeline.submit(request, self.front.takes(self._now_s()))
        self._wake()
        return name

    def abort(self, name: str) -> bool:
        """Forget a request; False when it is not (or no longer) known. Its sink hears nothing."""
        if self._sinks.pop(name, None) is None:
            return False
        self.pipeline.abort(name)
        self._wake()
        return True

    def freeze(self) -> None:
        """Stop dead, as a server whose scheduler died: nothing runs or is delivered any more."""
        self._is_frozen = True

    def close(self) -> None:
        """Give the timer back."""
        self._is_frozen = True
        self._alarm.close()
        self._heartbeat.close()

    def _wake(self) -> None:
        if not self._is_scheduled and not self._is_frozen:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        if self._is_frozen:
            return
        for _ in range(STEPS_PER_TURN):
            now_s = self._now_s()
            step_s = self.pipeline.next_step_s()
            if not self._deliver(now_s if step_s is None else min(step_s, now_s), now_s):
                return
            if step_s is None or step_s > now_s:
                break
            step = self.pipeline.step()
            self._announce(step.tokens)
            for batch in step.batches:
                self._note_round(batch)
                self._on_batch(batch._replace(time_s=self.pace.to_clock(batch.time_s)))
        self._sleep()

    def _announce(self, tokens: tuple[Token, ...]) -> None:
        """Have what is due later made now: many tokens are due at one time."""
        before = self.front.pauses
        self._due.extend(self.front.passes(tokens))
        if self.front.pauses > before:
            self._on_pause(self.front.pause_s)
        sinks = self._sinks
        for token in tokens:
            sink = sinks.get(token.request_id)
            if sink is not None:
                sink.prepare(token.completion_tokens, is_last=token.is_last)

    def _deliver(self, until_s: float, now_s: float) -> bool:
        """Hand out what is due; False when that froze the server."""
        due, read_s = self._due, self.pace.to_clock(now_s)
        while due and due[0].time_s <= until_s:
            token = due.popleft()
            sink = self._sinks.get(token.request_id)
            if sink is None:
                continue
            if token.is_last:
                del self._sinks[token.request_id]
            sink.deliver(token.completion_tokens, read_s, is_last=token.is_last)
            if self._is_frozen:
                return False
        return True

    def _sleep(self) -> None:
        """Until the next step or token; at once, after the sockets, when that time is past."""
        step_s = self.pipeline.next_step_s()
        token_s = self._due[0].time_s if self._due else None
        times_s = [time_s for time_s in (step_s, token_s) if time_s is not None]
        if not times_s:
            self._slot_s.clear()
            return
        next_s = min(times_s)
        if next_s <= self._now_s():
            self._wake()
        else:
            self._alarm.set(self.pace.to_clock(next_s) / self._clock.scale)

    def _now_s(self) -> float:
        """The pipeline's time."""
        return self.pace.to_pipeline(self._clock.now_s())

    def _note_lateness(self, late_s: float) -> None:
        self._lateness.note(late_s, self._round_s, self._clock.now_s())

    def _note_round(self, batch: BatchReport) -> None:
        """A request gets a token each time that its slot's result is there."""
        before_s = self._slot_s.get(batch.slot)
        self._slot_s[batch.slot] = batch.time_s
        if before_s is not None:
            self._round_s = batch.time_s - before_s
