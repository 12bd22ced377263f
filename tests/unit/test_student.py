from __future__ import annotations

import pytest

from runner.measure.student import student_t


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (2, 4.303), (10, 2.228), (12, 2.179), (20, 2.086), (60, 2.0)]
)
def test_quantiles_are_students(freedom: int, t: float) -> None:
    assert student_t(freedom) == pytest.approx(t, rel=0.005)
