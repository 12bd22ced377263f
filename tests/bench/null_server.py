"""A server without a model: every stream gets one prebuilt SGLang event per period.

Run as a program it prints its port. It does as little as possible, so that what is measured
against it is the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import cast

import uvloop

TOKENS = 256


def events(tokens: int) -> list[bytes]:
    """The HTTP chunks of one reply: SGLang's cumulative events and the end mark."""
    chunks = []
    for count in range(1, tokens + 1):
        meta = {
            "id": "3a6ead7f416a4547aa0ae403f47e0ea9",
            "finish_reason": {"type": "length", "length": tokens} if count == tokens else None,
            "prompt_tokens": 256,
            "weight_version": "default",
            "num_retractions": 0,
            "forward_entry_time": 1795959812.5918777,
            "prefill_finished_time": 1795959812.6121235,
            "queue_time": 0.00026679039001464844,
            "reasoning_tokens": 0,
            "completion_tokens": count,
            "cached_tokens": 0,
            "cached_tokens_details": None,
            "dp_rank": None,
        }
        event = {"output_ids": [17000 + place for place in range(count)], "meta_info": meta}
        chunks.append(_chunk(b"data: " + json.dumps(event, separators=(",", ":")).encode()))
    return [*chunks, _chunk(b"data: [DONE]") + b"0\r\n\r\n"]


def _chunk(event: bytes) -> bytes:
    return b"%x\r\n%s\n\n\r\n" % (len(event) + 2, event)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ABORTED = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class NullStream(asyncio.Protocol):
    """One connection; the request's body is skipped."""

    streams: set[NullStream] = set()  # noqa: RUF012 - shared on purpose: one timer serves all

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.seen = b""
        self.place = 0

    def data_received(self, data: bytes) -> None:
        self.seen += data
        head, _, body = self.seen.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if len(body) < length:
            return
        self.seen = b""
        if head.startswith(b"POST /abort_request"):
            self.transport.write(ABORTED)
            return
        self.place = 0
        self.transport.write(HEAD)
        self.streams.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.streams.discard(self)

    def advance(self, chunks: list[bytes]) -> None:
        self.transport.write(chunks[self.place])
        self.place += 1
        if self.place == len(chunks):
            self.streams.discard(self)


async def serve(period_s: float, tokens: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(NullStream, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201 - read by the parent
    chunks = events(tokens)
    due_s = loop.time()
    while True:
        due_s += period_s
        await asyncio.sleep(max(due_s - loop.time(), 0))
        for stream in tuple(NullStream.streams):
            stream.advance(chunks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--period", type=float, default=0.02)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.period, arguments.tokens))
