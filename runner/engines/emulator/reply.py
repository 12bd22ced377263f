"""One request being answered: takes tokens in and hands events to its exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from runner.engines.emulator.answers import ABORTED, LENGTH, Answer, Finish, RequestTimes
from runner.engines.emulator.exchange import Exchange, Part, frame

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
        self._prepared = 0
        self._event = b""

    @property
    def is_stream(self) -> bool:
        return self._exchange.is_stream

    def prepare(self, completion_tokens: int, *, is_last: bool) -> None:
        """Make the event of a token before it is due; the first and the last tell of times.

        One at a time: an event says what the ones before it did not.
        """
        if is_last or completion_tokens == 1 or self._prepared > self.tokens:
            return
        if self._has_event(completion_tokens):
            self._event = frame(self._answer.event(completion_tokens, None))
            self._prepared = completion_tokens

    def deliver(self, completion_tokens: int, now_s: float, *, is_last: bool) -> None:
        """The request has `completion_tokens` tokens now."""
        self.tokens = completion_tokens
        self.times.note(now_s)
        if is_last:
            self._end(LENGTH)
        elif completion_tokens == self._prepared:
            self._exchange.send(self._event)
        elif self._has_event(completion_tokens):
            self._exchange.send(frame(self._answer.event(completion_tokens, None)))

    @property
    def is_client_gone(self) -> bool:
        """Whether the stream's connection is closed."""
        return self._exchange.is_client_gone

    def abort(self, now_s: float) -> None:
        """End the request as SGLang ends an aborted one."""
        self.times.last_token_s = now_s
        self._end(ABORTED)

    def fail(self, event: bytes, now_s: float) -> None:
        """End a stream with an event that tells of an error."""
        self.times.last_token_s = now_s
        self._exchange.fail(event)
        self._close(ABORTED)

    def _has_event(self, completion_tokens: int) -> bool:
        return self._exchange.is_stream and (
            self._interval == 1 or completion_tokens % self._interval == 1
        )

    def _end(self, finish: Finish) -> None:
        if self._exchange.is_stream:
            self._exchange.send(frame(self._answer.event(self.tokens, finish)))
        self._close(finish)

    def _close(self, finish: Finish) -> None:
        self.finish = finish
        self._exchange.end_part(self._index, Part(self.tokens, finish))
        self._on_end(self)
