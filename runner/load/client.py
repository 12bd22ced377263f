"""The wire: a keep-alive HTTP/1.1 connection that times every read of a streamed reply.

httptools parses the replies. But nearly every read of a long stream is one whole chunk that holds
one whole event: where the parser stands between two chunks, such a read is recognised by its bytes
and passed on without it. That leaves the parser's state as it is.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from dataclasses import dataclass, field
from functools import cache
from time import monotonic
from typing import cast
from urllib.parse import urlsplit

import httptools

from runner.clock import Clock
from runner.errors import ConfigError
from runner.load.api import Api
from runner.load.reply import Reply


@dataclass(frozen=True, slots=True)
class Target:
    """A server to load: which replica it is, and how it is spoken to. `key`: a bearer token.

    `vocabulary`: how many tokens its model has; None: not known.
    """

    replica: int
    url: str
    api: Api = Api.GENERATE
    model: str = "default"
    key: str | None = field(default=None, repr=False)
    vocabulary: int | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """Where a target listens. `prefix` is the path in front of the interface's own."""

    host: str
    port: int
    prefix: str
    is_secure: bool = False

    @classmethod
    def of(cls, url: str) -> Address:
        """Split a URL; raises ConfigError for anything but http[s]://HOST[:PORT][/PATH]."""
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as err:
            raise ConfigError(f"{url!r} is no server address: {err}") from err
        if parts.username is not None or parts.password is not None:
            raise ConfigError(
                f"the address of {parts.hostname} has a user name or password in it, which is no "
                "part of a server address; write http://HOST:PORT or https://HOST:PORT"
            )
        is_more = parts.query or parts.fragment
        if parts.scheme not in {"http", "https"} or not parts.hostname or is_more:
            raise ConfigError(
                f"{url!r} is no server address; write http://HOST:PORT or https://HOST:PORT"
            )
        if not re.fullmatch(r"[!-~]*", parts.path + parts.hostname):
            raise ConfigError(f"{url!r} has a character that no address may have; write it as %XX")
        return cls(parts.hostname, port, parts.path.rstrip("/"), parts.scheme == "https")

    @property
    def name(self) -> str:
        """As the Host header wants it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


FIRST_FINAL_STATUS = 200
EVENT_AND_CHUNK_END = b"\n\n\r\n"


@cache
def tls_context() -> ssl.SSLContext:
    """The authorities that this machine trusts, or those that SSL_CERT_FILE names."""
    return ssl.create_default_context()


class Connection(asyncio.Protocol):
    """One connection to one server; carries one exchange at a time."""

    __slots__ = (
        "_ended",
        "_is_between_chunks",
        "_loop",
        "_now_s",
        "_parser",
        "_reply",
        "_scale",
        "_transport",
    )

    def __init__(self, clock: Clock) -> None:
        self._scale = clock.scale
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._is_between_chunks = False
        self._reply: Reply | None = None
        self._ended: asyncio.Future[None] | None = None
        self._now_s = 0.0

    @classmethod
    async def open(cls, address: Address, clock: Clock) -> Connection:
        """Connect; raises OSError."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: cls(clock),
            address.host,
            address.port,
            ssl=tls_context() if address.is_secure else None,
        )
        return connection

    @property
    def is_open(self) -> bool:
        """Whether another exchange can begin."""
        return self._transport is not None and not self._transport.is_closing()

    def begin(self, request: bytes, reply: Reply) -> float:
        """Send a request; returns the time of sending.

        What goes wrong from here on is noted in the reply, nothing is raised.
        """
        self._reply = reply
        self._ended = self._loop.create_future()
        sent_s = monotonic() * self._scale
        if self._transport is None:
            reply.fail("the connection was closed before the request was sent")
            self._end()
        else:
            self._transport.write(request)
        return sent_s

    async def end(self) -> None:
        """Wait for the end of the exchange that was begun."""
        if self._ended is not None:
            await self._ended

    def close(self) -> None:
        """Close at once; a running exchange ends as failed."""
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, and let it write at once instead of at the end of a turn."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(0)

    def data_received(self, data: bytes) -> None:
        """Stamp and parse one read."""
        now_s = monotonic() * self._scale
        if self._reply is None:  # nobody asked: what follows would be taken for the next reply
            self.close()
            return
        if self._is_between_chunks and data.endswith(EVENT_AND_CHUNK_END):
            line = size_line(len(data))
            start, end = len(line), len(data) - len(EVENT_AND_CHUNK_END)
            is_lone = data.startswith(line) and data.find(b"\n", start) == end
            if is_lone and self._reply is not None:
                self._reply.feed_event(data[start:end], now_s)
                return
        self._now_s = now_s
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as err:
            if self._reply is not None:
                self._reply.fail(f"the reply is not valid HTTP: {err}")
            self.close()
        if self._is_between_chunks:
            # The parser tells of whole size lines only; the start of one is not between chunks.
            self._is_between_chunks = data.endswith(b"\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        """Without a reply in progress this is a server ending an idle connection."""
        self._transport = None
        if self._reply is not None:
            if not self._reply.is_done:
                cause = f": {exc}" if exc else ""
                self._reply.fail(f"the connection was closed before the reply ended{cause}")
            self._reply.complete(_STATUS_OF_LOST)
            self._end()

    # Called by the parser.

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body."""
        if self._reply is not None:
            self._reply.feed(body, self._now_s)

    def on_chunk_header(self) -> None:
        """A chunk has begun."""
        self._is_between_chunks = False

    def on_chunk_complete(self) -> None:
        """A chunk has ended."""
        self._is_between_chunks = True

    def on_message_complete(self) -> None:
        """The reply is whole."""
        self._is_between_chunks = False
        status = self._parser.get_status_code()
        if status < FIRST_FINAL_STATUS:  # such as 103: the reply itself is still to come
            return
        if self._reply is not None:
            self._reply.complete(status)
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
        self._end()

    def _end(self) -> None:
        self._reply = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


# A lost connection has its own error text; the status adds nothing to it.
_STATUS_OF_LOST = 200


@cache
def size_line(total: int) -> bytes:
    """The size line of a chunk that is `total` bytes long with its line and its line end.

    As servers write it: no leading zero, small letters, no extension. Empty if there is none.
    """
    for digits in range(1, 16):
        content = total - digits - 4
        if content > 0 and len(line := b"%x\r\n" % content) == digits + 2:
            return line
    return b""
