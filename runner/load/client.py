"""The wire: a keep-alive HTTP/1.1 connection that times every read of a streamed reply."""

from __future__ import annotations

import asyncio
import re
import ssl
from dataclasses import dataclass, field
from functools import cache
from typing import cast
from urllib.parse import urlsplit

import httptools

from runner.clock import Clock
from runner.errors import ConfigError
from runner.load.api import Api
from runner.load.reply import Reply


@dataclass(frozen=True, slots=True)
class Target:
    """A server to load: which replica it is, and how it is spoken to. `key`: a bearer token."""

    replica: int
    url: str
    api: Api = Api.GENERATE
    model: str = "default"
    key: str | None = field(default=None, repr=False)


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
        if not re.fullmatch(r"[!-~]*", parts.path):
            raise ConfigError(f"{url!r} has a character that no address may have; write it as %XX")
        return cls(parts.hostname, port, parts.path.rstrip("/"), parts.scheme == "https")

    @property
    def name(self) -> str:
        """As the Host header wants it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@cache
def tls_context() -> ssl.SSLContext:
    """The authorities that this machine trusts, or those that SSL_CERT_FILE names."""
    return ssl.create_default_context()


class Connection(asyncio.Protocol):
    """One connection to one server; carries one exchange at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
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
        sent_s = self._clock.now_s()
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
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Stamp and parse one read."""
        self._now_s = self._clock.now_s()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as err:
            if self._reply is not None:
                self._reply.fail(f"the reply is not valid HTTP: {err}")
            self.close()

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

    def on_message_complete(self) -> None:
        """The reply is whole."""
        if self._reply is not None:
            self._reply.complete(self._parser.get_status_code())
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
        self._end()

    def _end(self) -> None:
        self._reply = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


# A lost connection has its own error text; the status adds nothing to it.
_STATUS_OF_LOST = 200
