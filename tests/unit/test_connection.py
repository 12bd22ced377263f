"""A connection reads replies however the network cuts them; tried without a network."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.clock import Clock
from runner.load import null_server
from runner.load.client import Connection, size_line
from runner.load.reply import Reply
from runner.load.totals import Totals
from tests.scripted_server import DONE, END, HEAD, chunk, event

TOKENS = 6
TRAILERS = b"0\r\nx-took: 3 ms\r\nx-also: y\r\n\r\n"


def crlf(data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


EVENTS = [event(count, TOKENS) for count in range(1, TOKENS + 1)]
BARE = b"".join(EVENTS) + DONE
FAILED = b'data: {"error":{"message":"lost a rank"}}\n\n'
CHUNKS = [*map(chunk, EVENTS), chunk(DONE) + END]
HALVES = [chunk(half) for each in EVENTS for half in (each[:60], each[60:])]
# Each as the reads in which a server's writes would come.
WRITES = {
    "one event a chunk": [HEAD, *CHUNKS],
    "several events a chunk": [
        *(HEAD, CHUNKS[0], chunk(b"".join(EVENTS[1:4])), chunk(EVENTS[4] + EVENTS[5] + DONE), END)
    ],
    "events over chunks": [
        HEAD,
        *(chunk(BARE[at : at + 99]) for at in range(0, len(BARE), 99)),
        END,
    ],
    "events in two chunks": [HEAD, *HALVES, chunk(DONE) + END],
    "several tokens an event": [HEAD, CHUNKS[0], CHUNKS[5], CHUNKS[6]],
    "an event without tokens": [HEAD, CHUNKS[0], CHUNKS[0], CHUNKS[5], CHUNKS[6]],
    "trailing headers": [HEAD, *CHUNKS[:6], chunk(DONE), TRAILERS],
    "windows line ends": [HEAD, *(chunk(crlf(each)) for each in [*EVENTS, DONE]), END],
    "an error inside": [HEAD, CHUNKS[0], chunk(FAILED), CHUNKS[6]],
    "an error in the chunk": [HEAD, CHUNKS[0], chunk(FAILED + EVENTS[1]), CHUNKS[6]],
    "capital sizes": [HEAD, *(b"%X\r\n%s\r\n" % (len(e), e) for e in EVENTS), CHUNKS[6]],
    "chunk extensions": [HEAD, *(b"%x;a=b\r\n%s\r\n" % (len(e), e) for e in EVENTS), CHUNKS[6]],
    "a comment": [HEAD, chunk(b": ping\n\n"), *CHUNKS],
    "a chunk in a chunk": [
        *(HEAD, CHUNKS[0], b"%x\r\n" % len(CHUNKS[1]), CHUNKS[1], b"\r\n"),
        *CHUNKS[2:],
    ],
    "known length": [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BARE), BARE],
    "refused": [
        b"HTTP/1.1 503 Busy\r\ncontent-length: 31\r\n\r\n",
        b'{"error":{"message":"no room"}}',
    ],
    "completions": null_server.writes_of(null_server.openai_events(TOKENS, is_chat=False), 1),
    "chat": null_server.writes_of(null_server.openai_events(TOKENS, is_chat=True), 2),
}
CAPTURED = {name: b"".join(writes) for name, writes in WRITES.items()}


class Wire(asyncio.Transport):
    """A transport that leads nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        pass

    def is_closing(self) -> bool:
        return self.is_over

    def close(self) -> None:
        self.is_over = True

    abort = close


@dataclass(frozen=True)
class Read:
    """What a connection made of a reply; token times are numbers of reads."""

    tokens: int
    answered: int
    error: str | None
    is_done: bool
    usage: tuple[int | None, int]
    is_ended: bool
    is_open: bool


def read(pieces: Sequence[bytes], *, is_lost: bool = False) -> tuple[Read, list[float]]:
    """Receive the pieces one after the other, the clock counting them from 1."""

    async def receive() -> tuple[Read, list[float]]:
        connection, wire, totals = Connection(Clock()), Wire(), Totals()
        reply = Reply(totals)
        connection.connection_made(wire)
        readings = map(float, itertools.count())  # 0 is for the sending
        with patch("runner.load.client.monotonic", readings.__next__):
            connection.begin(b"", reply)
            for piece in pieces:
                connection.data_received(piece)
        if is_lost:
            connection.connection_lost(None)
        is_ended = connection._reply is None  # noqa: SLF001 - `end` would wait for ever
        usage = reply.usage()
        is_open = connection.is_open and not wire.is_over
        assert totals.output_tokens == len(reply.token_s)
        found = Read(
            totals.output_tokens,
            totals.answered,
            reply.error,
            reply.is_done,
            usage,
            is_ended,
            is_open,
        )
        return found, reply.token_s

    return asyncio.run(receive())


