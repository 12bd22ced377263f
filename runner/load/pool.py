"""Open connections to one server, so that a request never waits for a handshake."""

from __future__ import annotations

import asyncio

from runner.clock import Clock
from runner.load.client import Address, Connection


class Pool:
    """Idle connections to one address; the one used last is taken first.

    A server ends connections that idle for seconds; the one used last is the least likely to be
    ended while we take it.
    """

    def __init__(self, address: Address, clock: Clock) -> None:
        self.address = address
        self._clock = clock
        self._idle: list[Connection] = []

    async def fill(self, count: int) -> None:
        """Open connections until `count` are idle; raises OSError."""
        missing = [Connection.open(self.address, self._clock) for _ in range(count - self.idle)]
        opened = await asyncio.gather(*missing, return_exceptions=True)
        self._idle.extend(each for each in opened if isinstance(each, Connection))
        for each in opened:
            if isinstance(each, BaseException):
                raise each

    @property
    def idle(self) -> int:
        """How many connections wait for use."""
        self._idle = [connection for connection in self._idle if connection.is_open]
        return len(self._idle)

    async def take(self) -> Connection:
        """An open connection, a new one if none is idle; raises OSError."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return await Connection.open(self.address, self._clock)

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for the next request, if the server has not ended it."""
        if connection.is_open:
            self._idle.append(connection)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
