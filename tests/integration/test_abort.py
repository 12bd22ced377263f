"""Telling a server to drop requests, when it does not answer."""

from __future__ import annotations

import asyncio

import pytest

from runner.clock import Clock
from runner.load import abort as abort_module
from runner.load.client import Address


def test_a_server_that_does_not_answer_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abort_module, "DEADLINE_S", 0.2)

    async def ask() -> bytes:
        heard: asyncio.Queue[bytes] = asyncio.Queue()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await heard.put(await reader.read(4096))
                await heard.put(await reader.read(4096))
            except ConnectionResetError:
                await heard.put(b"")
            writer.close()

        async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
            address = Address("127.0.0.1", server.sockets[0].getsockname()[1], "")
            await abort_module.abort(address, Clock(), None, ["one"])
            assert b"/abort_request" in await heard.get()
            return await asyncio.wait_for(heard.get(), 10)

    assert asyncio.run(ask()) == b""
