from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.measure.attainment import Z_95, excess_s, share_with_bounds
from runner.measure.metrics import judge_rung
from runner.settings import SloLimit
from runner.trial import RequestStatus
from tests.unit.test_metrics import ALL, record, rung


@pytest.mark.parametrize(
    ("good", "ended", "low", "high"),
    # By Wilson's formula, worked out by hand; 8 of 10 is the textbooks' example.
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (1, 2, 0.0945, 0.9055)],
)
def test_the_interval_of_a_share(good: int, ended: int, low: float, high: float) -> None:
    found = share_with_bounds(good, ended)
    assert found is not None
    assert found.share == good / ended
    assert found.low == pytest.approx(low, abs=1e-4)
    assert found.high == pytest.approx(high, abs=1e-4)


@given(st.integers(1, 10**6), st.floats(0, 1))
def test_every_interval_holds_its_share_and_its_bounds_solve_the_equation(
    ended: int, part: float
) -> None:
    good = round(part * ended)
    found = share_with_bounds(good, ended)
    assert found is not None
    assert 0.0 <= found.low <= found.share <= found.high <= 1.0
    for bound in (found.low, found.high):
        away = abs(found.share - bound)
        assert away == pytest.approx(Z_95 * math.sqrt(bound * (1 - bound) / ended), abs=1e-6)


def test_without_requests_there_is_no_share() -> None:
    assert share_with_bounds(0, 0) is None


def test_a_rung_counts_failed_requests_as_missing_the_limits() -> None:
    limits = [SloLimit("ttft_s", "p99", 0.5)]  # INTO keeps it, INSIDE does not
    failed = record(12.0, end_s=13.0, status=RequestStatus.FAILED)
    early = record(2.0, end_s=3.0, status=RequestStatus.FAILED)

    result = judge_rung(rung(*ALL, failed, early), limits)

    assert result.slo_attainment == pytest.approx(1 / 3)
    assert result.slo_attainment_low == pytest.approx(0.0615, abs=1e-4)
    assert result.slo_attainment_high == pytest.approx(0.7923, abs=1e-4)
    assert judge_rung(rung(*ALL), limits).slo_attainment == 0.5
    assert judge_rung(rung(*ALL), ()).slo_attainment is None
    assert judge_rung(rung(*ALL, window=(30.0, 40.0)), limits).slo_attainment is None


def test_a_latency_that_nobody_saw_is_missed() -> None:
    assert excess_s(1.5, 2.0) == -0.5
    assert excess_s(2.0, 2.0) == 0.0
    assert excess_s(None, 2.0) == 2.0
