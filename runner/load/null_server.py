"""A server without a model: every stream gets one prebuilt event per period.

`python -m runner.load.null_server --period 0.02 --tokens 256` prints its port and serves until the
one who started it closes its standard input or dies. It exists so that what is measured against it
is the client; how late it wrote itself is told by GET /report, over the time since the last report.

The events of all streams are due together, once per period, or, with `--slots N`, at N moments
spread over the period. It sends raw bytes from one loop, because a server that is slower than the
client would be what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import socket
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

BUCKETS = 20_000
BUCKET_S = 0.0001
BACKLOG = 4096
READ_BYTES = 1 << 18
STDIN = 0
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
MODEL = "null"
PROMPT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Report:
    """What the server says of itself since the last report; times in wall seconds.

    `late_*`: from the moment an event was due until it was handed to the kernel. `ttft_p50_s`: from
    the moment a request was read until its first event was handed over. `blocked`: writes that a
    client which does not read held up.
    """

    events: int
    blocked: int
    cpu_s: float
    late_p50_s: float
    late_p99_s: float
    late_max_s: float
    ttft_p50_s: float


class Histogram:
    """Durations in buckets of 0.1 ms; what is longer than 2 s counts as 2 s."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = array("q", bytes(8 * (BUCKETS + 1)))

    def add(self, duration_s: float) -> None:
        """Count one duration."""
        self.counts[min(max(int(duration_s / BUCKET_S), 0), BUCKETS)] += 1

    def quantile(self, share: float) -> float:
        """The duration that `share` of those counted do not exceed; 0 without any."""
        left = share * sum(self.counts)
        for bucket, count in enumerate(self.counts):
            left -= count
            if count and left <= 0:
                return (bucket + 0.5) * BUCKET_S
        return 0.0


class Client:
    """One connection; `place` is the next write of the reply it waits for."""

    __slots__ = ("asked_s", "place", "rest", "seen", "send", "sock", "writes")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.send = sock.send
        self.seen = b""
        self.rest = b""
        self.place = -1
        self.asked_s = 0.0
        self.writes: Sequence[bytes] = ()


