from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.load.ramp import DURATIONS, Ramp


def test_the_second_stream_waits_for_the_first_token() -> None:
    ramp = Ramp(streams=4, mean_tokens=100.0)
    ramp.start(10.0)
    assert ramp.due_s(11.0, output_tokens=0) is None
    assert ramp.due_s(11.0, output_tokens=10) is not None


def test_starts_are_spread_over_the_mean_durations_of_requests() -> None:
    # 100 tokens at 10 tokens/s a stream: a request takes 10 s whatever the number of streams.
    ramp, now_s, starts_s = Ramp(8, 100.0), 0.0, list[float]()
    while not ramp.is_done:
        starts_s.append(now_s)
        ramp.start(now_s)
        tokens, due_s = 0, now_s
        while due_s >= now_s and not ramp.is_done:
            now_s += 0.01
            tokens = round(10 * sum(now_s - start_s for start_s in starts_s))
            found_s = ramp.due_s(now_s, tokens)
            due_s = now_s if found_s is None or found_s > now_s else -1.0
    gaps_s = [later - earlier for earlier, later in pairwise(starts_s)]
    assert gaps_s == pytest.approx([DURATIONS * 10.0 / 8] * 7, rel=0.05)


@given(st.integers(1, 64), st.floats(1.0, 4096.0), st.floats(0, 1e3), st.integers(0, 10_000))
def test_a_start_is_never_due_in_the_past(
    streams: int, mean_tokens: float, later_s: float, tokens: int
) -> None:
    ramp = Ramp(streams, mean_tokens)
    ramp.start(5.0)
    due_s = ramp.due_s(5.0 + later_s, tokens)
    assert (due_s is None) == (tokens == 0)
    assert due_s is None or due_s >= 5.0 + later_s


def test_all_may_begin_at_once() -> None:
    ramp = Ramp(3, 10.0)
    for _ in range(3):
        ramp.start(1.0)
    assert ramp.is_done
    assert ramp.started == 3
