from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.measure.restarts import (
    FEWEST,
    MOST,
    claim,
    claim_of,
    creep,
    next_restart,
    output_rate,
)
from runner.trial import (
    ClientHealth,
    Lengths,
    LoadPlan,
    LoadProtocol,
    LoadRun,
    LoadStart,
    RequestRecord,
    RequestStatus,
)

SEARCH = LoadPlan(
    phase="rung-1",
    protocol=LoadProtocol.CLOSED_LOOP,
    concurrency=2,
    prompt_tokens=Lengths.fixed(8),
    output_tokens=Lengths.fixed(100),
    seed=0,
)
FULL = replace(SEARCH, restarts=FEWEST)
GRADUAL, TOGETHER = LoadStart.GRADUAL, LoadStart.TOGETHER


def load(rate: float, start: LoadStart = GRADUAL, jitter: float = 0.0) -> LoadRun:
    """Two streams of 10 s requests; the window is 60 s of `rate` tokens/s, uneven by `jitter`."""
    requests = []
    for stream in range(2):
        for turn in range(6):
            count = round(rate * 5 * (1 + (jitter if turn % 2 else -jitter)))
            token_s = tuple(10.0 * turn + 10.0 * (n + 1) / count for n in range(count))
            requests.append(
                RequestRecord(
                    f"{stream}-{turn}", 0, 10.0 * turn, token_s[0], token_s[-1], token_s,
                    8, count, count, 0, RequestStatus.OK,
                )
            )  # fmt: skip
    health = ClientHealth(0.1, 0.0)
    return LoadRun(tuple(requests), 0.0, 0.0, 60.0, is_steady=True, client=health, start=start)


def drive(plan: LoadPlan, rates: list[float]) -> list[LoadPlan]:
    """The restarts that are asked for when they measure these rates."""
    plans, loads = list[LoadPlan](), list[LoadRun]()
    while (following := next_restart(plan, loads)) is not None:
        plans.append(following)
        loads.append(load(rates[len(loads)], following.start))
    return plans


def test_a_search_trial_drives_its_load_once() -> None:
    assert [(p.phase, p.start) for p in drive(SEARCH, [80.0])] == [("rung-1-0", GRADUAL)]


def test_a_claim_takes_restarts_and_a_probe_with_prompts_of_their_own() -> None:
    plans = drive(FULL, [80.0] * 9)
    assert [plan.start for plan in plans] == [GRADUAL, TOGETHER, GRADUAL, GRADUAL]
    assert len({plan.phase for plan in plans}) == len(plans)


def test_one_stream_cannot_begin_together() -> None:
    plans = drive(replace(FULL, concurrency=1), [80.0] * 9)
    assert [plan.start for plan in plans] == [GRADUAL] * 3


def test_bursts_and_arrivals_have_no_probe() -> None:
    for protocol in (LoadProtocol.BURST, LoadProtocol.OPEN_LOOP):
        start = TOGETHER if protocol is LoadProtocol.BURST else GRADUAL
        plans = drive(replace(FULL, protocol=protocol, start=start), [80.0] * 9)
        assert [plan.start for plan in plans] == [start] * 3


def test_more_restarts_follow_while_they_can_reach_the_precision() -> None:
    near = drive(replace(FULL, precision=0.05), [80.0, 80.0, 78.0, 82.0, *[80.0] * 5])
    assert FEWEST + 1 < len(near) <= MOST + 1
    hopeless = drive(replace(FULL, precision=0.001), [80.0, 80.0, 70.0, 90.0, *[80.0] * 5])
    assert len(hopeless) == FEWEST + 1


def test_the_halfwidth_is_students_over_restarts() -> None:
    found = claim_of([1.0, 2.0, 3.0])
    # Mean 2, standard deviation 1, t(2) = 4.303.
    assert found.mean == 2.0
    assert found.halfwidth == pytest.approx(4.303 / math.sqrt(3))
    assert claim_of([2.0], errors=[0.1]).halfwidth is None


def test_rates_that_agree_by_luck_claim_no_more_than_their_windows() -> None:
    found = claim_of([2.0, 2.0, 2.0], errors=[0.3, 0.3, 0.3])
    assert found.halfwidth == pytest.approx(4.303 * 0.3 / math.sqrt(3))
    assert not found.is_metastable


def test_what_creeps_within_the_windows_widens_the_interval() -> None:
    rates = [100.0, 101.0, 99.0]
    still, creeping = claim_of(rates, creeps=[1.0, -1.0]), claim_of(rates, creeps=[-2.0, -4.0])
    assert still.halfwidth is not None
    assert creeping.halfwidth == pytest.approx(still.halfwidth + 3.0)


def test_a_probe_apart_is_metastable_and_counts_nowhere_else() -> None:
    rates = [100.0, 101.0, 99.0]
    beside = claim_of(rates, errors=[1.0] * 3, probe=102.0)
    apart = claim_of(rates, errors=[1.0] * 3, probe=80.0)
    assert not beside.is_metastable
    assert apart.is_metastable
    assert (apart.mean, apart.halfwidth) == (beside.mean, beside.halfwidth)


def test_restarts_that_differ_more_than_their_windows_are_metastable() -> None:
    assert claim_of([100.0, 120.0, 80.0], errors=[1.0] * 3).is_metastable
    assert not claim_of([100.0, 102.0, 98.0], errors=[1.0] * 3).is_metastable


def test_a_claim_is_made_of_the_loads_of_a_rung() -> None:
    loads = [load(80.0), load(60.0, TOGETHER), load(81.0), load(79.0)]
    found = claim(FULL, loads)
    assert found.mean == pytest.approx(statistics.fmean(output_rate(loads[n]) for n in (0, 2, 3)))
    assert found.is_metastable
    uneven = claim(FULL, [load(80.0, jitter=0.2), load(80.0, jitter=0.2), load(80.0, jitter=0.2)])
    assert uneven.halfwidth is not None
    assert uneven.halfwidth > 5.0


def test_creep_is_the_difference_of_a_windows_halves() -> None:
    whole = load(80.0)
    assert creep(whole) == pytest.approx(0.0, abs=1.0)
    ended = tuple(r for r in whole.records if r.end_s <= 30.0)
    assert creep(replace(whole, records=ended)) == pytest.approx(-80.0, abs=1.0)


@given(st.integers(3, 6), st.floats(1.0, 50.0))
def test_intervals_of_normal_rates_hold_the_mean(count: int, deviation: float) -> None:
    drawn = random.Random(7)
    hits = 0
    for _ in range(200):
        rates = [drawn.gauss(1000.0, deviation) for _ in range(count)]
        found = claim_of(rates)
        assert found.halfwidth is not None
        hits += abs(found.mean - 1000.0) <= found.halfwidth
    assert 0.90 <= hits / 200 <= 0.99
