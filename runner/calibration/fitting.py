"""The points of a study as a problem of least squares around a profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from runner.calibration.fit import Knowledge, Mask, Numbers, Problem, fit, knowledge, refine
from runner.calibration.model import CellModel, Simulated, Values
from runner.calibration.parameters import (
    RANKS_FACTOR,
    Parameter,
    parameters_of,
    with_values,
)
from runner.calibration.points import Cell, Evidence, Quantity, knows_ranks_factor
from runner.calibration.verdict import Verdict, verdicts
from runner.machine.hardware import Profile

NOT_SIMULATED_DEVIATION = 0.1
DIGITS = 5
TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Solution:
    """The best steps: `free` parameters moved, the others are not identified.

    `fitted` are the best steps when all may move.
    """

    steps: Numbers
    fitted: Numbers
    known: Knowledge
    verdicts: tuple[Verdict, ...]
    free: Mask


@dataclass(slots=True)
class Fitting:
    """The points of a study as a problem of least squares around a profile."""

    model: CellModel
    base: Profile
    evidence: Evidence
    parameters: tuple[Parameter, ...] = field(init=False)
    _log_measured: Numbers = field(init=False)
    _log_ratios: Numbers = field(init=False)
    _deviations: Numbers = field(init=False)

    def __post_init__(self) -> None:
        points = self.evidence.points
        backends = {each.planned.resolved.attention_backend for each in self.evidence.settings}
        self.parameters = tuple(
            each
            for each in parameters_of(self.base, backends)
            if each.name != RANKS_FACTOR or knows_ranks_factor(self.evidence)
        )
        self._log_measured = np.log([point.measured for point in points])
        self._log_ratios = np.zeros(len(points))
        self._deviations = np.array([point.deviation for point in points])

    def profile(self, steps: Numbers) -> Profile:
        """The profile that lies `steps` away from the base."""
        return with_values(self.base, self.values(steps))

    def values(self, steps: Numbers) -> Mapping[str, float]:
        """The parameters that differ from the base, as they are written."""
        return {
            parameter.name: float(f"{parameter.value(float(step)):.{DIGITS}g}")
            for parameter, step in zip(self.parameters, steps, strict=True)
            if step != 0.0
        }

    def solve(self, near: Numbers | None = None) -> Solution:
        """Fit everything, see what is known, and fit that alone; `near`: where to begin."""
        problem = self.problem()
        steps = fit(problem) if near is None else refine(problem, near, near != 0.0)
        known = knowledge(problem, steps)
        found = verdicts(known)
        free = np.array([each is not Verdict.NOT_IDENTIFIED for each in found], dtype=np.bool_)
        return Solution(refine(problem, steps, free), steps, known, found, free)

    def correct_at(self, profile: Profile, simulated: Mapping[Cell, Simulated]) -> float:
        """From now on the closed form is multiplied by what the simulation gives over it here.

        Answers how much that differs from before: the root mean square, relative.
        """
        old = self._log_ratios.copy()
        closed = self.model.closed_form(profile, list(simulated))
        for place, point in enumerate(self.evidence.points):
            own, spread = 0.0, NOT_SIMULATED_DEVIATION
            if point.cell in simulated:
                found = simulated[point.cell]
                own = _log(found.values[point.quantity]) - _log(closed[point.cell][point.quantity])
                spread = 0.0 if point.quantity is Quantity.POWER else found.spread
            self._log_ratios[place] = own
            self._deviations[place] = math.hypot(point.deviation, spread)
        return float(np.sqrt(np.mean((self._log_ratios - old) ** 2)))

    def problem(self) -> Problem:
        """As fit.py wants it."""

        def residuals(steps: Numbers) -> Numbers:
            moved = {
                parameter.name: parameter.value(float(step))
                for parameter, step in zip(self.parameters, steps, strict=True)
            }
            answers = self._log_answers(with_values(self.base, moved))
            return (answers - self._log_measured) / self._deviations

        return Problem(residuals, len(self.parameters))

    def answers(self, profile: Profile, simulated: Mapping[Cell, Simulated]) -> list[float]:
        """What the simulation has for each point; the closed form where nothing was simulated."""
        rest = [cell for cell in self.evidence.cells if cell not in simulated]
        values: dict[Cell, Values] = self.model.closed_form(profile, rest)
        values |= {cell: each.values for cell, each in simulated.items()}
        return [values[point.cell][point.quantity] for point in self.evidence.points]

    def misfit(self, profile: Profile, simulated: Mapping[Cell, Simulated]) -> float:
        """How far the simulated answers are from what was measured, as the fit weighs it."""
        logs = np.log(np.maximum(self.answers(profile, simulated), TINY))
        squares = ((logs - self._log_measured) / self._deviations) ** 2
        return float(np.sum(np.sqrt(1.0 + squares) - 1.0))

    def left_out(
        self,
        groups: Sequence[Sequence[int]],
        solution: Solution,
        on_progress: Callable[[float], None],
    ) -> dict[int, float]:
        """By its place, what a fit that did not see a point's setting has for it."""
        places = np.array([point.cell.setting for point in self.evidence.points])
        found: dict[int, float] = {}
        for done, group in enumerate(groups):
            is_out = np.isin(places, group)
            without = refine(self.problem(), solution.steps, solution.free, ~is_out)
            answers = np.exp(self._log_answers(self.profile(without)))
            found |= {int(place): float(answers[place]) for place in np.flatnonzero(is_out)}
            on_progress((done + 1) / len(groups))
        return found

    def _log_answers(self, profile: Profile) -> Numbers:
        closed = self.model.closed_form(profile, self.evidence.cells)
        logs = [_log(closed[point.cell][point.quantity]) for point in self.evidence.points]
        return np.array(logs) + self._log_ratios


def _log(value: float) -> float:
    return math.log(max(value, TINY))
