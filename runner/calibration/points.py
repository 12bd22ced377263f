"""What studies measured, as points that the model answers for. Pure.

Every valid rung of every complete trial counts, re-measurements too: they are evidence of their
own. So do the rungs that a pruned trial measured, or a study would know its winners only. A trial
that only shows the measurement of another one does not count. The setting of a point is what its
servers resolved to, not only what was asked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from runner.errors import ConfigError
from runner.forecast.setting import (
    MODELLED,
    PlannedSetting,
    kept_apart,
    not_modelled,
    plan_setting,
)
from runner.label import setting_label
from runner.machine.hardware import Profile
from runner.machine.shape import Refusal
from runner.plans import levels
from runner.settings import StudySettings
from runner.trial import Outcome, Params, ParamValue, RungResult, TrialLengths, TrialResult


class Quantity(StrEnum):
    """What is compared. The latencies are means over requests, as the model has them."""

    THROUGHPUT = "output_throughput"
    TTFT = "ttft_s"
    TPOT = "tpot_s"
    POWER = "power_w"


MODEL_DEVIATION: Mapping[Quantity, float] = {
    Quantity.THROUGHPUT: 0.04,
    Quantity.TTFT: 0.1,
    Quantity.TPOT: 0.04,
    Quantity.POWER: 0.04,
}
"""How exact the model itself is expected to be: relative standard deviations.

Throughput and time per token of a rung tell nearly the same, so each counts as sqrt(2) * 3 %.
"""

MEASURED = (Outcome.COMPLETE, Outcome.PRUNED)
METASTABLE_DEVIATION = 0.1
Z95 = 1.96
FEWEST_RUNGS = 2
OF_MEMORY = frozenset({"mem_fraction_static", "max_total_tokens"})


@dataclass(frozen=True, slots=True)
class StudyRecord:
    """A study and what it has measured."""

    settings: StudySettings
    results: tuple[TrialResult, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One rung of a measured setting, in a study (by their places): what the model is asked."""

    study: int
    setting: int
    lengths: TrialLengths
    level: float


@dataclass(frozen=True, slots=True)
class Point:
    """One measured number. `deviation` is relative: of the measurement and the model together."""

    trial: int
    cell: Cell
    quantity: Quantity
    measured: float
    deviation: float


@dataclass(frozen=True, slots=True)
class MeasuredSetting:
    """A setting as its servers ran."""

    label: str
    planned: PlannedSetting


@dataclass(frozen=True, slots=True)
class Evidence:
    """What studies offer: their points by trial.

    `trials` is how many it comes from, `skipped` counts by reason those that by the model cannot
    run, and `not_modelled` are parameters of these settings that the model does not know. A setting
    that several studies measured is one.
    """

    studies: tuple[StudySettings, ...]
    settings: tuple[MeasuredSetting, ...]
    points: tuple[Point, ...]
    trials: int
    skipped: Mapping[str, int]
    not_modelled: tuple[str, ...]

    @property
    def cells(self) -> tuple[Cell, ...]:
        """What the model is asked for, each once."""
        return tuple(dict.fromkeys(point.cell for point in self.points))

    def planned(self, cell: Cell) -> PlannedSetting:
        """The setting of a cell."""
        return self.settings[cell.setting].planned


def evidence_of(profile: Profile, *records: StudyRecord) -> Evidence:
    """The points of studies; raises ConfigError when there are too few to fit anything."""
    places: dict[Hashable, int] = {}
    settings: list[MeasuredSetting] = []
    points: list[Point] = []
    skipped: Counter[str] = Counter()
    names: list[str] = []
    trials = 0
    for study, result in _measured_trials(records):
        settings_of = records[study].settings
        planned = _as_it_ran(settings_of, profile, result)
        if isinstance(planned, Refusal):
            skipped[planned.text] += 1
            continue
        place = places.get(identity := _identity(result.params, planned), len(settings))
        found = _points(settings_of, result, study, place)
        if not found:
            continue
        if place == len(settings):
            places[identity] = place
            settings.append(MeasuredSetting(setting_label(result.params), planned))
        points += found
        names += (*settings_of.engine.args, *result.params)
        trials += 1
    rungs = len({(point.trial, point.cell) for point in points})
    if rungs < FEWEST_RUNGS:
        raise ConfigError(_too_few(records, rungs, skipped))
    for place, record in enumerate(records):
        if all(point.cell.study != place for point in points):
            raise ConfigError(f"{_too_few((record,), 0, {})}, or leave it out")
    studies = tuple(record.settings for record in records)
    return Evidence(
        studies, tuple(settings), tuple(points), trials, dict(skipped), not_modelled(names)
    )


