"""When a closed loop ends early because it cannot matter any more."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from runner.measure.window import Counts, Window, WindowRule
from runner.trial import Lengths, LoadPlan, LoadProtocol

STREAMS, LENGTH = 4, 8
PLAN = LoadPlan(
    phase="rung-0",
    protocol=LoadProtocol.CLOSED_LOOP,
    concurrency=STREAMS,
    prompt_tokens=Lengths.fixed(8),
    output_tokens=Lengths.fixed(LENGTH),
    seed=0,
    min_window_s=10.0,
    max_window_s=120.0,
)
Look = tuple[float, int, int]
"""Time, output tokens so far, streams that have begun."""


def drive(plan: LoadPlan, looks: Iterable[Look]) -> Window:
    rule = WindowRule(plan, 0.0)
    for now_s, tokens, streams in looks:
        finished = tokens // LENGTH
        window = rule.observe(now_s, Counts(tokens, finished + streams, finished, streams, streams))
        if window is not None:
            return window
    pytest.fail("the load never ended")


def at_rates(*rates: tuple[float, int]) -> Iterable[Look]:
    """Tokens at each rate (per second) until its time; all streams begin at once."""
    tokens, now_s = 0, 0
    for until_s, rate in rates:
        while now_s < until_s:
            yield float(now_s), tokens, STREAMS
            now_s += 1
            tokens += rate


STEADY = ((1000.0, 8),)  # one request a second: a period takes 4 s


def test_a_load_below_half_of_what_matters_ends_with_its_first_period() -> None:
    window = drive(replace(PLAN, worth=16.1), at_rates(*STEADY))
    assert window == Window(0.0, 4.0, is_steady=False, is_hopeless=True)


@pytest.mark.parametrize("worth", [None, 16.0, 10.0])
def test_half_of_it_is_enough_to_be_measured(worth: float | None) -> None:
    window = drive(replace(PLAN, worth=worth), at_rates(*STEADY))
    assert window == Window(12.0, 24.0, is_steady=True)


def test_a_load_that_begins_slowly_and_gets_fast_is_measured() -> None:
    # The first period: half of it takes 16 s, the other half 0.5 s.
    slow_start = at_rates((16.0, 1), (1000.0, 40))
    window = drive(replace(PLAN, worth=50.0), slow_start)
    assert window.is_steady
    assert window.start_s > 16.0


def test_a_server_that_stands_still_once_is_measured() -> None:
    stall = at_rates((2.0, 8), (40.0, 0), (1000.0, 8))
    assert not drive(replace(PLAN, worth=15.0), stall).is_hopeless


def test_a_load_may_turn_out_hopeless_after_a_fast_first_period() -> None:
    # 40 tokens a second until 1 s, then 1: the second period is as slow as those to come.
    window = drive(replace(PLAN, worth=40.0), at_rates((1.0, 40), (1000.0, 1)))
    assert window.is_hopeless
    assert window.start_s >= 1.0


def test_no_period_counts_before_every_stream_has_begun() -> None:
    def looks() -> Iterable[Look]:
        for now_s, tokens, _ in at_rates((50.0, 8)):
            yield now_s, tokens, STREAMS - 1
        for now_s, tokens, _ in at_rates(*STEADY):
            yield now_s + 50.0, tokens + 400, STREAMS

    window = drive(replace(PLAN, worth=17.0), looks())
    assert window == Window(50.0, 54.0, is_steady=False, is_hopeless=True)


@pytest.mark.parametrize("streams", [1, 2, 3, 5])
def test_a_period_is_whole_with_any_number_of_streams(streams: int) -> None:
    plan = replace(PLAN, concurrency=streams, worth=1000.0)
    looks = ((now_s, tokens, streams) for now_s, tokens, _ in at_rates(*STEADY))
    window = drive(plan, looks)
    assert window.is_hopeless
    assert window.end_s - window.start_s == max(streams, 2)  # a request a second


@pytest.mark.parametrize(
    "plan",
    [
        replace(PLAN, protocol=LoadProtocol.OPEN_LOOP),
        replace(PLAN, protocol=LoadProtocol.BURST),
        replace(PLAN, is_warmup=True),
    ],
    ids=["open loop", "burst", "warm-up"],
)
def test_only_a_closed_loop_ends_early(plan: LoadPlan) -> None:
    whole = drive(plan, at_rates(*STEADY))
    assert drive(replace(plan, worth=1e6), at_rates(*STEADY)) == whole
    assert not whole.is_hopeless


@given(st.integers(1, 100), st.floats(0.1, 10.0))
def test_a_constant_rate_is_cut_exactly_below_half(rate: int, times: float) -> None:
    looks = [(tokens / rate, tokens, STREAMS) for tokens in range(0, 4000, 4)]
    worth = rate * times
    assume(not math.isclose(worth, 2 * rate))  # rounding decides there
    window = drive(replace(PLAN, worth=worth), looks)
    assert window.is_hopeless is (rate < worth / 2)
    if not window.is_hopeless:
        assert window == drive(PLAN, looks)
