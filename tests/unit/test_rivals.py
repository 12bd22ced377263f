"""The rivals of the 8-GPU profile: who shares a slot, how long a burst lasts, and the fit."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from runner.pipeline import ServerShape
from tests.bench.rivals.closed import ClosedForm, Contention, CpuBound, OneSlot, ResultsQueue
from tests.bench.rivals.fit import fit
from tests.bench.rivals.measured import NEAR, SETTINGS, Run, load_points, run_of

POINTS = load_points()
PP8 = SETTINGS["pp8-d8-auto"]


class Plain(ClosedForm):
    """A round takes as many seconds as the fullest slot has requests."""

    name = "plain"

    def __init__(self, per_visit: int = 64) -> None:
        self.per_visit = per_visit
        self.seen: list[list[int]] = []

    def round_s(
        self,
        values: Mapping[str, float],  # noqa: ARG002 - none needed
        shape: ServerShape,  # noqa: ARG002
        sizes: Sequence[int],
    ) -> float:
        self.seen.append(list(sizes))
        return float(max(sizes))


def test_rounds_get_shorter_as_requests_end() -> None:
    shape = replace(PP8, pp_max_micro_batch_size=2)
    (speed,) = Plain().throughputs({}, [Run(shape, (2, 3, 5))])
    # 2 rounds of slots with 2 and 1 requests, 1 round with 1 and 1, 2 rounds with 1.
    assert speed == pytest.approx(10 / (2 * 2 + (3 - 2) * 1 + (5 - 3) * 1))


@pytest.mark.parametrize(
    ("cap", "per_visit", "gap_s", "sizes"),
    [
        (64, 64, None, [12]),
        (8, 64, None, [8, 4]),
        (64, 5, None, [5, 5, 2]),
        (64, 64, 0.05, [1] * 12),
    ],
)
def test_who_shares_a_slot(cap: int, per_visit: int, gap_s: float | None, sizes: list[int]) -> None:
    rival = Plain(per_visit)
    run = Run(replace(PP8, pp_max_micro_batch_size=cap), (7,) * 12, gap_s)
    rival.throughputs({}, [run])
    assert rival.seen == [sizes]


def test_requests_that_found_no_slot_follow_those_that_end() -> None:
    rival = Plain()
    shape = replace(PP8, pp_async_batch_depth=0, pp_max_micro_batch_size=1)
    (speed,) = rival.throughputs({}, [Run(shape, (10,) * 12)])
    assert rival.seen == [[1] * 8, [1] * 4]
    assert speed == pytest.approx(120 / 20)


def error_of(rival: ClosedForm) -> float:
    """The mean absolute error of a rival after its fit."""
    values = fit(rival, POINTS, rival.start, rounds=25)
    speeds = rival.throughputs(values, [run_of(point, NEAR) for point in POINTS])
    return statistics.fmean(
        abs(speed / point.tokens_per_s - 1) for speed, point in zip(speeds, POINTS, strict=True)
    )


def test_what_the_measurements_refute_and_what_they_do_not() -> None:
    assert error_of(CpuBound()) > 0.25
    assert error_of(ResultsQueue(8)) < error_of(Contention(8)) < 0.1
    assert error_of(OneSlot()) < 0.1


def test_a_fit_finds_the_parameters_that_made_the_figures() -> None:
    rival = ResultsQueue(8)
    truth = {**rival.start, "overlap": 0.3, "expert_s": 3e-4}
    speeds = rival.throughputs(truth, [run_of(point, NEAR) for point in POINTS])
    made = [replace(p, tokens_per_s=s) for p, s in zip(POINTS, speeds, strict=True)]
    found = fit(rival, made, rival.start, rounds=40)
    speeds_found = rival.throughputs(found, [run_of(point, NEAR) for point in POINTS])
    # The second law of the fit pulls a little: its lengths did not make the figures.
    assert speeds_found == pytest.approx(speeds, rel=0.08)
