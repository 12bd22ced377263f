"""What a calibration looks like: one JSON document, or tables and the next commands."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from runner.calibration.calibrate import (
    Calibration,
    FittedParameter,
    PointResult,
    QuantityErrors,
)
from runner.calibration.files import CalibrationFiles, point_documents
from runner.calibration.parameters import EAGER_LAYER, RANKS_FACTOR, absent_from
from runner.calibration.points import Quantity, knows_ranks_factor
from runner.calibration.verdict import Verdict
from runner.insight.forecast_view import show
from runner.insight.words import not_modelled_words

PADDING = (0, 2, 0, 0)
WORST = 5
LEAST_CHANGE = 0.01  # of a start cost, of an error; smaller ones are not worth a word
UNLIKELY = 3.0  # prior deviations from the start
TOO_FAR = 0.2
"""A profile whose throughput is further off foretells nothing."""
NAMES: Mapping[Quantity, str] = {
    Quantity.THROUGHPUT: "throughput",
    Quantity.TTFT: "TTFT (mean)",
    Quantity.TPOT: "TPOT (mean)",
    Quantity.POWER: "power",
}


def calibration_document(calibration: Calibration, files: CalibrationFiles) -> dict[str, object]:
    """The JSON answer of `runner calibrate`."""
    evidence = calibration.evidence
    return {
        "studies": list(calibration.studies),
        "start": calibration.start.name,
        "profile": calibration.profile.name,
        "profile_path": str(files.profile),
        "residuals_path": str(files.residuals),
        "trials": evidence.trials,
        "settings": calibration.settings,
        "points": len(evidence.points),
        "skipped": dict(evidence.skipped),
        "not_modelled": list(evidence.not_modelled),
        "folds": calibration.folds,
        "rungs": calibration.rungs,
        "simulated_rungs": calibration.simulated,
        "errors": [
            {
                "quantity": str(each.quantity),
                "points": each.points,
                "before": each.before,
                "after": each.after,
                "left_out": each.left_out,
            }
            for each in calibration.errors
        ],
        "parameters": [_parameter_document(each) for each in calibration.parameters],
        "known_together": [list(group) for group in calibration.together],
        "start_costs": [
            {
                "name": each.name,
                "start": each.start,
                "value": each.value,
                "launches": each.launches,
            }
            for each in calibration.starts
        ],
        "residuals": point_documents(calibration),
    }


def print_calibration(calibration: Calibration, files: CalibrationFiles, stream: TextIO) -> None:
    """Errors, parameters, the worst points, and how to use the profile."""
    evidence = calibration.evidence
    title = (
        f"{', '.join(calibration.studies)}: {len(evidence.points)} points of {evidence.trials} "
        f"trials, {calibration.settings} settings; from {calibration.start.name}"
    )
    parts: list[RenderableType] = [Text(title, style="bold"), _errors(calibration)]
    parts += [Text(words) for words in _notes(calibration)]
    parts += [Text(words, style="yellow") for words in _warnings(calibration)]
    parts += [Text(), _parameters(calibration)]
    parts += [Text(words) for words in _kept_words(calibration)]
    parts += [
        Text(f"Only known together, not one by one: {', '.join(group)}.", style="yellow")
        for group in calibration.together
    ]
    if words := _start_words(calibration):
        parts.append(Text(words))
    parts += [Text("\nThe worst points", style="bold"), _worst(calibration)]
    show(parts, stream)
    stream.write(f"\nprofile    {files.profile}\nresiduals  {files.residuals}\n")
    if not any(map(_is_bad, calibration.errors)):
        path = shlex.quote(str(files.profile))
        stream.write(
            f"use it     runner plan STUDY.yaml --set engine.profile={path}\n"
            f"           runner predict STUDY.yaml --params NAME=VALUE,... "
            f"--set engine.profile={path}\n"
        )


def _errors(calibration: Calibration) -> Table:
    table = _table("mean error", "points", "before", "after", "left out")
    for each in calibration.errors:
        left_out = "-" if each.left_out is None else f"{each.left_out:.1%}"
        table.add_row(
            NAMES[each.quantity],
            str(each.points),
            f"{each.before:.1%}",
            f"{each.after:.1%}",
            left_out,
        )
    return table


def _notes(calibration: Calibration) -> list[str]:
    evidence = calibration.evidence
    notes = []
    if calibration.folds == 0:
        notes.append(
            f"Too few settings to leave one out ({calibration.settings}): how far the profile "
            "holds for other settings is not known."
        )
    elif calibration.folds < calibration.settings:
        notes.append(f"Left out: a tenth of the settings at a time, {calibration.folds} times.")
    else:
        notes.append("Left out: each setting foretold by a fit that did not see it.")
    if calibration.simulated < calibration.rungs:
        notes.append(
            f"{calibration.simulated} of {calibration.rungs} rungs were simulated; for the others "
            "the closed form stands."
        )
    notes += [
        f"Left aside: {trials} trials that by the profile cannot run: {reason}."
        for reason, trials in evidence.skipped.items()
    ]
    if evidence.not_modelled:
        notes.append(not_modelled_words(evidence.not_modelled))
    return notes


def _parameters(calibration: Calibration) -> Table:
    table = Table(box=None, padding=PADDING, pad_edge=False)
    table.add_column("parameter", no_wrap=True)
    for title in ("start", "fitted", "+-"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for each in calibration.parameters:
        if each.verdict is not Verdict.NOT_IDENTIFIED:
            table.add_row(
                each.parameter.name,
                f"{each.parameter.start:.4g}",
                f"{each.value:.4g}",
                f"{math.expm1(each.deviation):.0%}",
                str(each.verdict),
            )
    return table


def _kept_words(calibration: Calibration) -> Iterator[str]:
    """What the verdicts mean, and what keeps its start, a line for each reason."""
    yield "identified: the data leave less than half of what was uncertain before; partly: more."
    by_reason: dict[str, list[str]] = {}
    for each in calibration.parameters:
        if each.verdict is Verdict.NOT_IDENTIFIED:
            by_reason.setdefault(each.reason or "", []).append(each.parameter.name)
    for reason, names in by_reason.items():
        yield f"Not identified, kept as before ({reason}): {', '.join(names)}."
    is_eager_known = any(
        each.parameter.name == EAGER_LAYER and each.verdict is not Verdict.NOT_IDENTIFIED
        for each in calibration.parameters
    )
    if is_eager_known and not knows_ranks_factor(calibration.evidence):
        yield (
            f"Not fitted: {RANKS_FACTOR}. No server of one GPU without CUDA graphs was measured, "
            f"so {EAGER_LAYER} stands for both."
        )
    if absent := absent_from(calibration.start):
        yield (
            "Not fitted, for the profile has 0 there, which says that the effect is not there: "
            f"{', '.join(absent)}."
        )


def _warnings(calibration: Calibration) -> Iterator[str]:
    """Where the fit is not to be trusted, or has made something worse."""
    for each in filter(_is_bad, calibration.errors):
        off = _final(each)
        if off > TOO_FAR:
            yield (
                f"The model does not explain these trials: throughput is {off:.0%} off after the "
                "fit. Do not use this profile; the machine, or its emulation, did something that "
                "the model does not know."
            )
        if off >= each.before:
            seen = "" if each.left_out is None else " for settings it has not seen"
            yield (
                f"No better than the profile it started from: throughput is {off:.1%} off{seen}, "
                f"{each.before:.1%} before. Keep that one."
            )
    for fitted in calibration.parameters:
        parameter = fitted.parameter
        if abs(parameter.steps(fitted.value)) > UNLIKELY:
            yield (
                f"{parameter.name} is {fitted.value / parameter.start:.2g} times what it was, more "
                "than it can well be off: something that the model does not know has bent it, so "
                "the profile may mislead beyond these settings."
            )
    studies = calibration.evidence.studies
    if alike := [study.name for study in studies if study.workload.remembers_start]:
        yield (
            f"Replies of {', '.join(alike)} are of like length, so times to the first token depend "
            "on which requests fall into step: numbers that they decide (host.http_s, "
            "host.accept_s) may be bent. Studies of uneven replies tell more."
        )
    worse = [NAMES[e.quantity] for e in calibration.errors if e.after > e.before + LEAST_CHANGE]
    if worse:
        yield f"Further off than before, for the sake of the others: {', '.join(worse)}."


def _is_bad(error: QuantityErrors) -> bool:
    """Whether a profile with this error had better not be used."""
    off = _final(error)
    return error.quantity is Quantity.THROUGHPUT and (off > TOO_FAR or off >= error.before)


def _final(error: QuantityErrors) -> float:
    """Of settings that the fit has not seen, as far as there are any."""
    return error.after if error.left_out is None else error.left_out


def _start_words(calibration: Calibration) -> str:
    changes = [
        f"{each.name} {each.start:.4g} -> {each.value:.4g}"
        for each in calibration.starts
        if abs(each.value / each.start - 1.0) > LEAST_CHANGE
    ]
    words = ", ".join(changes)
    return f"Start costs, from the launches' phases: {words}." if changes else ""


def _worst(calibration: Calibration) -> Table:
    table = _table("setting", "trial", "C", "quantity", "measured", "before", "after", "left out")
    studies = calibration.studies
    is_one = len(studies) == 1
    ordered = sorted(calibration.points, key=_error, reverse=True)
    for each in ordered[:WORST]:
        point = each.point
        table.add_row(
            calibration.evidence.settings[point.cell.setting].label,
            f"#{point.trial}" if is_one else f"{studies[point.cell.study]} #{point.trial}",
            f"{point.cell.level:g}",
            NAMES[point.quantity],
            f"{point.measured:.4g}",
            _off(each.before, point.measured),
            _off(each.after, point.measured),
            "-" if each.left_out is None else _off(each.left_out, point.measured),
        )
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=PADDING, pad_edge=False)
    for place, title in enumerate(titles):
        table.add_column(title, justify="right" if place else "left", no_wrap=place > 0)
    return table


def _error(each: PointResult) -> float:
    return abs(each.after / each.point.measured - 1.0)


def _off(modelled: float, measured: float) -> str:
    return f"{modelled / measured - 1.0:+.1%}"


def _parameter_document(each: FittedParameter) -> dict[str, object]:
    return {
        "name": each.parameter.name,
        "start": each.parameter.start,
        "value": each.value,
        "relative_deviation": math.expm1(each.deviation),
        "verdict": str(each.verdict),
        "reason": each.reason,
    }
