"""One request being answered: takes tokens in and writes them to its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from runner.engines.emulator.answers import ABORTED, DONE, LENGTH, Answer, Finish, RequestTimes

OnEnd: TypeAlias = Callable[["Reply"], None]


class Reply:
    """A stream when it has a transport, else one document at the end (the result of `done`).

    Chunks go to the transport directly, framed by hand: a web framework's write costs more per
    token than all the rest of the server.
    """

    def __init__(
        self,
        answer: Answer,
        times: RequestTimes,
        transport: asyncio.WriteTransport | None,
        stream_interval: int,
        on_end: OnEnd,
    ) -> None:
        self.times = times
        self.tokens = 0
        self.finish: Finish | None = None
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._transport = transport
        self._interval = stream_interval
        self._on_end = on_end

    @property
    def is_stream(self) -> bool:
        return self._transport is not None

    def deliver(self, completion_tokens: int, now_s: float, *, is_last: bool) -> None:
        """The request has `completion_tokens` tokens now."""
        self.tokens = completion_tokens
        self.times.note(now_s)
        if is_last:
            self._end(LENGTH)
        elif self._transport is not None and (
            self._interval == 1 or completion_tokens % self._interval == 1
        ):
            write_chunk(self._transport, self._answer.event(completion_tokens, None))

    @property
    def is_client_gone(self) -> bool:
        """Whether the stream's connection is closed."""
        return self._transport is not None and self._transport.is_closing()

    def fail(self, event: bytes, now_s: float) -> None:
        """End a stream with an event that tells of an error."""
        self.times.last_token_s = now_s
        self._end(ABORTED, event)

    def abort(self, now_s: float) -> None:
        """End the request as SGLang ends an aborted one."""
        self.times.last_token_s = now_s
        self._end(ABORTED)

    def _end(self, finish: Finish, event: bytes | None = None) -> None:
        self.finish = finish
        if self._transport is not None:
            write_chunk(self._transport, event or self._answer.event(self.tokens, finish))
            write_chunk(self._transport, DONE)
        if not self.done.done():
            document = b"" if self.is_stream else self._answer.document(self.tokens, finish)
            self.done.set_result(document)
        self._on_end(self)


def write_chunk(transport: asyncio.WriteTransport, chunk: bytes) -> None:
    """Send one chunk of a chunked response, unless the client is gone."""
    if not transport.is_closing():
        transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
