"""What a report says of settings whose throughput depends on how their load began."""

from __future__ import annotations

from collections.abc import Iterable

from runner.insight.ranking import Ranking
from runner.insight.words import format_number
from runner.lengths import written_mean
from runner.settings import StudySettings
from runner.trial import RungResult


def start_words(ranking: Ranking, settings: StudySettings) -> Iterable[str]:
    """A sentence for each metastable setting, and which lengths of replies would forget it."""
    concurrency, law = ranking.objectives[0].concurrency, settings.workload.output_tokens
    found = [
        (setting.number, rung)
        for setting in ranking.measured
        for rung in setting.rungs_at(concurrency)
        if rung.metastable
    ]
    for number, rung in found:
        yield f"#{number} is metastable: at C={concurrency:g} {_rates_words(rung)}."
    if settings.workload.remembers_start and any(_is_apart(rung) for _, rung in found):
        low, high = max(1, round(written_mean(law) * 0.5)), round(written_mean(law) * 1.5)
        yield (
            "Replies of like length stay together as they began. Uneven ones part again, as in "
            "traffic, and make what those begun one after another make, or less; measure them in a "
            f"study of another name: workload.output_tokens: {{uniform: [{low}, {high}]}}."
        )


def _rates_words(rung: RungResult) -> str:
    counted, probes = _rates(rung)
    span = f"{format_number(min(counted))} to {format_number(max(counted))}"
    if _is_apart(rung):
        return f"{format_number(probes[0])} tokens/s begun together, {span} begun one after another"
    return f"its restarts made {span} tokens/s, further apart than their windows explain"


def _is_apart(rung: RungResult) -> bool:
    """Whether a restart whose streams began together lies beyond all others."""
    counted, probes = _rates(rung)
    return any(not min(counted) <= rate <= max(counted) for rate in probes)


def _rates(rung: RungResult) -> tuple[list[float], list[float]]:
    """Of the restarts that count, and of those whose streams began together."""
    counted = [each.output_throughput for each in rung.restarts if each.counts]
    return counted, [each.output_throughput for each in rung.restarts if not each.counts]
