from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.measure.window import (
    Window,
    WindowRule,
    batch_edges,
    halfwidth_of,
    rate_halfwidth,
)
from runner.trial import Lengths, LoadPlan, LoadProtocol

PLAN = LoadPlan(
    phase="rung-0",
    protocol=LoadProtocol.CLOSED_LOOP,
    concurrency=4,
    prompt_tokens=Lengths.fixed(8),
    output_tokens=Lengths.fixed(8),
    seed=0,
    min_window_s=10.0,
    max_window_s=120.0,
)

Look = tuple[float, int, int]
"""Time, output tokens so far, finished requests so far."""


def close(plan: LoadPlan, looks: Iterable[Look], started_s: float = 0.0) -> Window:
    rule = WindowRule(plan, started_s)
    for look in looks:
        window = rule.observe(*look)
        if window is not None:
            return window
    pytest.fail("the rule never closed its window")


def lockstep(streams: int, length: int, prefill_s: float, step_s: float) -> Iterable[Look]:
    """All streams start together, wait for the prefill, then get a token each per step."""
    now_s, tokens, finished = 0.0, 0, 0
    while now_s < 1000:
        now_s += prefill_s
        for step in range(length):
            now_s += step_s
            tokens += streams
            finished += streams if step == length - 1 else 0
            yield now_s, tokens, finished


