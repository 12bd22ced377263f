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
from runner.engines.emulator.pace import Pace
from runner.pipeline import BatchReport, Pipeline, PipelineRequest, Token

LATE_S = 0.010  # real seconds behind the schedule that are worth a line
LATE_LOG_INTERVAL_S = 1.0
STEPS_PER_TURN = 16  # then sockets get their turn


class TokenSink(Protocol):
    """Where the tokens of one request go."""

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
        on_late: Callable[[float], None],
    ) -> None:
        self.pipeline = pipeline
        self.pace = Pace()
        self._clock = clock
        self._on_batch = on_batch
        self._on_late = on_late
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop, self._run)
        self._names = count()
        self._sinks: dict[str, TokenSink] = {}
        self._due: deque[Token] = deque()
        self._is_scheduled = False
        self._is_frozen = False
        self._latest_s = 0.0
        self._late_logged_s = 0.0

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
        self.pipeline.submit(request, self._now_s())
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

    def _wake(self) -> None:
        if not self._is_scheduled and not self._is_frozen:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        if self._is_frozen:
            return
        now_s = self._now_s()
        for _ in range(STEPS_PER_TURN):
            step_s = self.pipeline.next_step_s()
            if not self._deliver(now_s if step_s is None else min(step_s, now_s), now_s):
                return
            if step_s is None or step_s > now_s:
                break
            self._latest_s = max(self._latest_s, now_s - step_s)
            step = self.pipeline.step()
            self._due.extend(step.tokens)
            for batch in step.batches:
                self._on_batch(batch._replace(time_s=self.pace.to_clock(batch.time_s)))
        self._sleep()
        self._tell_lateness(now_s)

    def _deliver(self, until_s: float, now_s: float) -> bool:
        """Hand out what is due; False when that froze the server."""
        due, read_s = self._due, self.pace.to_clock(now_s)
        if due and due[0].time_s <= until_s:
            self._latest_s = max(self._latest_s, now_s - due[0].time_s)
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
            return
        next_s = min(times_s)
        if next_s <= self._now_s():
            self._wake()
        else:
            self._alarm.set(self.pace.to_clock(next_s) / self._clock.scale)

    def _now_s(self) -> float:
        """The pipeline's time."""
        return self.pace.to_pipeline(self._clock.now_s())

    def _tell_lateness(self, now_s: float) -> None:
        late_s = self._latest_s / self._clock.scale
        if late_s <= LATE_S:
            return
        real_s = now_s / self._clock.scale
        if real_s - self._late_logged_s >= LATE_LOG_INTERVAL_S:
            self._late_logged_s = real_s
            self._latest_s = 0.0
            self._on_late(late_s)
