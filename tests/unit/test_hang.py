"""When a server hangs under load: each on its own, by the tokens of its requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from runner.clock import Clock
from runner.load.client import Target
from runner.load.hang import HANG_S, WARM_UP_HANG_S, HangWatch, hang_limit_s
from runner.load.reply import Reply
from runner.load.totals import Totals
from runner.trial import Lengths, LoadPlan, LoadProtocol

PLAN = LoadPlan(
    phase="rung-0",
    protocol=LoadProtocol.CLOSED_LOOP,
    concurrency=8,
    prompt_tokens=Lengths.fixed(256),
    output_tokens=Lengths.fixed(12),
    seed=1,
)
ONE, TWO = Target(0, "http://one"), Target(1, "http://two")


def reply_at(*times_s: float) -> Reply:
    reply = Reply(Totals())
    reply.token_s.extend(times_s)
    return reply


@pytest.mark.parametrize("max_window_s", [10.0, 120.0, 1e6])
def test_the_limit_does_not_depend_on_the_window(max_window_s: float) -> None:
    assert hang_limit_s(replace(PLAN, max_window_s=max_window_s), Clock()) == HANG_S


def test_a_warm_up_may_compile() -> None:
    assert hang_limit_s(replace(PLAN, is_warmup=True), Clock()) == WARM_UP_HANG_S


@pytest.mark.parametrize(
    "prompt",
    [
        Lengths.fixed(100_000),
        Lengths("uniform", 1, 100_000),
        Lengths("normal", 60_000, 10_000),
        Lengths("recorded", values=(1, 100_000, 7)),
    ],
)
def test_a_long_prompt_is_read_in_peace(prompt: Lengths) -> None:
    assert hang_limit_s(replace(PLAN, prompt_tokens=prompt), Clock()) == 200.0


def test_a_fast_clock_leaves_a_busy_machine_two_seconds() -> None:
    assert hang_limit_s(PLAN, Clock(1000.0)) == 2000.0


def test_headers_alone_are_no_sign_of_life() -> None:
    watch = HangWatch([ONE], 100.0, 0.0)
    silent = reply_at()
    silent.last_s = 99.0
    assert watch.look(99.0, [(ONE, silent)]) is None
    assert watch.look(105.0, [(ONE, silent), (ONE, silent)]) == (
        "the server hangs: no output token came in 105 s with 2 requests in flight (at most 100 s)"
    )


def test_one_silent_server_of_two_is_found() -> None:
    watch = HangWatch([ONE, TWO], 100.0, 0.0)
    for now_s in range(10, 100, 10):
        assert watch.look(now_s, [(ONE, reply_at(now_s)), (TWO, reply_at())]) is None
    reason = watch.look(100.0, [(ONE, reply_at(100.0)), (TWO, reply_at())])
    assert reason is not None
    assert reason.startswith("server 1 hangs: no output token came in 100 s with 1 request in")


def test_tokens_ends_and_idleness_are_signs_of_life() -> None:
    watch = HangWatch([ONE], 100.0, 0.0)
    assert watch.look(150.0, [(ONE, reply_at(80.0))]) is None
    assert watch.look(250.0, []) is None
    watch.heard(ONE, 300.0)
    assert watch.look(399.0, [(ONE, reply_at())]) is None
    assert watch.look(405.0, [(ONE, reply_at())]) is not None


def test_many_requests_are_looked_at_now_and_then() -> None:
    watch = HangWatch([ONE], 100.0, 0.0)
    looked: list[int] = []

    def in_flight(now_s: int) -> Iterator[tuple[Target, Reply]]:
        looked.append(now_s)
        yield ONE, reply_at(now_s)

    for now_s in range(100):
        watch.look(float(now_s), in_flight(now_s))
    assert looked == list(range(5, 100, 5))
