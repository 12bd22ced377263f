"""Asks a server to drop requests that nobody waits for any longer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing

from runner.clock import Clock
from runner.load.api import encode, post
from runner.load.client import Address, Connection
from runner.load.reply import Reply
from runner.load.totals import Totals

DEADLINE_S = 5.0  # of the wall


async def abort(
    address: Address, clock: Clock, key: str | None, request_ids: Sequence[str] | None
) -> None:
    """Drop these requests, or everything (None). One that cannot answer is found out elsewhere."""
    bodies: list[dict[str, object]] = [{"rid": "", "abort_all": True}]
    if request_ids is not None:
        bodies = [{"rid": each} for each in request_ids]
    path = f"{address.prefix}/abort_request"
    try:
        async with asyncio.timeout(DEADLINE_S):
            connection = await Connection.open(address, clock)
            with closing(connection):
                for body in bodies:
                    connection.begin(post(address.name, path, encode(body), key), Reply(Totals()))
                    await connection.end()
    except (OSError, TimeoutError):
        return
