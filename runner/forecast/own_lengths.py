"""What changes at the user's own lengths, when a study searches with shorter replies. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.forecast.equivalence import near
from runner.forecast.estimate import Estimator
from runner.forecast.setting import PlannedSetting
from runner.plans import at_lengths
from runner.settings import Direction, StudySettings
from runner.trial import Lengths, TrialLengths


@dataclass(frozen=True, slots=True)
class OwnLengths:
    """The two laws of replies, and which of the best settings leads at each by the closed form.

    `leader` is None where the same one leads at both, or another one by a hair only.
    """

    search: Lengths
    own: Lengths
    leader: PlannedSetting | None


def own_lengths(
    settings: StudySettings, estimator: Estimator, rows: Sequence[PlannedSetting]
) -> OwnLengths | None:
    """Compare the settings of a plan at both laws; None where the study has only one.

    `estimator` has the lengths of the search. Only these settings can become finalists, so the
    others are not looked at.
    """
    law = settings.search.output_tokens
    if law is None:
        return None
    own = Estimator(at_lengths(settings, TrialLengths.WORKLOAD), estimator.profile)
    first, second = _leader(settings, estimator, rows), _leader(settings, own, rows)
    is_other = first is not None and second is not None and first is not second
    if is_other and near(*(_value(settings, own, each) for each in (first, second) if each)):
        is_other = False
    leader = second if is_other else None
    return OwnLengths(law, settings.workload.output_tokens, leader)


def _leader(
    settings: StudySettings, estimator: Estimator, rows: Sequence[PlannedSetting]
) -> PlannedSetting | None:
    level = settings.objectives[0].concurrency
    sign = -1 if settings.objectives[0].direction is Direction.MAXIMIZE else 1

    def key(planned: PlannedSetting) -> tuple[bool, float]:
        misses = estimator.rung(planned, level).misses_slo
        return misses, sign * _value(settings, estimator, planned)

    return min(rows, key=key, default=None)


def _value(settings: StudySettings, estimator: Estimator, planned: PlannedSetting) -> float:
    rung = estimator.rung(planned, settings.objectives[0].concurrency)
    return dict(rung.objectives).get(0, rung.output_throughput)
