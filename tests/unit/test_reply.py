from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.load.reply import Reply
from runner.load.totals import Totals

DONE = b"data: [DONE]\n\n"


def event(
    count: int, finish: object = None, cached: int = 0, ids: int = 1, spaced: bool = False
) -> bytes:
    meta = {
        "id": "a",
        "finish_reason": finish,
        "prompt_tokens": 16,
        "completion_tokens": count,
        "cached_tokens": cached,
    }
    body = {"output_ids": list(range(ids)), "meta_info": meta}
    text = json.dumps(body) if spaced else json.dumps(body, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


DATA = Path(__file__).parents[1] / "data" / "sse"
LENGTH = {"type": "length", "length": 6}


def read(*pieces: bytes, status: int = 200) -> tuple[Reply, Totals]:
    """Feed each piece one second after the other."""
    totals = Totals()
    reply = Reply(totals)
    for place, piece in enumerate(pieces):
        reply.feed(piece, float(place + 1))
    reply.complete(status)
    return reply, totals


@pytest.mark.parametrize("spaced", [False, True])
def test_tokens_are_counted_by_the_usage_field(*, spaced: bool) -> None:
    # Three chunks that carry 1, 3 and 2 tokens.
    reply, totals = read(
        event(1, spaced=spaced), event(4, spaced=spaced), event(6, LENGTH, spaced=spaced), DONE
    )
    assert reply.error is None
    assert reply.token_s == [1.0, 2.0, 2.0, 2.0, 3.0, 3.0]
    assert totals.output_tokens == 6
    assert reply.last_s == 4.0


def test_several_events_in_one_read_share_its_time() -> None:
    reply, _ = read(event(1) + event(2) + event(3, LENGTH) + DONE)
    assert reply.error is None
    assert reply.token_s == [1.0, 1.0, 1.0]


@given(st.lists(st.integers(1, 400), max_size=8))
def test_reads_may_split_events_anywhere(cuts: list[int]) -> None:
    whole = event(1) + event(4) + event(6, LENGTH) + DONE
    edges = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    pieces = [whole[left:right] for left, right in itertools.pairwise(edges)]
    reply, _ = read(*pieces)
    assert reply.error is None
    assert len(reply.token_s) == 6
    assert reply.token_s == sorted(reply.token_s)


def test_long_events_are_read() -> None:
    long = event(2, LENGTH, ids=100_000)
    assert len(long) > 500_000
    reply, _ = read(event(1), *(long[at : at + 65536] for at in range(0, len(long), 65536)), DONE)
    assert reply.error is None
    assert len(reply.token_s) == 2


def test_generated_text_cannot_fake_a_count() -> None:
    body = {"text": '"completion_tokens":99, "error": "no"', "meta_info": {"completion_tokens": 1}}
    reply, _ = read(f"data: {json.dumps(body)}\n\n".encode(), event(2, LENGTH), DONE)
    assert reply.error is None
    assert len(reply.token_s) == 2


def test_usage_of_generate() -> None:
    reply, _ = read(event(6, LENGTH, cached=12), DONE)
    assert reply.usage() == (16, 12)


def test_error_inside_the_stream_fails_the_request() -> None:
    error = b'data: {"error":{"message":"queue is full","type":"x","code":503}}\n\n'
    reply, totals = read(event(1), error, DONE)
    assert reply.error == "error in the stream: queue is full"
    assert totals.output_tokens == 1


@pytest.mark.parametrize(
    ("pieces", "status", "error"),
    [
        ((event(1), event(6, LENGTH)), 200, "the stream ended without [DONE]"),
        ((event(1), DONE), 200, "the stream ended without a finish reason"),
        ((event(6, {"type": "abort"}), DONE), 200, "the server finished the request with 'abort'"),
        ((b'{"error":{"message":"bad ids"}}',), 400, "HTTP 400: bad ids"),
        ((b'{"object":"error","message":"no template"}',), 400, "HTTP 400: no template"),
        ((b"Internal Server Error",), 500, "HTTP 500: Internal Server Error"),
        ((), 503, "HTTP 503: (no text)"),
        ((b'data: {"completion_tokens":null}\n\n', DONE), 200, "a token count cannot be read"),
    ],
)
def test_what_makes_a_request_fail(pieces: tuple[bytes, ...], status: int, error: str) -> None:
    reply, _ = read(*pieces, status=status)
    assert reply.error is not None
    assert reply.error.startswith(error)


def openai_event(count: int, finish: str | None, *, is_last: bool = False) -> bytes:
    choices = [] if is_last else [{"index": 0, "text": " t", "finish_reason": finish}]
    usage = {
        "prompt_tokens": 16,
        "completion_tokens": count,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


def test_openai_streams_finish_before_their_last_count() -> None:
    reply, _ = read(
        openai_event(1, None),
        openai_event(2, None),
        openai_event(3, "length"),
        openai_event(3, None, is_last=True),
        DONE,
    )
    assert reply.error is None
    assert reply.token_s == [1.0, 2.0, 3.0]
    assert reply.usage() == (16, 5)


def test_a_captured_stream_is_read() -> None:
    captured = (DATA / "generate-0.5.23.sse").read_bytes()
    reply, _ = read(*captured.splitlines(keepends=True))
    assert reply.error is None
    assert len(reply.token_s) == 3
    assert reply.usage() == (4, 3)


def test_a_count_beyond_all_reason_fails_its_request() -> None:
    for digits in (b"9" * 5000, b"1000000000"):
        total = Totals()
        reply = Reply(total)
        reply.feed(b'data: {"meta_info":{"completion_tokens":' + digits + b"}}\n\n", 1.0)
        assert reply.error is not None
        assert reply.error.startswith("a token count cannot be read: data: ")
        assert total.output_tokens == 0
