"""Refits a profile from what studies measured, and says how far it is off then.

The closed form is fitted, times what the simulation gives over it: found at the starting profile,
and again at each fit, until that changes no more. What the data cannot tell goes back to its start
exactly, and the rest is fitted once more. Errors before and after are those of the simulation, as
`runner predict` has them; those of settings that were left out are of the closed form times the
last ratios, at fits that did not see these settings.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from runner.calibration.fit import Numbers
from runner.calibration.fitting import Fitting, Solution
from runner.calibration.model import CellModel, Simulated
from runner.calibration.parameters import Parameter
from runner.calibration.points import Cell, Evidence, Point, Quantity
from runner.calibration.starts import StartChange
from runner.calibration.verdict import Verdict, known_together, reason_of
from runner.forecast.predict import Progress
from runner.machine.hardware import Profile

FEWEST_SETTINGS = 4  # with fewer, leaving one out says nothing
MOST_FOLDS = 10
MOST_ROUNDS, SETTLED = 3, 0.005
"""While the simulation over the closed form changes by more, it is fitted again, but so often."""

BEFORE_SHARE, ROUNDS_SHARE, FOLDS_SHARE = 0.15, 0.6, 0.25
"""Of the whole work, when every round is needed."""

SUFFIX = "-calibrated"


@dataclass(frozen=True, slots=True)
class PointResult:
    """One measured number and what the model has for it; `left_out` None: it never was."""

    point: Point
    before: float
    after: float
    left_out: float | None


@dataclass(frozen=True, slots=True)
class QuantityErrors:
    """Mean absolute relative errors of one quantity."""

    quantity: Quantity
    points: int
    before: float
    after: float
    left_out: float | None


@dataclass(frozen=True, slots=True)
class FittedParameter:
    """A parameter after the fit; `deviation` is the standard deviation of its logarithm.

    One that is not identified has its starting value and a `reason`.
    """

    parameter: Parameter
    value: float
    deviation: float
    verdict: Verdict
    reason: str | None


@dataclass(frozen=True, slots=True)
class Calibration:
    """What came out: `profile` is whole, with its errors in its `fit`.

    `together` are groups of parameters of which only a combination is known; `folds` is how often
    settings were left out (0: too few of them), `simulated` how many rungs the simulation answered
    for, of `rungs`.
    """

    start: Profile
    profile: Profile
    evidence: Evidence
    points: tuple[PointResult, ...]
    errors: tuple[QuantityErrors, ...]
    parameters: tuple[FittedParameter, ...]
    together: tuple[tuple[str, ...], ...]
    starts: tuple[StartChange, ...]
    folds: int
    simulated: int
    rungs: int

    @property
    def studies(self) -> tuple[str, ...]:
        """The names of the studies."""
        return tuple(study.name for study in self.evidence.studies)

    @property
    def settings(self) -> int:
        """How many different settings were measured."""
        return len(self.evidence.settings)


def calibrate(
    start: Profile,
    evidence: Evidence,
    base: Profile | None = None,
    starts: Sequence[StartChange] = (),
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Calibration:
    """Fit the profile `start`.

    Args:
        start: the profile as it is used now; errors before are its own.
        evidence: what was measured.
        base: `start` with what needs no fit (idle watts, start costs); None: `start`.
        starts: the start costs that differ in `base`.
        on_progress: told how far it is.
    """
    stages = _Stages(on_progress)
    fitting = Fitting(CellModel(evidence), base or start, evidence)
    before = fitting.model.simulate(start, stages.next(BEFORE_SHARE))
    fitting.correct_at(start, before)
    best = settle(fitting, stages)
    solution, profile, after = best.solution, best.profile, best.simulated
    groups = folds(len(evidence.settings))
    left_out = fitting.left_out(groups, solution, stages.next(FOLDS_SHARE))
    points = tuple(
        PointResult(point, old, new, left_out.get(place))
        for place, (point, old, new) in enumerate(
            zip(
                evidence.points,
                fitting.answers(start, before),
                fitting.answers(profile, after),
                strict=True,
            )
        )
    )
    calibration = Calibration(
        start=start,
        profile=profile,
        evidence=evidence,
        points=points,
        errors=errors_of(points),
        parameters=fitted(fitting, solution),
        together=known_together(fitting.parameters, solution.known, solution.verdicts),
        starts=tuple(starts),
        folds=len(groups),
        simulated=len(fitting.model.simulated),
        rungs=len(evidence.cells),
    )
    name = start.name if start.name.endswith(SUFFIX) else start.name + SUFFIX
    named = replace(profile, name=name, fit=fit_words(calibration))
    return replace(calibration, profile=replace(named, measured_gpus=_measured_gpus(calibration)))


def _measured_gpus(calibration: Calibration) -> int | None:
    """The start's, or that of the studies where they had larger servers."""
    before = calibration.start.measured_gpus
    sizes = (each.planned.shape.gpus for each in calibration.evidence.settings)
    return None if before is None else max(before, *sizes)


