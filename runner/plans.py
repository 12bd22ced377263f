"""From a setting to the phases of load that measure it. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from runner.measure.restarts import FEWEST
from runner.settings import StudySettings
from runner.trial import LoadPlan, LoadProtocol, LoadStart, TrialLengths

WARMUP = "warmup"
SEARCH_PERIODS = 3
CLAIM_PERIODS = 8
"""Mean request durations in a window: of a search, and of a measurement that claims precision."""


def lengths_of(settings: StudySettings, repeat_of: int | None) -> TrialLengths:
    """Whose lengths a trial has: re-measurements confirm the finalists at the user's own.

    Where the search has the user's lengths anyway, or nothing is to be confirmed, there is one law.
    """
    is_confirming = settings.search.output_tokens is not None and settings.measure.finalists > 0
    is_own = is_confirming and repeat_of is not None
    return TrialLengths.WORKLOAD if is_own else TrialLengths.SEARCH


def at_lengths(settings: StudySettings, lengths: TrialLengths) -> StudySettings:
    """The study as if all of it were measured at these lengths."""
    law = settings.search.output_tokens
    if law is None:
        return settings
    search, work = replace(settings.search, output_tokens=None), settings.workload
    if lengths is TrialLengths.SEARCH:
        work = replace(work, output_tokens=law)
    return replace(settings, search=search, workload=work)


def rung_plans(
    settings: StudySettings,
    number: int,
    lengths: TrialLengths = TrialLengths.SEARCH,
    *,
    is_repeat: bool = False,
) -> tuple[LoadPlan, ...]:
    """The rungs of a trial in measured order.

    The rungs of the objectives come first, so that a losing setting can be stopped after them;
    the others follow from the highest down. Seeds differ by trial, so a repeat sees fresh noise.
    The search measures each rung once; a re-measurement (`is_repeat`) claims a precision at the
    objectives' rungs, from restarts of their load.
    """
    first = {objective.concurrency for objective in settings.objectives}
    settings = at_lengths(settings, lengths)
    return tuple(
        _plan(
            settings,
            number,
            f"rung-{position}",
            level,
            restarts=FEWEST if is_repeat and level in first else 1,
        )
        for position, level in enumerate(levels(settings))
    )


def levels(settings: StudySettings) -> tuple[float, ...]:
    """The ladder (concurrencies, or rates of open_loop) in measured order."""
    work = settings.workload
    is_open = work.protocol is LoadProtocol.OPEN_LOOP
    ladder: tuple[float, ...] = work.rate if is_open else work.concurrency
    first = [objective.concurrency for objective in settings.objectives]
    others = sorted((level for level in ladder if level not in first), reverse=True)
    return (*dict.fromkeys(first), *others)


def rung_label(level: float) -> int:
    """The whole number by which a rung is known: its concurrency, or its rate rounded."""
    return max(1, round(level))


def warmup_plan(
    settings: StudySettings, number: int, lengths: TrialLengths = TrialLengths.SEARCH
) -> LoadPlan:
    """The warm-up of a trial: the highest rung's streams, one request each, prompts of its own."""
    return _plan(at_lengths(settings, lengths), number, WARMUP, max(levels(settings)))


def _plan(
    settings: StudySettings, number: int, phase: str, level: float, restarts: int = 1
) -> LoadPlan:
    work, measure = settings.workload, settings.measure
    is_open = work.protocol is LoadProtocol.OPEN_LOOP
    is_warmup = phase == WARMUP
    is_burst = work.protocol is LoadProtocol.BURST
    return LoadPlan(
        phase=phase,
        protocol=LoadProtocol.CLOSED_LOOP if is_warmup else work.protocol,
        concurrency=rung_label(level),
        rate=level if is_open and not is_warmup else None,
        prompt_tokens=work.prompt_tokens,
        output_tokens=work.output_tokens,
        seed=trial_seed(settings.search.seed, number),
        shared_prefix=work.shared_prefix,
        precision=measure.precision,
        min_window_s=measure.min_window_s,
        max_window_s=measure.max_window_s,
        is_warmup=is_warmup,
        arrivals=work.arrivals,
        start=LoadStart.TOGETHER if is_warmup or is_burst else LoadStart.GRADUAL,
        restarts=restarts,
        min_periods=SEARCH_PERIODS if restarts == 1 else CLAIM_PERIODS,
    )


def trial_seed(study_seed: int, number: int) -> int:
    """A seed of its own for each trial of each study seed."""
    digest = hashlib.sha256(f"{study_seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
