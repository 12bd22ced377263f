"""One request being answered: takes tokens in and hands events to its exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from runner.engines.emulator.answers import ABORTED, LENGTH, Answer, Finish, RequestTimes
from runner.engines.emulator.exchange import Exchange, Part

OnEnd: TypeAlias = Callable[["Reply"], None]


class Reply:
    """The continuation at `index` of its exchange."""

    def __init__(
        self,
        answer: Answer,
        times: RequestTimes,
        exchange: Exchange,
        index: int,
        stream_interval: int,
        on_end: OnEnd,
    ) -> None:
        self.times = times
        self.tokens = 0
        self.finish: Finish | None = None
        self._answer = answer
        self._exchange = exchange
        self._index = index
        self._interval = stream_interval
        self._on_end = on_end

    @property
    def is_stream(self) -> bool:
        return self._exchange.is_stream

    def deliver(self, completion_tokens: int, now_s: float, *, is_last: bool) -> None:
        """The request has `completion_tokens` tokens now."""
        self.tokens = completion_tokens
        self.times.note(now_s)
        if is_last:
            self._end(LENGTH)
        elif self._exchange.is_stream and (
            self._interval == 1 or completion_tokens % self._interval == 1
        ):
            self._exchange.send(self._answer.event(completion_tokens, None))

    def abort(self, now_s: float) -> None:
        """End the request as SGLang ends an aborted one."""
        self.times.last_token_s = now_s
        self._end(ABORTED)

    def _end(self, finish: Finish) -> None:
        self.finish = finish
        if self._exchange.is_stream:
            self._exchange.send(self._answer.event(self.tokens, finish))
        self._exchange.end_part(self._index, Part(self.tokens, finish))
        self._on_end(self)
