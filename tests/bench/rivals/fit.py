"""Least squares on logarithms: each parameter is positive, each error relative. Deterministic.

Levenberg and Marquardt's method with a Jacobian from differences. Every mechanism is fitted to the
same points under the same two laws of lengths, of which the wide one counts half; TP8 at 32
requests counts four times, because it is all that is known of batches under tensor parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tests.bench.rivals.measured import NEAR, WIDE, Law, Point, Run, log_error, run_of

LAW_WEIGHTS: tuple[tuple[Law, float], ...] = ((NEAR, 1.0), (WIDE, 0.5))
POINT_WEIGHTS = {"tp8 C=32": 4.0}
DIFFERENCE = 0.03
DAMPING = 1e-2
FACTOR = 5.0
TRIES = 4

Values: TypeAlias = Mapping[str, float]
Vector: TypeAlias = npt.NDArray[np.float64]


class Mechanism(Protocol):
    """A way to explain the throughputs."""

    name: str
    about: str
    start: Values
    scale: float

    def throughputs(self, values: Values, runs: Sequence[Run]) -> list[float]:
        """Tokens/s of each run."""


def fit(mechanism: Mechanism, points: Sequence[Point], start: Values, rounds: int) -> Values:
    """The parameters, from `start`, after at most `rounds` steps."""
    names = list(start)
    runs = [run_of(point, law, mechanism.scale) for law, _ in LAW_WEIGHTS for point in points]
    weights = [
        weight * POINT_WEIGHTS.get(point.name, 1.0) for _, weight in LAW_WEIGHTS for point in points
    ]
    measured = [point.tokens_per_s for _ in LAW_WEIGHTS for point in points]

    def residuals(logs: Vector) -> Vector:
        values = dict(zip(names, np.exp(logs).tolist(), strict=True))
        modelled = mechanism.throughputs(values, runs)
        errors = map(log_error, modelled, measured)
        return np.array([w * e for w, e in zip(weights, errors, strict=True)])

    logs = _minimize(residuals, np.array([math.log(start[name]) for name in names]), rounds)
    return dict(zip(names, np.exp(logs).tolist(), strict=True))


def cost(mechanism: Mechanism, points: Sequence[Point], values: Values) -> float:
    """The sum that `fit` makes small."""
    total = 0.0
    for law, weight in LAW_WEIGHTS:
        runs = [run_of(point, law, mechanism.scale) for point in points]
        modelled = mechanism.throughputs(values, runs)
        for point, speed in zip(points, modelled, strict=True):
            share = weight * POINT_WEIGHTS.get(point.name, 1.0)
            total += (share * log_error(speed, point.tokens_per_s)) ** 2
    return total


def leave_one_out(
    mechanism: Mechanism,
    points: Sequence[Point],
    values: Values,
    rounds: int,
    on_point: Callable[[str], None],
) -> dict[str, float]:
    """For each PP graph point: its error (law NEAR) when the fit has not seen it."""
    errors: dict[str, float] = {}
    for left_out in points:
        if not left_out.is_pp_graph:
            continue
        on_point(f"{mechanism.name}: without {left_out.name}")
        rest = [point for point in points if point is not left_out]
        refitted = fit(mechanism, rest, values, rounds)
        run = run_of(left_out, NEAR, mechanism.scale)
        (speed,) = mechanism.throughputs(refitted, [run])
        errors[left_out.name] = speed / left_out.tokens_per_s - 1.0
    return errors


def _minimize(residuals: Callable[[Vector], Vector], logs: Vector, rounds: int) -> Vector:
    damping = DAMPING
    errors = residuals(logs)
    steps = np.eye(len(logs)) * DIFFERENCE
    for _ in range(rounds):
        jacobian = np.array([(residuals(logs + step) - errors) / DIFFERENCE for step in steps]).T
        for _ in range(TRIES):
            normal = jacobian.T @ jacobian + damping * np.eye(len(logs))
            move = -np.linalg.solve(normal, jacobian.T @ errors)
            moved = residuals(logs + move)
            if moved @ moved < errors @ errors:
                logs, errors, damping = logs + move, moved, damping / FACTOR
                break
            damping *= FACTOR
        else:
            break
    return logs
