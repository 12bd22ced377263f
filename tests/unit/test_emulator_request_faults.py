"""What faults do to a request: each strategy alone, and what our own reader makes of it."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from runner.engines.emulator.answers import (
    LENGTH,
    Answer,
    GenerateAnswer,
    GenerateOptions,
    Place,
    RequestTimes,
)
from runner.engines.emulator.faults.active import ActiveFaults
from runner.engines.emulator.faults.chunks import ChunkedSink
from runner.engines.emulator.faults.counts import MiscountedAnswer
from runner.engines.emulator.faults.fault import parse_faults
from runner.engines.emulator.faults.garbled import GarbledAnswer
from runner.engines.emulator.faults.ghosts import Ghosts
from runner.engines.emulator.faults.ports import check_port
from runner.engines.emulator.faults.requests import RequestFaults
from runner.engines.emulator.faults.silence import BudgetedSink, TokenBudget
from runner.engines.emulator.faults.stream_errors import EVENT
from runner.engines.emulator.serving import Demand
from runner.load.reply import Reply
from runner.load.totals import Totals

DONE = b"data: [DONE]\n\n"


@dataclass
class Sink:
    """Keeps what it is given."""

    tokens: list[int] = field(default_factory=list)

    def prepare(self, completion_tokens: int, *, is_last: bool) -> None:
        del completion_tokens, is_last

    def deliver(self, completion_tokens: int, now_s: float, *, is_last: bool) -> None:
        del now_s, is_last
        self.tokens.append(completion_tokens)


def generate_answer(*, is_incremental: bool = False) -> GenerateAnswer:
    options = GenerateOptions(has_text=True, is_incremental=is_incremental, has_times=False)
    return GenerateAnswer("r", 4, 0, RequestTimes(0.0, 0.0), options, Place())


def client_reads(answer: Answer, tokens: int) -> Reply:
    """Our own client, fed with a whole stream, one event a second."""
    reply = Reply(Totals())
    for count in range(1, tokens + 1):
        reply.feed(answer.event(count, LENGTH if count == tokens else None), float(count))
    reply.feed(DONE, float(tokens + 1))
    reply.complete(200)
    return reply


def request_faults(text: str) -> RequestFaults:
    faults = parse_faults(text, ())
    return RequestFaults(ActiveFaults.choose(faults, 0, "launch 1", {}), lambda: None)


@pytest.mark.parametrize("is_incremental", [False, True])
def test_an_answer_without_a_fault_is_read_as_it_is(*, is_incremental: bool) -> None:
    reply = client_reads(generate_answer(is_incremental=is_incremental), 6)
    assert reply.error is None
    assert len(reply.token_s) == 6


@pytest.mark.parametrize("extra", [-3, -1, 1, 2])
def test_a_last_count_that_does_not_fit_its_ids_fails_the_request(extra: int) -> None:
    reply = client_reads(MiscountedAnswer(generate_answer(), extra), 6)
    counted = max(6 + extra, 5)  # a count that falls is no news; the one before it stands
    assert reply.error == f"the server counts {counted} tokens but has sent 6"


@pytest.mark.parametrize("tokens", [1, 2])
def test_the_shortest_answers_cannot_be_checked_and_are_not(tokens: int) -> None:
    assert client_reads(generate_answer(is_incremental=True), tokens).error is None


@pytest.mark.parametrize("is_incremental", [False, True])
@pytest.mark.parametrize("position", [0, 2, 5])
def test_one_token_of_a_garbled_answer_is_another(position: int, *, is_incremental: bool) -> None:
    right = generate_answer(is_incremental=is_incremental)
    garbled = GarbledAnswer(generate_answer(is_incremental=is_incremental), position)
    for count in range(1, 7):
        finish = LENGTH if count == 6 else None
        events = right.event(count, finish), garbled.event(count, finish)
        is_inside = count == position + 1 if is_incremental else count > position
        assert (events[0] != events[1]) is is_inside
    assert client_reads(garbled, 6).error is None


def test_an_error_event_fails_the_request_that_had_a_200() -> None:
    reply = Reply(Totals())
    for piece in (generate_answer().event(1, None), EVENT, DONE):
        reply.feed(piece, 1.0)
    reply.complete(200)
    assert reply.error == (
        "error in the stream: Internal server error (an emulated fault)"  # the server's words
    )


def test_chunks_take_turns_and_the_last_token_takes_the_rest_along() -> None:
    sink = Sink()
    chunked = ChunkedSink(sink, (1, 3, 2))
    for count in range(1, 12):
        chunked.deliver(count, 0.0, is_last=count == 11)
    assert [b - a for a, b in pairwise([0, *sink.tokens])] == [1, 3, 2, 1, 3, 1]


def test_tokens_of_all_requests_count_to_the_silence() -> None:
    stops: list[str] = []
    budget = TokenBudget(5, lambda: stops.append("stop"))
    sinks = BudgetedSink(Sink(), budget), BudgetedSink(Sink(), budget)
    for count in (1, 2):
        for sink in sinks:
            sink.deliver(count, 0.0, is_last=False)
    assert stops == []
    for sink in sinks:
        sink.deliver(3, 0.0, is_last=False)
    assert stops == ["stop"]


def test_requests_that_are_answered_count_to_the_silence() -> None:
    stops: list[int] = []
    faults = ActiveFaults.choose(parse_faults("stop-sending:2", ()), 0, "", {})
    requests = RequestFaults(faults, lambda: stops.append(1))
    for answered in (1, 2, 3):
        requests.on_answered(answered)
    assert stops == [1]


def test_no_more_ghosts_than_asked_for() -> None:
    (fault,) = parse_faults("ghost-requests:2", ())
    ghosts = Ghosts(fault)
    assert [ghosts.keep(name) for name in ("a", "b", "c", "a")] == [True, True, False, True]
    assert "a" in ghosts
    assert not Ghosts(None).keep("a")


def test_a_short_output_keeps_one_token() -> None:
    faults = request_faults("short-output:5")
    assert faults.demand(Demand(4, 12)).output_tokens == 7
    assert faults.demand(Demand(4, 3)).output_tokens == 1
    assert faults.demand(Demand(4, 1)).output_tokens == 1


def test_cached_prompts_leave_one_token_to_prefill() -> None:
    assert request_faults("cached-prompts").cached_tokens(0, 16) == 15
    assert request_faults("none").cached_tokens(3, 16) == 3


def test_a_port_is_taken_in_the_first_attempts_only() -> None:
    (always,), (once,) = parse_faults("port-taken", ()), parse_faults("port-taken:1", ())
    check_port(None, 1, "127.0.0.1", 3000)
    check_port(once, 2, "127.0.0.1", 3000)
    for fault, attempt in ((once, 1), (always, 1), (always, 9)):
        with pytest.raises(OSError, match="address already in use") as caught:
            check_port(fault, attempt, "127.0.0.1", 3000)
        assert caught.value.errno == errno.EADDRINUSE
