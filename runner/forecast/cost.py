"""What a study takes: launches, seconds and joules, by the closed form. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from runner.forecast.estimate import Estimator
from runner.forecast.prediction import RungPrediction
from runner.forecast.setting import PlannedSetting
from runner.launch import settings_in_a_row
from runner.load.ramp import LONE_LIVES, USUAL_LIVES
from runner.machine.start import start_phases
from runner.measure.restarts import has_probe
from runner.measure.window import longest_ramp_s
from runner.plans import levels, rung_plans
from runner.settings import StudySettings
from runner.trial import LoadPlan, LoadProtocol

MOST_COSTED = 300  # settings over which a mean trial is taken


@dataclass(frozen=True, slots=True)
class Cost:
    """What a study takes when no trial is stopped early. `time_s` is on the wall clock.

    `limited_by`: the budget that ends it before its trials are done, None: the trials.
    """

    trials: int
    remeasured: int
    launches: int
    time_s: float
    energy_j: float
    limited_by: str | None = None


@dataclass(frozen=True, slots=True)
class _Spent:
    """Seconds on the engine's own clock, and joules."""

    time_s: float
    energy_j: float


def study_cost(
    settings: StudySettings,
    estimator: Estimator,
    confirming: Estimator,
    runnable: Sequence[PlannedSetting],
    baselines: Sequence[PlannedSetting],
) -> Cost:
    """The expected cost; settings of the search are taken to be drawn evenly from `runnable`.

    `estimator` has the lengths of the search, `confirming` those of re-measurements. Consecutive
    trials share a launch where they need the same; a re-measurement has its own.
    """
    search = settings.search
    searched = min(max(search.trials - len(baselines), 0), len(runnable))
    remeasured = settings.measure.repeats * (settings.measure.finalists + len(baselines))
    own = len({planned.launch.key for planned in baselines}) + remeasured
    launches = own + _launches(settings, runnable, searched)
    step = max(1, len(runnable) // MOST_COSTED)
    sample = [*runnable[::step], *baselines]
    trials = len(baselines) + searched
    if not sample:
        return Cost(0, 0, 0, 0.0, 0.0)
    once, again = rung_plans(settings, 0), rung_plans(settings, 0, is_repeat=True)
    measured = [_trial(settings, estimator, planned, once) for planned in sample]
    confirmed = [_trial(settings, confirming, planned, again) for planned in sample]
    started = [_start(estimator, planned) for planned in sample]
    time_s = launches * _mean_s(started) + trials * _mean_s(measured)
    time_s += remeasured * _mean_s(confirmed)
    energy_j = launches * _mean_j(started) + trials * _mean_j(measured)
    energy_j += remeasured * _mean_j(confirmed)
    time_s /= settings.engine.time_scale
    whole = Cost(trials, remeasured, launches, time_s, energy_j)
    return _within_budgets(settings, whole)


def _launches(settings: StudySettings, runnable: Sequence[PlannedSetting], searched: int) -> int:
    """Starts for `searched` trials, whose launches are taken to be drawn evenly from `runnable`.

    Each serves some settings in a row, and is not started again if it is drawn twice in a row.
    """
    if searched == 0:
        return 0
    most = settings_in_a_row(settings)
    counts = Counter(planned.launch.key for planned in runnable).values()
    served = sum(count * min(count, most) for count in counts) / len(runnable)
    again = sum((count / len(runnable)) ** 2 for count in counts)
    return math.ceil(1 + max(searched / served - 1, 0) * (1 - again))


def _within_budgets(settings: StudySettings, whole: Cost) -> Cost:
    """The study as far as its scarcest budget lets it go; re-measurements count in budgets, too."""
    search = settings.search
    budgets = {
        "minutes": (60.0 * search.minutes if search.minutes else None, whole.time_s),
        "launches": (search.launches, float(whole.launches)),
        "energy_j": (search.energy_j, whole.energy_j),
    }
    shares = {name: limit / wanted for name, (limit, wanted) in budgets.items() if limit and wanted}
    scarcest = min(shares, key=lambda name: shares[name], default=None)
    if scarcest is None or shares[scarcest] >= 1.0:
        return whole
    share = shares[scarcest]
    return Cost(
        trials=max(1, math.floor(whole.trials * share)),
        remeasured=math.floor(whole.remeasured * share),
        launches=max(1, math.floor(whole.launches * share)),
        time_s=whole.time_s * share,
        energy_j=whole.energy_j * share,
        limited_by=scarcest,
    )


def _trial(
    settings: StudySettings,
    estimator: Estimator,
    planned: PlannedSetting,
    plans: Sequence[LoadPlan],
) -> _Spent:
    """The warm-up and every rung of one trial."""
    rungs = [estimator.rung(planned, level) for level in levels(settings)]
    warmup = max(rungs, key=lambda rung: rung.level)
    warmup_s = _life_s(estimator, warmup)
    spans_s = [_rung_s(plan, estimator, rung) for plan, rung in zip(plans, rungs, strict=True)]
    energy_j = sum(rung.power_w * span_s for rung, span_s in zip(rungs, spans_s, strict=True))
    return _Spent(warmup_s + sum(spans_s), energy_j + warmup.power_w * warmup_s)


def _rung_s(plan: LoadPlan, estimator: Estimator, rung: RungPrediction) -> float:
    """The ramp-ups and windows of one rung, the fewest restarts of its load."""
    life_s = _life_s(estimator, rung)
    ramp_s = (USUAL_LIVES if plan.concurrency > 1 else LONE_LIVES) * life_s
    loads = plan.restarts
    match plan.protocol:
        case LoadProtocol.BURST:
            return loads * rung.level * estimator.output.mean / rung.output_throughput
        case LoadProtocol.OPEN_LOOP:
            ramp_s = plan.min_window_s / 2
        case LoadProtocol.CLOSED_LOOP:
            loads += has_probe(plan)
    window_s = min(max(plan.min_window_s, plan.min_periods * life_s), plan.max_window_s)
    return loads * (min(ramp_s, longest_ramp_s(plan)) + window_s)


def _life_s(estimator: Estimator, rung: RungPrediction) -> float:
    return rung.ttft_s + rung.tpot_s * estimator.output.mean


def _start(estimator: Estimator, planned: PlannedSetting) -> _Spent:
    """From exec to ready; GPUs that load draw what idle ones with a server draw."""
    start_s = start_phases(estimator.profile, planned.shape).total_s
    gpus = planned.launch.replicas * planned.launch.gpus_per_replica
    return _Spent(start_s, start_s * gpus * estimator.profile.gpu.server_idle_w)


def _mean_s(spent: Sequence[_Spent]) -> float:
    return math.fsum(each.time_s for each in spent) / len(spent)


def _mean_j(spent: Sequence[_Spent]) -> float:
    return math.fsum(each.energy_j for each in spent) / len(spent)