class NullServer:
    """Serves on a free port of this machine until standard input ends."""

    def __init__(self, period_s: float, tokens: int, slots: int = 1, burst: int = 1) -> None:
        self._tick_s = period_s / slots
        self._slots: list[list[Client]] = [[] for _ in range(slots)]
        self._next_slot = 0
        self._replies = {
            b"/generate": writes_of(generate_events(tokens), burst),
            b"/v1/completions": writes_of(openai_events(tokens, is_chat=False), burst),
            b"/v1/chat/completions": writes_of(openai_events(tokens, is_chat=True), burst),
        }
        self._burst = burst
        self._clients: dict[int, Client] = {}
        self._poller = select.epoll()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self._listener.settimeout(0)
        self._poller.register(self._listener, select.EPOLLIN)
        with suppress(PermissionError):  # a file, not a pipe of the one who started us
            self._poller.register(STDIN, select.EPOLLIN)
        self._is_over = False
        self._reset()

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def serve(self) -> None:
        """Write what is due and read requests in between, until standard input ends."""
        tick, start_s = 0, time.monotonic()
        while not self._is_over:
            due_s = start_s + tick * self._tick_s
            self._read_until(due_s)
            self._write(self._slots[tick % len(self._slots)], due_s)
            tick += 1

    def _read_until(self, due_s: float) -> None:
        while True:
            left_s = due_s - time.monotonic()
            for number, _ in self._poller.poll(max(left_s, 0.0)):
                if number == STDIN:
                    self._is_over = not os.read(STDIN, READ_BYTES)
                elif number == self._listener.fileno():
                    self._accept()
                else:
                    self._read(self._clients[number])
            if left_s <= 0 or self._is_over:
                return

    def _write(self, slot: list[Client], due_s: float) -> None:
        """One write to every client of a slot."""
        late, now = self._late.counts, time.monotonic
        is_any_done = False
        for client in slot:
            place = client.place
            data = client.writes[place]
            if client.rest:
                data = client.rest + data
                client.rest = b""
            try:
                sent = client.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                client.place = -1
                is_any_done = True
                continue
            written_s = now()
            late[min(int((written_s - due_s) / BUCKET_S), BUCKETS)] += 1
            if sent != len(data):
                client.rest = data[sent:]
                self._blocked += 1
            if place == 0:
                self._ttft.add(written_s - client.asked_s)
            client.place = place + 1
            if client.place == len(client.writes):
                client.place = -1
                is_any_done = True
        if is_any_done:
            slot[:] = [client for client in slot if client.place >= 0]

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            sock.settimeout(0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._clients[sock.fileno()] = Client(sock)
            self._poller.register(sock, select.EPOLLIN)

    def _read(self, client: Client) -> None:
        try:
            data = client.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._forget(client)
            return
        data = client.seen + data
        head, end, body = data.partition(b"\r\n\r\n")
        found = LENGTH.search(head)
        if not end or len(body) < (0 if found is None else int(found[1])):
            client.seen = data
            return
        client.seen = b""
        self._answer(client, head.split(b" ", 2)[1])

    def _forget(self, client: Client) -> None:
        del self._clients[client.sock.fileno()]
        client.sock.close()
        if client.place >= 0:
            for slot in self._slots:
                slot[:] = [each for each in slot if each is not client]

    def _answer(self, client: Client, path: bytes) -> None:
        writes = self._replies.get(path)
        if writes is not None:
            client.writes, client.place, client.asked_s = writes, 0, time.monotonic()
            self._slots[self._next_slot].append(client)
            self._next_slot = (self._next_slot + 1) % len(self._slots)
            return
        content: object = {}
        if path == b"/report":
            content = asdict(self._report())
        elif path == b"/v1/models":
            content = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
        body = json.dumps(content).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        try:
            client.sock.sendall(head % len(body) + body)
        except OSError:
            self._forget(client)

    def _reset(self) -> None:
        self._late, self._ttft = Histogram(), Histogram()
        self._blocked = 0
        self._cpu_s = time.process_time()

    def _report(self) -> Report:
        cpu_s = time.process_time() - self._cpu_s
        report = Report(
            events=sum(self._late.counts) * self._burst,
            blocked=self._blocked,
            cpu_s=cpu_s,
            late_p50_s=self._late.quantile(0.5),
            late_p99_s=self._late.quantile(0.99),
            late_max_s=self._late.quantile(1.0),
            ttft_p50_s=self._ttft.quantile(0.5),
        )
        self._reset()
        return report


def generate_events(tokens: int) -> list[dict[str, object]]:
    """SGLang's own events: each repeats all token ids so far."""
    return [
        {
            "output_ids": [17000 + place for place in range(count)],
            "meta_info": {
                "id": "3a6ead7f416a4547aa0ae403f47e0ea9",
                "finish_reason": {"type": "length", "length": tokens} if count == tokens else None,
                "prompt_tokens": PROMPT_TOKENS,
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
            },
        }
        for count in range(1, tokens + 1)
    ]


def openai_events(tokens: int, *, is_chat: bool) -> list[dict[str, object]]:
    """Events of an OpenAI-like interface, the usage so far in each."""
    events: list[dict[str, object]] = []
    for count in range(1, tokens + 1):
        choice: dict[str, object] = {"index": 0, "logprobs": None, "matched_stop": None}
        choice |= {"delta": {"content": " a"}} if is_chat else {"text": " a"}
        choice["finish_reason"] = "length" if count == tokens else None
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": count}
        event: dict[str, object] = {"id": "3a6ead7f416a4547aa0ae403f47e0ea9"}
        event["object"] = "chat.completion.chunk" if is_chat else "text_completion"
        event |= {"created": 1795959812, "model": MODEL, "choices": [choice]}
        events.append(event | {"usage": usage | {"total_tokens": PROMPT_TOKENS + count}})
    return events


def writes_of(events: Sequence[object], burst: int) -> list[bytes]:
    """A reply as the writes it takes: `burst` events each, the head before, the end mark after."""
    chunks = [
        _chunk(b"data: %s\n\n" % json.dumps(event, separators=(",", ":")).encode())
        for event in events
    ]
    chunks[0] = STREAM_HEAD + chunks[0]
    chunks[-1] += _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return [b"".join(chunks[place : place + burst]) for place in range(0, len(chunks), burst)]


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def main() -> None:
    """Print the port, then serve."""
    parser = argparse.ArgumentParser(prog="python -m runner.load.null_server")
    parser.add_argument("--period", type=float, default=0.02, help="seconds between two events")
    parser.add_argument("--tokens", type=int, default=256, help="events of a reply")
    parser.add_argument("--slots", type=int, default=1, help="moments a period is divided into")
    parser.add_argument("--burst", type=int, default=1, help="events per write")
    given = parser.parse_args()
    server = NullServer(given.period, given.tokens, given.slots, given.burst)
    print(server.port, flush=True)
    server.serve()


if __name__ == "__main__":
    main()