def smooth(rate: float, streams: int, length: int, step_s: float = 0.5) -> Iterable[Look]:
    """A constant token rate with requests that end evenly spread."""
    for step in range(1, 5000):
        tokens = round(rate * step * step_s)
        yield step * step_s, tokens, max(0, tokens // length - streams // 2)


def test_window_of_lockstep_streams_holds_whole_periods() -> None:
    # A period is 3 s of prefill and 8 steps of 0.25 s: 5 s for 32 tokens.
    window = close(PLAN, lockstep(4, 8, prefill_s=3.0, step_s=0.25))
    assert window == Window(5.0, 20.0, is_steady=True)


def test_lockstep_is_not_judged_by_fewer_than_three_periods() -> None:
    plan = replace(PLAN, min_window_s=1.0)
    window = close(plan, lockstep(4, 8, prefill_s=3.0, step_s=0.25))
    assert window.end_s - window.start_s == 15.0


def test_smooth_load_closes_at_the_first_period_after_the_shortest_window() -> None:
    window = close(PLAN, smooth(rate=64.0, streams=4, length=64))
    # One request ends per second, so a period is 4 s: two are too short, three are 12 s.
    assert window.is_steady
    assert window.end_s - window.start_s == pytest.approx(12.0)


def test_late_looks_still_find_a_window() -> None:
    looks = [look for place, look in enumerate(lockstep(4, 8, 3.0, 0.25)) if place % 7 == 0]
    window = close(PLAN, looks)
    assert window.end_s - window.start_s >= PLAN.min_window_s


def test_drift_ends_at_the_longest_window_and_is_not_steady() -> None:
    looks = ((float(second), second * second, second // 2) for second in range(1, 1000))
    window = close(PLAN, looks)
    assert not window.is_steady
    assert 10.0 <= window.end_s - window.start_s <= 120.0


def test_requests_longer_than_the_longest_window_are_measured_without_periods() -> None:
    looks = ((float(second), 100 * second, 0) for second in range(1, 1000))
    window = close(PLAN, looks)
    assert window == Window(120.0, 240.0, is_steady=True)


def test_one_slow_period_is_fair_although_its_rate_swings() -> None:
    # 10 s of prefill in a period of 90 s: the halves of the one period differ by a quarter.
    window = close(PLAN, lockstep(4, 80, prefill_s=10.0, step_s=1.0))
    assert window.start_s == 90.0
    assert window.end_s == 180.0
    assert window.is_steady


def test_periods_longer_than_the_longest_window_are_not_waited_for() -> None:
    window = close(PLAN, lockstep(4, 150, prefill_s=10.0, step_s=1.0))
    assert window.start_s == 120.0
    assert window.end_s == 240.0


def test_two_slow_periods_are_compared_as_wholes() -> None:
    assert close(PLAN, lockstep(4, 40, prefill_s=10.0, step_s=1.0)) == Window(50.0, 150.0, True)


def test_silence_is_never_steady() -> None:
    looks = ((float(second), 0, 0) for second in range(1, 1000))
    window = close(PLAN, looks)
    assert not window.is_steady


def test_warmup_ends_when_each_stream_has_finished_one_request() -> None:
    plan = replace(PLAN, is_warmup=True)
    rule = WindowRule(plan, 2.0)
    assert rule.observe(3.0, 100, 3) is None
    assert rule.observe(4.5, 128, 4) == Window(2.0, 4.5, is_steady=True)


def test_burst_is_measured_from_its_first_send_to_its_last_end() -> None:
    plan = replace(PLAN, protocol=LoadProtocol.BURST)
    window = close(plan, lockstep(4, 8, prefill_s=3.0, step_s=0.25))
    assert window == Window(0.0, 5.0, is_steady=True)


@pytest.mark.parametrize("plan", [replace(PLAN, is_warmup=True),
                                  replace(PLAN, protocol=LoadProtocol.BURST)])  # fmt: skip
def test_burst_and_warmup_that_never_end_are_given_up(plan: LoadPlan) -> None:
    window = close(plan, ((float(second), second, 1) for second in range(10_000)))
    assert window == Window(0.0, 600.0, is_steady=False)


def test_open_loop_drops_its_first_seconds() -> None:
    plan = replace(PLAN, protocol=LoadProtocol.OPEN_LOOP, rate=2.0)
    looks = ((float(second), 100 * second, 2 * second) for second in range(1, 1000))
    assert close(plan, looks) == Window(5.0, 15.0, is_steady=True)


def noisy(drift_per_s: float) -> Iterable[Look]:
    """Tokens in lumps, as random arrivals bring them; with drift they become more."""
    tokens = 0.0
    for second in range(1, 1000):
        tokens += (1 + drift_per_s * second) * (second * 7919 % 13)
        yield float(second), round(100 * tokens), second // 2


@pytest.mark.parametrize("protocol", [LoadProtocol.OPEN_LOOP, LoadProtocol.CLOSED_LOOP])
@pytest.mark.parametrize(("drift_per_s", "is_steady"), [(0.0, True), (0.05, False)])
def test_noise_is_not_drift(protocol: LoadProtocol, drift_per_s: float, *, is_steady: bool) -> None:
    plan = replace(PLAN, protocol=protocol, rate=2.0, precision=0.001)
    window = close(plan, noisy(drift_per_s))
    assert window.end_s - window.start_s >= 110.0
    assert window.is_steady is is_steady


def test_a_closed_window_stays_as_it_is() -> None:
    rule = WindowRule(replace(PLAN, is_warmup=True), 0.0)
    window = rule.observe(1.0, 4, 4)
    assert rule.observe(2.0, 8, 8) is window


looks_of_any_load = st.lists(
    st.tuples(st.floats(0.01, 5.0), st.integers(0, 500), st.integers(0, 6)), min_size=1
)


@given(looks_of_any_load, st.sampled_from(LoadProtocol), st.booleans())
def test_any_window_lies_within_its_load(
    steps: list[tuple[float, int, int]], protocol: LoadProtocol, is_warmup: bool
) -> None:
    plan = replace(
        PLAN, protocol=protocol, is_warmup=is_warmup, min_window_s=2.0, max_window_s=20.0
    )
    rule = WindowRule(plan, 100.0)
    now_s, tokens, finished = 100.0, 0, 0
    for step_s, new_tokens, new_finished in steps:
        now_s, tokens, finished = now_s + step_s, tokens + new_tokens, finished + new_finished
        window = rule.observe(now_s, tokens, finished)
        if window is None:
            continue
        assert 100.0 <= window.start_s < window.end_s <= now_s
        if protocol is LoadProtocol.CLOSED_LOOP and not is_warmup:
            length_s = window.end_s - window.start_s
            assert plan.min_window_s <= length_s <= plan.max_window_s + step_s
        break


@given(st.floats(1.0, 1000.0), st.integers(1, 64), st.integers(16, 512))
def test_a_constant_rate_is_always_steady(rate: float, streams: int, length: int) -> None:
    plan = replace(PLAN, concurrency=streams)
    assert close(plan, smooth(rate, streams, length)).is_steady


@given(st.floats(0, 1e6), st.floats(0.1, 1e3), st.lists(st.floats(0, 1e3), max_size=60))
def test_batches_are_two_to_ten_and_ascend(
    start_s: float, length_s: float, gaps: list[float]
) -> None:
    ends_s = [start_s + sum(gaps[:count]) for count in range(1, len(gaps) + 1)]
    edges_s = batch_edges(start_s, start_s + length_s, ends_s)
    assert 3 <= len(edges_s) <= 11
    assert edges_s == sorted(set(edges_s))
    assert start_s <= edges_s[0] < edges_s[-1] <= start_s + length_s


def test_halfwidth_is_students() -> None:
    # Mean 2, standard deviation 1, t(2) = 4.303.
    assert halfwidth_of([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3))
    assert halfwidth_of([5.0] * 10) == 0.0
    assert halfwidth_of([1.0]) is None


def test_halfwidth_from_records_sees_whole_periods() -> None:
    looks = [look for look in lockstep(4, 8, prefill_s=3.0, step_s=0.25) if look[0] <= 40.0]
    token_s = [time_s for time_s, _, _ in looks for _ in range(4)]
    ends_s = [5.0 * period for period in range(1, 9) for _ in range(4)]
    assert rate_halfwidth(token_s, ends_s, 4, 5.0, 20.0) == pytest.approx(0.0)
    in_spans = rate_halfwidth(token_s, ends_s, None, 5.0, 20.0)
    assert in_spans is not None
    assert in_spans > 1.0


def test_halfwidth_of_an_empty_window_is_unknown() -> None:
    assert rate_halfwidth([1.0, 2.0], [2.0], 1, 3.0, 3.0) is None
