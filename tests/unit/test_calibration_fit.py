"""The fit and what it knows, on problems whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from runner.calibration.fit import Numbers, Problem, fit, knowledge, refine
from runner.calibration.parameters import Parameter
from runner.calibration.verdict import Verdict, known_together, verdicts

X = np.array([1.0, 2.0, 3.0, 4.0])
DEVIATION = 0.02


def sum_of_two(steps: Numbers) -> Numbers:
    """Points see a + b only, and c alone; nothing sees d."""
    a, b, c, _ = np.exp(steps)
    modelled = np.concatenate([(a + b) * X, c * X])
    measured = np.concatenate([2.6 * X, 1.5 * X])
    found: Numbers = np.log(modelled / measured) / DEVIATION
    return found


NAMES = tuple(Parameter(name, 1.0, 1.0) for name in "abcd")


def test_two_that_only_enter_as_a_sum_are_known_together() -> None:
    problem = Problem(sum_of_two, 4)
    steps = fit(problem)
    known = knowledge(problem, steps)
    found = verdicts(known)
    assert np.exp(steps[0]) + np.exp(steps[1]) == pytest.approx(2.6, rel=0.01)
    assert found == (Verdict.PARTLY, Verdict.PARTLY, Verdict.IDENTIFIED, Verdict.NOT_IDENTIFIED)
    assert known_together(NAMES, known, found) == (("a", "b"),)


def test_what_no_point_reacts_to_stays_where_it_is() -> None:
    problem = Problem(sum_of_two, 4)
    steps = fit(problem)
    known = knowledge(problem, steps)
    assert list(known.reacts) == [True, True, True, False]
    assert known.deviations[3] == 1.0
    assert steps[3] == 0.0
    assert np.exp(steps[2]) == pytest.approx(1.5, rel=0.01)


def test_only_what_is_free_moves() -> None:
    free = np.array([True, False, True, True])
    steps = refine(Problem(sum_of_two, 4), np.full(4, 0.5), free)
    assert steps[1] == 0.0
    assert np.exp(steps[0]) == pytest.approx(1.6, rel=0.01)


def line(outlier: float) -> Problem:
    """One parameter that ten points agree on, but for one of them."""
    wanted = np.full(10, np.log(1.2))
    wanted[4] += np.log(outlier)

    def residuals(steps: Numbers) -> Numbers:
        found: Numbers = (steps[0] * 0.3 - wanted) / DEVIATION
        return found

    return Problem(residuals, 1)


def test_a_point_that_drifted_does_not_decide() -> None:
    steady, drifted = (fit(line(outlier)) for outlier in (1.0, 0.5))
    assert np.exp(0.3 * steady[0]) == pytest.approx(1.2, rel=0.002)
    assert np.exp(0.3 * drifted[0]) == pytest.approx(1.2, rel=0.01)
    plain_mean = np.log(1.2) + np.log(0.5) / 10
    assert np.exp(plain_mean) < 1.2 * 0.94, "the mean would have been drawn away"


def test_rows_that_do_not_count_have_no_say() -> None:
    one = np.ones(1, dtype=np.bool_)
    rows = np.ones(10, dtype=np.bool_)
    rows[4] = False
    without = refine(line(0.5), np.zeros(1), one, rows)
    assert without[0] == pytest.approx(refine(line(1.0), np.zeros(1), one, rows)[0])


def test_a_step_hidden_behind_something_slower_is_found() -> None:
    """The start is on the flat of max(), the truth on its slope."""

    def residuals(steps: Numbers) -> Numbers:
        modelled = np.maximum(np.exp(0.7 * steps[0]) * X, 1.2 * X)
        found: Numbers = np.log(modelled / (1.6 * X)) / DEVIATION
        return found

    steps = fit(Problem(residuals, 1))
    assert np.exp(0.7 * steps[0]) == pytest.approx(1.6, rel=0.01)