@dataclass(frozen=True, slots=True)
class Round:
    """One fit, and what its profile gives by simulation."""

    solution: Solution
    profile: Profile
    simulated: Mapping[Cell, Simulated]
    misfit: float


def settle(fitting: Fitting, stages: _Stages) -> Round:
    """Fit, and simulate what came out, until that changes the correction no more.

    Where it goes back and forth (equal lengths lock into one phase or another), the best counts.
    """
    rounds: list[Round] = []
    near: Numbers | None = None
    for _ in range(MOST_ROUNDS):
        solution = fitting.solve(near)
        profile = fitting.profile(solution.steps)
        simulated = fitting.model.simulate(profile, stages.next(ROUNDS_SHARE / MOST_ROUNDS))
        change = fitting.correct_at(profile, simulated)
        misfit = fitting.misfit(profile, simulated)
        rounds.append(Round(solution, profile, simulated, misfit))
        if change < SETTLED:
            break
        near = solution.fitted
    best = min(rounds, key=lambda each: each.misfit)
    fitting.correct_at(best.profile, best.simulated)
    return best


def folds(settings: int) -> list[list[int]]:
    """Which settings are left out together: one at a time, or in `MOST_FOLDS` groups."""
    if settings < FEWEST_SETTINGS:
        return []
    count = min(settings, MOST_FOLDS)
    return [list(range(first, settings, count)) for first in range(count)]


def errors_of(points: Sequence[PointResult]) -> tuple[QuantityErrors, ...]:
    """The mean errors of each quantity that was measured."""
    found = []
    for quantity in Quantity:
        own = [each for each in points if each.point.quantity is quantity]
        if own:
            lefts = [_error(each.left_out, each.point) for each in own if each.left_out is not None]
            found.append(
                QuantityErrors(
                    quantity,
                    len(own),
                    statistics.fmean(_error(each.before, each.point) for each in own),
                    statistics.fmean(_error(each.after, each.point) for each in own),
                    statistics.fmean(lefts) if lefts else None,
                )
            )
    return tuple(found)


def fitted(fitting: Fitting, solution: Solution) -> tuple[FittedParameter, ...]:
    """Every parameter with its value and verdict."""
    values, known = fitting.values(solution.steps), solution.known
    return tuple(
        FittedParameter(
            parameter,
            values.get(parameter.name, parameter.start),
            float(known.deviations[place]) * parameter.deviation,
            verdict,
            reason_of(parameter, fitting.evidence, reacts=bool(known.reacts[place]))
            if verdict is Verdict.NOT_IDENTIFIED
            else None,
        )
        for place, (parameter, verdict) in enumerate(
            zip(fitting.parameters, solution.verdicts, strict=True)
        )
    )


def fit_words(calibration: Calibration) -> str:
    """How the numbers were found and how far they are off, for the profile itself."""
    evidence = calibration.evidence
    words = (
        f"calibrated from {' and '.join(calibration.studies)}: {len(evidence.points)} points of "
        f"{evidence.trials} trials, {calibration.settings} settings; mean errors before, after"
        f"{' and left out' if calibration.folds else ''}:"
    )
    parts = []
    for each in calibration.errors:
        numbers = [each.before, each.after, *([] if each.left_out is None else [each.left_out])]
        parts.append(f" {each.quantity} {' / '.join(f'{100 * n:.1f}' for n in numbers)} %")
    words += ",".join(parts)
    unknown = [
        each.parameter.name
        for each in calibration.parameters
        if each.verdict is Verdict.NOT_IDENTIFIED
    ]
    return f"{words}; not identified: {', '.join(unknown)}" if unknown else words


def _error(modelled: float, point: Point) -> float:
    return abs(modelled / point.measured - 1.0)


class _Stages:
    """Shares of the whole work, one after another."""

    def __init__(self, on_progress: Callable[[Progress], None]) -> None:
        self._on_progress = on_progress
        self._begun = 0.0

    def next(self, share: float) -> Callable[[float], None]:
        """Begin the next stage, which is so much of the whole; it is told its own share done."""
        begin = self._begun
        self._begun += share
        return lambda done: self._on_progress(Progress(begin + share * done, 1.0))