def knows_ranks_factor(evidence: Evidence) -> bool:
    """Whether eager launches of one GPU are there to compare those of several with.

    Without them only the product of `eager_ranks_factor` and `eager_layer_s` shows.
    """
    shapes = [setting.planned.shape for setting in evidence.settings]
    is_alone = any(shape.gpus == 1 and not shape.cuda_graph for shape in shapes)
    return is_alone or all(shape.gpus == 1 for shape in shapes)


def _measured_trials(records: Sequence[StudyRecord]) -> Iterator[tuple[int, TrialResult]]:
    """Each trial that has a measurement of its own, with its study's place."""
    for study, record in enumerate(records):
        for result in record.results:
            if result.outcome in MEASURED and result.shares is None:
                yield study, result


def _as_it_ran(
    study: StudySettings, profile: Profile, result: TrialResult
) -> PlannedSetting | Refusal:
    """The setting with what its servers resolved to.

    Where the model's memory does not hold what they report, its own sizes are taken.
    """
    known: dict[str, ParamValue] = {
        name: value for name, value in result.resolved.items() if name in MODELLED
    }
    if "cuda_graph_backend_decode" in {**study.engine.args, **result.params}:
        known.pop("cuda_graph", None)  # the same flag
    planned = plan_setting(study, profile, {**result.params, **known})
    if isinstance(planned, Refusal):
        sizes = {name: value for name, value in known.items() if name not in OF_MEMORY}
        planned = plan_setting(study, profile, {**result.params, **sizes})
    return planned


def _identity(params: Params, planned: PlannedSetting) -> Hashable:
    """Equal for trials of one setting, whatever is set live and whatever memory a server finds."""
    return (
        replace(
            planned.shape,
            pp_max_micro_batch_size=None,
            max_running_requests=None,
            cuda_graph_max_bs=None,
            mem_fraction_static=None,
            max_total_tokens=None,
        ),
        planned.cap if planned.shape.pp_size > 1 else None,
        planned.most_running,
        planned.dp_size,
        tuple(params.get(name) for name in ("cuda_graph_max_bs", *sorted(OF_MEMORY))),
        kept_apart(params),
    )


def _points(settings: StudySettings, result: TrialResult, study: int, place: int) -> list[Point]:
    ladder = levels(settings)
    found: list[Point] = []
    for rung in result.rungs:
        if not rung.valid or not 0 <= rung.position < len(ladder):
            continue
        cell = Cell(study, place, result.lengths, ladder[rung.position])
        found += [
            Point(result.number, cell, quantity, value, _deviation(rung, quantity))
            for quantity, value in _measured(rung)
            if value is not None and value > 0.0
        ]
    return found


def _measured(rung: RungResult) -> Sequence[tuple[Quantity, float | None]]:
    """The numbers of a rung; None: it has no value."""
    return (
        (Quantity.THROUGHPUT, rung.output_throughput),
        (Quantity.TTFT, None if rung.ttft_s is None else rung.ttft_s.mean),
        (Quantity.TPOT, None if rung.tpot_s is None else rung.tpot_s.mean),
        (Quantity.POWER, rung.power_w),
    )


def _deviation(rung: RungResult, quantity: Quantity) -> float:
    """Of the model, and of the rate where its restarts tell; a time per token is one over it."""
    parts = [MODEL_DEVIATION[quantity]]
    if rung.metastable:
        parts.append(METASTABLE_DEVIATION)
    if rung.output_throughput_halfwidth is not None and rung.output_throughput > 0.0:
        parts.append(rung.output_throughput_halfwidth / Z95 / rung.output_throughput)
    return math.hypot(*parts) if quantity is not Quantity.POWER else parts[0]


def _too_few(records: Sequence[StudyRecord], count: int, skipped: Mapping[str, int]) -> str:
    found = "no measured rung" if count == 0 else f"{count} measured rung"
    names = ", ".join(record.settings.name for record in records)
    who = f"study {names} has" if len(records) == 1 else f"studies {names} have"
    text = (
        f"{who} {found} to calibrate from, {FEWEST_RUNGS} are needed; let runner "
        "tune measure more settings first"
    )
    if skipped:
        reason, trials = max(skipped.items(), key=lambda item: item[1])
        text += f". By the profile {trials} of its trials cannot run: {reason}; "
        text += "start from another profile: --profile"
    return text
