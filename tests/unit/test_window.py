from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.measure.batches import batch_edges, drift_of, rate_batches
from runner.measure.window import Counts, Window, WindowRule
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


def counts(plan: LoadPlan, tokens: int, finished: int) -> Counts:
    """All streams have begun, and as many requests are being answered."""
    streams = plan.concurrency
    return Counts(tokens, finished + streams, finished, answering=streams, streams=streams)


def close(plan: LoadPlan, looks: Iterable[Look], started_s: float = 0.0) -> Window:
    rule = WindowRule(plan, started_s)
    for now_s, tokens, finished in looks:
        window = rule.observe(now_s, counts(plan, tokens, finished))
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
    for step in range(1, 20_000):
        tokens = round(rate * step * step_s)
        yield step * step_s, tokens, max(0, tokens // length - streams // 2)


def test_window_of_lockstep_streams_holds_whole_periods() -> None:
    # A period is 3 s of prefill and 8 steps of 0.25 s: 5 s for 32 tokens.
    window = close(PLAN, lockstep(4, 8, prefill_s=3.0, step_s=0.25))
    assert window == Window(15.0, 30.0, is_steady=True)


@pytest.mark.parametrize("periods", [3, 8])
def test_a_window_holds_as_many_request_durations_as_asked_for(periods: int) -> None:
    plan = replace(PLAN, min_window_s=1.0, min_periods=periods)
    window = close(plan, lockstep(4, 8, prefill_s=3.0, step_s=0.25))
    assert window.end_s - window.start_s == 5.0 * periods


def test_smooth_load_closes_at_the_first_period_after_the_shortest_window() -> None:
    window = close(PLAN, smooth(rate=64.0, streams=4, length=64))
    # One request ends per second, so a period is 4 s: two are too short, three are 12 s.
    assert window.is_steady
    assert window.end_s - window.start_s == pytest.approx(12.0)


def test_late_looks_still_find_a_window() -> None:
    looks = [look for place, look in enumerate(lockstep(4, 8, 3.0, 0.25)) if place % 7 == 0]
    window = close(PLAN, looks)
    assert window.end_s - window.start_s >= PLAN.min_window_s


def test_a_steady_rise_is_not_steady() -> None:
    looks = ((float(second), second * second, second // 2) for second in range(1, 1000))
    # A period is 8 s.
    assert close(PLAN, looks) == Window(44.0, 68.0, is_steady=False)


def stopping(stop_s: float, length_s: float) -> Iterable[Look]:
    """64 tokens/s and a request a second, but for a stop."""
    for place in range(1, 1000):
        now_s = place / 4
        working_s = now_s - min(max(now_s - stop_s, 0.0), length_s)
        yield now_s, round(64 * working_s), int(working_s)


@pytest.mark.parametrize(("length_s", "is_steady"), [(0.5, True), (1.0, False)])
def test_a_short_stop_of_the_server_is_no_drift(length_s: float, *, is_steady: bool) -> None:
    """SGLang's HTTP process collects its garbage for half a second now and then."""
    whole = close(PLAN, stopping(1000.0, 0.0))
    assert whole == Window(12.0, 24.0, is_steady=True)  # three periods
    for stop_s in (13.0, 21.0):  # in the first, in the last
        window = close(PLAN, stopping(stop_s, length_s))
        assert window == Window(12.0, 24.0 + length_s, is_steady=is_steady)


@pytest.mark.parametrize("count", [4, 5, 6, 7, 10])
def test_neither_a_line_nor_a_step_hides_in_its_own_scatter(count: int) -> None:
    line = [100.0 + 10 * place for place in range(count)]
    step = [100.0] * (count // 2) + [130.0] * (count - count // 2)
    for rates in (line, step):
        drift, noise = drift_of(rates)
        assert drift > noise == pytest.approx(0.0, abs=1e-6)


def test_a_ramp_up_that_does_not_end_is_cut_off_and_its_window_not_steady() -> None:
    looks = [(float(second), 100 * second, 0) for second in range(1, 4000)]
    assert close(PLAN, looks) == Window(24 * 120.0, 25 * 120.0, is_steady=False)
    short = replace(PLAN, max_window_s=20.0)
    assert close(short, looks) == Window(1800.0, 1820.0, is_steady=False)
    cut = replace(PLAN, max_ramp_s=50.0)
    assert close(cut, looks) == Window(50.0, 170.0, is_steady=False)


def test_a_window_does_not_open_before_every_stream_has_begun_and_ended_a_request() -> None:
    rule = WindowRule(PLAN, 0.0)
    opened_s = None
    for second in range(1, 200):
        # A stream begins every 10 s; each finishes a request in 2 s.
        streams = min(4, 1 + second // 10)
        finished = sum(max(0, second - 10 * stream) // 2 for stream in range(streams))
        now = Counts(8 * finished, finished + streams, finished, streams, streams)
        window = rule.observe(float(second), now)
        if window is not None:
            opened_s = window.start_s
            break
    # The last begins at 30 s. Four further requests take 2 s; far more than twelve have ended.
    assert opened_s == 32.0


def settling(change_s: float) -> Iterable[Look]:
    """Requests of 8 tokens at half speed until `change_s`."""
    for second in range(1, 1000):
        tokens = 32 * second - 16 * min(second, change_s)
        yield float(second), round(tokens), int(tokens) // 8


def test_a_window_opens_when_the_last_request_durations_agree() -> None:
    # At half speed a period of 4 requests takes 2 s; three have ended at 6 s, amid the change.
    assert close(PLAN, settling(0.0)).start_s == 3.0
    late = close(PLAN, settling(5.0))
    assert 6.0 < late.start_s <= 9.0
    assert late.is_steady


def creeping() -> Iterable[Look]:
    """Every half period is a third faster than the one before: it never settles."""
    now_s, tokens = 0.0, 0
    for place in range(100):
        now_s += 2.0 * 0.75**place if place < 12 else 2.0 * 0.75**12
        tokens += 16
        yield now_s, tokens, tokens // 8


def test_settling_is_not_waited_for_for_ever() -> None:
    plan = replace(PLAN, min_window_s=0.5, max_window_s=1.0)
    opened_s = close(plan, creeping()).start_s
    ends_s = [now_s for now_s, _, finished in creeping() if finished == 2 + 4 * 6]
    assert opened_s == ends_s[0]


def test_one_slow_period_is_fair_although_its_rate_swings() -> None:
    # 10 s of prefill in a period of 90 s: the halves of the one period differ by a quarter.
    window = close(PLAN, lockstep(4, 80, prefill_s=10.0, step_s=1.0))
    assert window == Window(270.0, 360.0, is_steady=True)


def test_periods_longer_than_the_longest_window_are_not_waited_for() -> None:
    window = close(PLAN, lockstep(4, 150, prefill_s=10.0, step_s=1.0))
    # A period takes 160 s.
    assert window.start_s == 480.0
    assert window.end_s == 600.0


def test_two_slow_periods_are_compared_as_wholes() -> None:
    assert close(PLAN, lockstep(4, 40, prefill_s=10.0, step_s=1.0)) == Window(150.0, 250.0, True)


def test_silence_is_never_steady() -> None:
    looks = ((float(second), 0, 0) for second in range(1, 4000))
    window = close(PLAN, looks)
    assert not window.is_steady


def test_warmup_ends_when_each_stream_has_finished_one_request() -> None:
    plan = replace(PLAN, is_warmup=True)
    rule = WindowRule(plan, 2.0)
    assert rule.observe(3.0, counts(plan, 100, 3)) is None
    assert rule.observe(4.5, counts(plan, 128, 4)) == Window(2.0, 4.5, is_steady=True)


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
    # Four in flight at 2 per second: a request takes 2 s, so 6 s are three durations.
    assert close(plan, looks) == Window(6.0, 16.0, is_steady=True)


def noisy(drift_per_s: float) -> Iterable[Look]:
    """Tokens in lumps, as random arrivals bring them; with drift they become more."""
    tokens = 0.0
    for second in range(1, 1000):
        tokens += (1 + drift_per_s * second) * (second * 7919 % 13)
        yield float(second), round(100 * tokens), second // 2


@pytest.mark.parametrize("protocol", [LoadProtocol.OPEN_LOOP, LoadProtocol.CLOSED_LOOP])
@pytest.mark.parametrize(("drift_per_s", "is_steady"), [(0.0, True), (0.05, False)])
def test_noise_is_not_drift(protocol: LoadProtocol, drift_per_s: float, *, is_steady: bool) -> None:
    plan = replace(PLAN, protocol=protocol, rate=2.0, min_window_s=100.0)
    window = close(plan, noisy(drift_per_s))
    assert window.end_s - window.start_s >= 100.0
    assert window.is_steady is is_steady


def test_a_closed_window_stays_as_it_is() -> None:
    plan = replace(PLAN, is_warmup=True)
    rule = WindowRule(plan, 0.0)
    window = rule.observe(1.0, counts(plan, 4, 4))
    assert rule.observe(2.0, counts(plan, 8, 8)) is window


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
        window = rule.observe(now_s, counts(plan, tokens, finished))
        if window is None:
            continue
        assert 100.0 <= window.start_s < window.end_s <= now_s
        if protocol is LoadProtocol.CLOSED_LOOP and not is_warmup:
            length_s = window.end_s - window.start_s
            assert plan.min_window_s <= length_s <= plan.max_window_s + step_s
        break


@given(st.floats(20.0, 1000.0), st.integers(1, 64), st.integers(16, 256))
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


def test_batches_of_records_are_whole_periods() -> None:
    looks = [look for look in lockstep(4, 8, prefill_s=3.0, step_s=0.25) if look[0] <= 40.0]
    token_s = [time_s for time_s, _, _ in looks for _ in range(4)]
    ends_s = [5.0 * period for period in range(1, 9) for _ in range(4)]
    assert rate_batches(token_s, ends_s, 4, 5.0, 20.0) == pytest.approx([6.4, 6.4, 6.4])
    in_spans = rate_batches(token_s, ends_s, None, 5.0, 20.0)
    assert len(in_spans) == 10
    assert min(in_spans) < 2.0
    assert max(in_spans) > 10.0


def test_an_empty_window_has_no_batches() -> None:
    assert rate_batches([1.0, 2.0], [2.0], 1, 3.0, 3.0) == []
