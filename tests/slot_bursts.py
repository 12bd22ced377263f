"""How bursts fill the slots of a server: what a real one did, and how to see it in a log.

The sequences are those of SGLang 0.5.23 on CPU (pp_size 2, pp_async_batch_depth 2,
max_running_requests 16): the lines of rank PP0, P new/running/queue and D running/queue.
"""

from __future__ import annotations

import re
import socket

BURSTS = (
    (8, 8, "P1/0/0 P7/0/0 D1/0 D7/0 D1/0 D7/0"),
    (4, 8, "P1/0/0 P4/0/0 P3/0/0 D1/0 D4/0 D3/0 D1/0 D4/0 D3/0"),
    (2, 8, "P1/0/1 P2/0/0 P2/0/0 P2/0/0 P1/1/0 D2/0 D2/0 D2/0"),
    (1, 8, "P1/0/4 P1/0/4 P1/0/4 P1/0/4 D1/4 D1/4 D1/4"),
    (4, 12, "P1/0/0 P4/0/0 P4/0/0 P3/0/0 D1/0 D4/0 D4/0 D3/0"),
)
"""Cap, requests of the burst, and how its sequence begins."""

PREFILL = re.compile(r"PP0\] Prefill .*#new-seq: (\d+).*#running-req: (\d+), #queue-req: (\d+)")
DECODE = re.compile(r"PP0\] Decode .*#running-req: (\d+).*#queue-req: (\d+)")


def send_at_once(port: int, body: bytes, count: int) -> None:
    """The same request on `count` open connections, one right after the other; waits for all."""
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sockets = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(count)]
    for connection in sockets:
        connection.sendall(head.encode() + body)
    for connection in sockets:
        with connection, connection.makefile("rb") as answer:
            assert answer.read().startswith(b"HTTP/1.1 200")


def sequence(log: str) -> str:
    """The batches of rank PP0, in order."""
    words: list[str] = []
    for line in log.splitlines():
        if prefill := PREFILL.search(line):
            words.append("P" + "/".join(prefill.groups()))
        elif decode := DECODE.search(line):
            words.append("D" + "/".join(decode.groups()))
    return " ".join(words)
