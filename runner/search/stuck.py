"""When a search no longer finds what can be measured, and what it says of that. Pure.

Trials that could not be measured do not count towards `search.trials`, so a run of them must end
by itself: on real servers each is minutes of a start that fails.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from runner.forecast.findings import group
from runner.forecast.refusals import finding_lines
from runner.label import setting_label
from runner.trial import Outcome, TrialResult

MOST_UNMEASURED = 30
"""Trials in a row without a measurement that end a search. Where one setting in ten can run, 30
random ones hold one with 96 % (1 - 0.9 ** 30), and a sampler that learns finds one sooner."""

MEASURED = (Outcome.COMPLETE, Outcome.PRUNED)
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def unmeasured_after(
    unmeasured: Sequence[TrialResult], result: TrialResult
) -> tuple[TrialResult, ...]:
    """The trials in a row without a measurement, once a trial ended.

    A loss says nothing about a setting and a re-measurement nothing about the search.
    """
    if result.repeat_of is not None or result.outcome is Outcome.LOST:
        return tuple(unmeasured)
    return () if result.outcome in MEASURED else (*unmeasured, result)


def stuck_words(unmeasured: Sequence[TrialResult]) -> str:
    """How many, why (reasons that differ in numbers alone are one), and what to do."""
    reasons: dict[str, str] = {}
    found: list[tuple[str, str]] = []
    for result in unmeasured:
        text = (result.reason or "no reason is known").splitlines()[0]
        kind = reasons.setdefault(NUMBER.sub("#", text), f"{result.outcome}, as #{result.number}")
        found.append((kind, f"{setting_label(result.params)}: {text}"))
    return (
        f"{len(unmeasured)} trials in a row could not be measured, so the search has stopped:\n"
        f"{finding_lines(group(found))}\n"
        "Leave the values that cannot run out of parameters, or exclude them by a constraint, in "
        "a study of another name; the same command tries other settings of this one"
    )
