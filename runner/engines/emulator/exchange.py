"""One HTTP exchange: the replies to everything that one call asked for, and how it ends.

A call asks for one continuation, or for several of them: a batch of prompts, `n` samples of each.
Each one is a request of its own to the scheduler; their events share the call's stream, and the
call is over when the last of them is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runner.engines.emulator.answers import DONE, Finish


@dataclass(frozen=True, slots=True)
class Part:
    """One continuation that has ended."""

    tokens: int
    finish: Finish


class Form(Protocol):
    """What a route says of an exchange as a whole."""

    def closing(self, parts: Sequence[Part]) -> bytes:
        """The events between the last token of a stream and its [DONE]."""
        ...

    def document(self, parts: Sequence[Part]) -> bytes:
        """The answer without a stream."""
        ...


class Exchange:
    """A stream when it has a transport, else one document at the end (the result of `done`).

    Chunks go to the transport directly, framed by hand: a web framework's write costs more per
    token than all the rest of the server.
    """

    def __init__(self, form: Form, count: int, transport: asyncio.WriteTransport | None) -> None:
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._form = form
        self._transport = transport
        self._parts: list[Part | None] = [None] * count
        self._has_failed = False

    @property
    def is_stream(self) -> bool:
        return self._transport is not None

    @property
    def is_client_gone(self) -> bool:
        """Whether the stream's connection is closed."""
        return self._transport is not None and self._transport.is_closing()

    def fail(self, event: bytes) -> None:
        """Send an event that tells of an error; nothing but [DONE] follows at the end."""
        self._has_failed = True
        self.send(frame(event))

    def send(self, framed: bytes) -> None:
        """Send a framed event, if anybody reads events here and is still there."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(framed)

    def end_part(self, index: int, part: Part) -> None:
        """One more continuation has ended; the exchange ends with the last."""
        self._parts[index] = part
        parts = [ended for ended in self._parts if ended is not None]
        if len(parts) < len(self._parts):
            return
        if self._transport is not None:
            closing = b"" if self._has_failed else self._form.closing(parts)
            if closing:
                write_chunk(self._transport, closing)
            write_chunk(self._transport, DONE)
        if not self.done.done():
            self.done.set_result(b"" if self.is_stream else self._form.document(parts))


def frame(chunk: bytes) -> bytes:
    """One chunk of a chunked response."""
    return b"%x\r\n%b\r\n" % (len(chunk), chunk)


def write_chunk(transport: asyncio.WriteTransport, chunk: bytes) -> None:
    """Send one chunk of a chunked response, unless the client is gone."""
    if not transport.is_closing():
        transport.write(frame(chunk))
