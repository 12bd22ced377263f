"""The order of a plan: best first, and of what seeds cannot tell apart the plainest. Pure.

Rows are told apart by their objective from p10 to p90 of the seeds. From the best on, those that
overlap with it stand together: baselines first, then what departs least from SGLang's defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from runner.forecast.prediction import RungPrediction
from runner.forecast.ranking import Ranked
from runner.forecast.setting import PlannedSetting
from runner.machine.shape import ServerShape
from runner.settings import Direction, StudySettings

SIZES = frozenset({"tp_size", "pp_size", "ep_size"})
DEFAULTS = ServerShape()


def best_first(settings: StudySettings, rows: Iterable[Ranked]) -> list[Ranked]:
    """The rows in their order; those that miss a limit last."""
    is_up = settings.objectives[0].direction is Direction.MAXIMIZE

    def goodness(row: Ranked) -> tuple[bool, float]:
        return row.misses_slo, -row.objective if is_up else row.objective

    left = sorted(rows, key=goodness)
    found: list[Ranked] = []
    while left:
        best = left[0]
        found += sorted((row for row in left if _overlap(settings, best, row)), key=_plainness)
        left = [row for row in left if not _overlap(settings, best, row)]
    return found


def _overlap(settings: StudySettings, one: Ranked, other: Ranked) -> bool:
    """Whether seeds cannot tell two rows apart; never when only one of them misses a limit."""
    (low, high), (its_low, its_high) = _span(settings, one), _span(settings, other)
    return one.misses_slo == other.misses_slo and low <= its_high and its_low <= high


def _span(settings: StudySettings, row: Ranked) -> tuple[float, float]:
    """p10 and p90 of the objective, taken to spread like the throughput of its rung."""
    level = settings.objectives[0].concurrency
    rung = next(rung for rung in row.rungs if rung.level == level)
    if rung.p10 is None or rung.p90 is None or not rung.output_throughput:
        return row.objective, row.objective
    scale = row.objective / rung.output_throughput
    return scale * rung.p10, scale * rung.p90


def _plainness(row: Ranked) -> tuple[bool, int]:
    return row.name is None, departures(row.planned)


def departures(planned: PlannedSetting) -> int:
    """How many of its server's flags, sizes apart, are not SGLang's defaults."""
    names = (field.name for field in fields(ServerShape) if field.name not in SIZES)
    return sum(getattr(planned.shape, name) != getattr(DEFAULTS, name) for name in names)


def same_rows(settings: StudySettings, rows: Iterable[Ranked]) -> list[list[Ranked]]:
    """The rows in their order, those together that give the same numbers at the objective."""
    level = settings.objectives[0].concurrency
    groups: dict[RungPrediction, list[Ranked]] = {}
    for row in rows:
        at = next(rung for rung in row.rungs if rung.level == level)
        groups.setdefault(at, []).append(row)
    return list(groups.values())