def places(whole: bytes) -> st.SearchStrategy[list[int]]:
    """Where to cut; borders of chunks are where a mistake would be, so half are near one."""
    near = [
        place
        for at in range(len(whole))
        if whole[at : at + 2] == b"\r\n"
        for place in range(max(at - 2, 1), min(at + 5, len(whole)))
    ]
    return st.lists(st.integers(1, len(whole) - 1) | st.sampled_from(near), max_size=12)


PLACES = {name: places(whole) for name, whole in CAPTURED.items()}


@st.composite
def cut_replies(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    name = draw(st.sampled_from(sorted(CAPTURED)))
    whole, cuts = CAPTURED[name], sorted(set(draw(PLACES[name])))
    return whole, [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


@pytest.mark.parametrize("name", WRITES)
def test_a_reply_that_comes_as_it_was_written_gives_the_same_record(name: str) -> None:
    assert read(WRITES[name])[0] == read([CAPTURED[name]])[0]


@given(cut_replies())
def test_any_split_of_a_reply_gives_the_same_record(reply: tuple[bytes, list[bytes]]) -> None:
    whole, pieces = reply
    assert read(pieces)[0] == read([whole])[0]


@given(cut_replies())
def test_a_connection_may_be_lost_at_any_byte(reply: tuple[bytes, list[bytes]]) -> None:
    whole, pieces = reply
    found, _ = read(pieces[:-1], is_lost=True)
    again, _ = read([whole[: len(whole) - len(pieces[-1])]], is_lost=True)
    assert found == again
    assert found.is_ended
    assert not found.is_open
    assert found.error is not None or found.is_done


TIMED = ("one event a chunk", "events over chunks", "windows line ends")
# Byte by byte: the number of the read is the place of the byte, so it says where events end.
ENDS = {
    name: read([CAPTURED[name][at : at + 1] for at in range(len(CAPTURED[name]))])[1]
    for name in TIMED
}


@pytest.mark.parametrize("name", TIMED)
@given(st.data())
def test_a_token_has_the_time_of_the_read_that_ended_its_event(
    name: str, data: st.DataObject
) -> None:
    whole = CAPTURED[name]
    cuts = sorted(set(data.draw(PLACES[name])))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    _, times = read(pieces)
    ends = ENDS[name]
    borders = [*cuts, len(whole)]
    expected = [1 + sum(border < end for border in borders) for end in ends]
    assert times == expected


def test_whole_replies_are_read_as_meant() -> None:
    for name in set(WRITES) - {"an error inside", "an error in the chunk", "refused"}:
        found, _ = read([CAPTURED[name]])
        assert (found.tokens, found.answered, found.error, found.is_ended) == (
            TOKENS,
            1,
            None,
            True,
        ), name
        assert found.is_open, name


def test_errors_are_told_whatever_shares_their_chunk() -> None:
    for name in ("an error inside", "an error in the chunk"):
        found, _ = read([CAPTURED[name]])
        assert found.error == "error in the stream: lost a rank", name
    assert read([CAPTURED["refused"]])[0].error == "HTTP 503: no room"


def test_a_second_reply_follows_on_the_same_connection() -> None:
    async def twice() -> list[int]:
        connection, counts = Connection(Clock()), []
        connection.connection_made(Wire())
        for name in ("one event a chunk", "known length", "trailing headers", "chat"):
            reply = Reply(Totals())
            connection.begin(b"", reply)
            whole = CAPTURED[name]
            for at in range(0, len(whole), 150):
                connection.data_received(whole[at : at + 150])
            assert reply.error is None
            counts.append(len(reply.token_s))
        return counts

    assert asyncio.run(twice()) == [TOKENS] * 4


def test_what_is_no_chunk_is_not_valid_http() -> None:
    first, bad = HEAD + chunk(EVENTS[0]), b"9z\r\n" + EVENTS[1] + b"\r\n"
    found, _ = read([first, bad])
    assert found.error is not None
    assert "not valid HTTP" in found.error


def test_a_chunk_before_the_head_of_a_reply_is_not_valid_http() -> None:
    async def twice() -> str | None:
        connection, first, second = Connection(Clock()), Reply(Totals()), Reply(Totals())
        connection.connection_made(Wire())
        connection.begin(b"", first)
        connection.data_received(CAPTURED["one event a chunk"])
        connection.begin(b"", second)
        connection.data_received(CHUNKS[0])
        return second.error

    error = asyncio.run(twice())
    assert error is not None
    assert "not valid HTTP" in error


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 4095, 4096, 65535, 65536, 300_000])
def test_a_size_line_is_found_from_the_length_of_a_chunk(size: int) -> None:
    whole = chunk(b"x" * size)
    assert whole.startswith(size_line(len(whole)))
    assert len(size_line(len(whole))) == len(whole) - size - 2


def test_lengths_that_no_chunk_has_have_no_size_line() -> None:
    assert [total for total in range(30) if size_line(total) == b""] == [0, 1, 2, 3, 4, 5, 21]


def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    async def feed() -> bool:
        connection = Connection(Clock())
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        with theirs:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: connection, sock=ours)
            theirs.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            await loop.sock_recv(theirs, 1)  # until it is closed
        return connection.is_open

    assert asyncio.run(feed()) is False
