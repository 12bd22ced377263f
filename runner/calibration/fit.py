"""The fit itself: least squares over measured points and what was thought before. Numbers only.

Minimises sum rho(((log model - log measured) / deviation) ** 2) + sum steps ** 2, where parameters
are counted in prior standard deviations from their start (so the second sum is the prior: the fit
is a maximum a posteriori estimate), and rho(z) = 2 (sqrt(1 + z) - 1) lets no point that drifted
decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Numbers: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

WIDE, COARSE, FINE = 2.0, 0.5, 0.05
"""Steps of derivatives in prior deviations: wide ones see over the flat of what is hidden now."""

MOST_STEPS = 6.0  # how many prior deviations a parameter may move
FLAT = 1e-3  # of a point's deviation: a prior deviation that moves no point by more has no effect
COARSE_ROUNDS, FINE_ROUNDS = 8, 20
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Problem:
    """`residuals(steps)` are all points' (log model - log measured) / deviation."""

    residuals: Callable[[Numbers], Numbers]
    parameters: int


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What the points say of each parameter, in prior deviations.

    `deviations` are its posterior standard deviations (1: the points say nothing), `correlations`
    of each two, and `reacts` whether any point reacts to it at all.
    """

    deviations: Numbers
    correlations: Numbers
    reacts: Mask


def fit(problem: Problem) -> Numbers:
    """The best steps from where nothing has moved; what no point reacts to stays 0."""
    steps = np.zeros(problem.parameters)
    free = _reacts(_central(problem, steps, WIDE))
    for width, rounds in ((COARSE, COARSE_ROUNDS), (FINE, FINE_ROUNDS)):
        steps = _descend(problem, steps, free, None, width, rounds)
    return steps


def refine(problem: Problem, start: Numbers, free: Mask, rows: Mask | None = None) -> Numbers:
    """The best steps from a start that is near; what is not `free` stays 0.

    `rows`: the points that count; None: all.
    """
    return _descend(problem, np.where(free, start, 0.0), free, rows, FINE, FINE_ROUNDS)


def knowledge(problem: Problem, steps: Numbers) -> Knowledge:
    """What the points say around `steps`; those that are far off count less, as in the fit."""
    base = problem.residuals(steps)
    jacobian = _central(problem, steps, FINE)
    weighted = jacobian * (1.0 + base**2)[:, None] ** -0.25
    covariance = np.linalg.inv(weighted.T @ weighted + np.eye(problem.parameters))
    deviations = np.sqrt(np.diag(covariance))
    correlations = covariance / np.outer(deviations, deviations)
    return Knowledge(deviations, correlations, _reacts(jacobian))


def _descend(
    problem: Problem, start: Numbers, free: Mask, rows: Mask | None, width: float, rounds: int
) -> Numbers:
    places = np.flatnonzero(free)
    if not places.size:
        return start

    def whole(part: Numbers) -> Numbers:
        steps = start.copy()
        steps[places] = part
        return steps

    last: dict[bytes, Numbers] = {}

    def residuals(part: Numbers) -> Numbers:
        found = problem.residuals(whole(part))
        last.clear()
        last[part.tobytes()] = found
        return np.concatenate([_chosen(found, rows), part])

    def jacobian(part: Numbers) -> Numbers:
        base = last.get(part.tobytes())
        columns = _forward(problem, whole(part), places, width, base)
        return np.vstack([_chosen(columns, rows), np.eye(places.size)])

    def loss(squares: Numbers) -> Numbers:
        """Value, slope and curvature of rho: soft for points, plain for the prior."""
        rho = np.vstack([squares, np.ones_like(squares), np.zeros_like(squares)])
        root = np.sqrt(1.0 + squares[: -places.size])
        rho[:, : -places.size] = (2.0 * (root - 1.0), 1.0 / root, -0.5 / root**3)
        return rho

    found = least_squares(
        residuals,
        np.clip(start[places], -MOST_STEPS, MOST_STEPS),
        jac=jacobian,
        bounds=(-MOST_STEPS - 1.0, MOST_STEPS + 1.0),
        loss=loss,
        ftol=TOLERANCE,
        xtol=TOLERANCE,
        max_nfev=rounds,
    )
    return whole(np.asarray(found.x, dtype=np.float64))


def _reacts(jacobian: Numbers) -> Mask:
    """Whether any point reacts to each parameter."""
    found: Mask = np.any(np.abs(jacobian) > FLAT, axis=0)
    return found


def _chosen(values: Numbers, rows: Mask | None) -> Numbers:
    return values if rows is None else values[rows]


def _forward(
    problem: Problem, steps: Numbers, places: NDArray[np.intp], width: float, base: Numbers | None
) -> Numbers:
    """Forward differences: one column for each place; `base` are the residuals at `steps`."""
    if base is None:
        base = problem.residuals(steps)
    return np.column_stack([(_moved(problem, steps, at, width) - base) / width for at in places])


def _central(problem: Problem, steps: Numbers, width: float) -> Numbers:
    """Central differences: one column for each parameter."""
    columns = [
        (_moved(problem, steps, at, width) - _moved(problem, steps, at, -width)) / (2.0 * width)
        for at in range(problem.parameters)
    ]
    return np.column_stack(columns)


def _moved(problem: Problem, steps: Numbers, at: int, width: float) -> Numbers:
    moved = steps.copy()
    moved[at] += width
    return problem.residuals(moved)
