"""The steady window of a load of a given number of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from runner.measure.counted import (
    CountedRule,
    drift_reason,
    requests_wanted,
    steady_span,
    whole_span,
)
from runner.measure.window import Counts
from runner.trial import (
    ClientHealth,
    Lengths,
    LoadPlan,
    LoadProtocol,
    LoadRun,
    RequestRecord,
    RequestStatus,
)

CLOSED = LoadPlan(
    phase="load",
    protocol=LoadProtocol.CLOSED_LOOP,
    concurrency=2,
    prompt_tokens=Lengths.fixed(8),
    output_tokens=Lengths.fixed(4),
    seed=0,
    requests=20,
)
OPEN = replace(CLOSED, protocol=LoadProtocol.OPEN_LOOP, rate=10.0)


def record(
    send_s: float, end_s: float, status: RequestStatus = RequestStatus.OK, tokens: int = 4
) -> RequestRecord:
    token_s = tuple(send_s + (end_s - send_s) * (i + 1) / tokens for i in range(tokens))
    first_s = token_s[0] if token_s else None
    return RequestRecord("r", 0, send_s, first_s, end_s, token_s, 8, tokens, tokens, 0, status)


def run_of(records: Sequence[RequestRecord]) -> LoadRun:
    first_s, last_s = min(r.send_s for r in records), max(r.end_s for r in records)
    return LoadRun(tuple(records), first_s, first_s, last_s, True, ClientHealth(0.1, 0.001))


def closed_loop(requests: int, duration_s: float = 1.0, start_s: float = 100.0) -> LoadRun:
    """Two streams, half a request apart from the second one on."""
    free_s = [start_s, start_s]
    records = []
    for number in range(requests):
        stream = free_s.index(min(free_s))
        took_s = duration_s * (1.5 if number == 1 else 1.0)
        records.append(record(free_s[stream], free_s[stream] + took_s))
        free_s[stream] += took_s
    return run_of(records)


def test_a_counted_load_is_over_when_all_have_ended() -> None:
    rule = CountedRule(5, 10.0)
    assert rule.observe(12.0, Counts(1000, 5, 4, 1, 2)) is None
    window = rule.observe(13.0, Counts(1000, 5, 5, 0, 2))
    assert window is not None
    assert (window.start_s, window.end_s, window.is_steady) == (10.0, 13.0, True)


def test_the_window_begins_after_three_requests_and_ends_with_full_concurrency() -> None:
    load = closed_loop(20)
    span = steady_span(load, CLOSED)
    assert span is not None
    mean_s = 20.5 / 20
    last_send_s = max(r.send_s for r in load.records)
    assert span[0] == pytest.approx(100.0 + 3 * mean_s)
    assert span[1] == min(r.end_s for r in load.records if r.end_s > last_send_s)
    assert span[1] < whole_span(load)[1]


def test_a_short_load_begins_when_as_many_have_ended_as_there_are_streams() -> None:
    load = closed_loop(6)
    span = steady_span(load, CLOSED)
    assert span is not None
    assert span[0] == sorted(r.end_s for r in load.records)[1]


def test_a_load_that_is_too_short_has_no_window_and_the_advice_gives_it_one() -> None:
    load = closed_loop(4)
    assert steady_span(load, CLOSED) is None
    wanted = requests_wanted(load, CLOSED)
    assert steady_span(closed_loop(wanted), CLOSED) is not None
    assert steady_span(closed_loop(1), CLOSED) is None


def test_an_open_loop_ends_with_its_last_arrival() -> None:
    load = run_of([record(i / 10, i / 10 + 0.5) for i in range(60)])
    assert steady_span(load, OPEN) == pytest.approx((1.5, 5.9))
    short = run_of(load.records[:20])
    assert steady_span(short, OPEN) is None
    assert steady_span(run_of(load.records[: requests_wanted(short, OPEN)]), OPEN) is not None


def test_a_burst_has_no_window() -> None:
    burst = replace(CLOSED, protocol=LoadProtocol.BURST)
    assert steady_span(closed_loop(20), burst) is None
    assert requests_wanted(closed_loop(20), burst) == 0


def test_the_window_ends_where_the_server_was_lost() -> None:
    lived = closed_loop(20).records
    died_s = max(r.send_s for r in lived)
    failed = [record(died_s - 0.1, died_s + i, RequestStatus.FAILED, 0) for i in range(3)]
    span = steady_span(run_of([*(r for r in lived if r.end_s < died_s), *failed]), CLOSED)
    assert span is not None
    assert span[1] == died_s


def test_requests_without_any_success_have_no_window() -> None:
    failed = [record(1.0, 1.0 + i, RequestStatus.FAILED, 0) for i in range(20)]
    assert steady_span(run_of(failed), CLOSED) is None


def test_a_rate_that_doubles_is_not_steady() -> None:
    slow = closed_loop(40, 1.0)
    end_s = whole_span(slow)[1]
    fast = closed_loop(80, 0.5, end_s)
    load = run_of([*slow.records, *fast.records])
    assert drift_reason(slow, CLOSED, (105.0, end_s - 2)) is None
    reason = drift_reason(load, CLOSED, (105.0, end_s + 15.0))
    assert reason is not None
    assert "the token rate changed by +" in reason
