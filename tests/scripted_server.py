"""A small HTTP server whose replies are written by the test: real sockets, any misbehaviour."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeAlias

Body: TypeAlias = dict[str, Any]
Script: TypeAlias = Callable[[int, Body], AsyncIterator[bytes]]
"""Called with the number of the request and its body; what it yields is sent as it is.

A script that raises ConnectionAbortedError closes the connection there.
"""

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One piece of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(count: int, wanted: int, prompt: int = 8, cached: int = 0) -> bytes:
    """SGLang's event after `count` of `wanted` tokens."""
    meta = {
        "finish_reason": {"type": "length", "length": wanted} if count == wanted else None,
        "prompt_tokens": prompt,
        "completion_tokens": count,
        "cached_tokens": cached,
    }
    body = {"output_ids": list(range(count)), "meta_info": meta}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def wanted_of(body: Body) -> int:
    """How many tokens a /generate request asks for."""
    tokens: int = body["sampling_params"]["max_new_tokens"]
    return tokens


async def plain_reply(_: int, body: Body) -> AsyncIterator[bytes]:
    """All tokens, one event each, with a moment between them."""
    wanted = wanted_of(body)
    yield HEAD
    for count in range(1, wanted + 1):
        yield chunk(event(count, wanted))
        await asyncio.sleep(0.002)
    yield chunk(DONE) + END


SETTLE_S = 0.02


class ScriptedServer:
    """Serves in a thread of its own for as long as the `with` block lasts."""

    def __init__(
        self,
        script: Script = plain_reply,
        pages: Mapping[str, bytes] = MappingProxyType({}),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`pages` are whole answers to GET by path; all others are not found."""
        self._script = script
        self._pages = pages
        self._tls = tls
        self.heads: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._is_up = threading.Event()
        self.url = ""
        self.requests: list[tuple[str, Body]] = []
        self.aborts: list[Body] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.connections = 0
        self._writers: list[asyncio.StreamWriter] = []

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_up.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stopped = asyncio.Event()
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0, backlog=1024, ssl=self._tls)
        scheme = "http" if self._tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._is_up.set()
        await self._stopped.wait()
        # A server that is closed between accepting a connection and having it leaves it open.
        await asyncio.sleep(SETTLE_S)
        server.close()
        await asyncio.sleep(SETTLE_S)  # what was just accepted is known then
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(SETTLE_S)  # and gone before the loop ends

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split()[1]
                self.heads.append(head)
                if head.startswith("GET"):
                    writer.write(self._pages.get(path, NOT_FOUND))
                    continue
                length = int(head.lower().partition("content-length:")[2].split()[0])
                body = json.loads(await reader.readexactly(length))
                if path.endswith("/abort_request"):
                    self.aborts.append(body)
                    writer.write(EMPTY)
                else:
                    await self._answer(path, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: Body, writer: asyncio.StreamWriter) -> None:
        number = len(self.requests)
        self.requests.append((path, body))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            async for piece in self._script(number, body):
                writer.write(piece)
                await writer.drain()
        finally:
            self.in_flight -= 1
