"""The plan of a study, without a launch: what is in its space, what is worth it, what it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runner.forecast.cost import Cost, study_cost
from runner.forecast.equivalence import (
    Equivalent,
    Sameness,
    equivalents,
    may_be_near,
    same_computation,
)
from runner.forecast.estimate import Estimator
from runner.forecast.examine import Examined, examine
from runner.forecast.findings import Finding, group, refusal_example, wastes
from runner.forecast.order import best_first
from runner.forecast.own_lengths import OwnLengths, own_lengths
from runner.forecast.predict import Progress
from runner.forecast.prediction import plain, rung_document
from runner.forecast.ranking import (
    CHECKED,
    CHECKED_SEEDS,
    EQUIVALENCE_WORK,
    Forecaster,
    Ranked,
    lookalikes,
    rank,
)
from runner.forecast.setting import (
    PlannedSetting,
    not_modelled,
    plan_setting,
    study_profile,
)
from runner.label import setting_label
from runner.lengths import law_words
from runner.machine.shape import Refusal
from runner.plans import at_lengths, lengths_of
from runner.settings import Choices, StudySettings
from runner.trial import Params, TrialLengths


@dataclass(frozen=True, slots=True)
class RefusedBaseline:
    """A baseline that cannot run, and why."""

    name: str
    params: Params
    reason: str


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """Everything `runner plan` shows. `runnable` counts settings that can start.

    The ranking is by the lengths of the search; `own`: what is known of the user's own lengths,
    None where these are the same.
    `not_modelled`: parameters that the predictions leave out. `unused`: values of parameters that
    are in no setting, because of the GPUs or a constraint.
    """

    settings: StudySettings
    examined: Examined
    runnable: int
    refused: tuple[Finding, ...]
    warnings: tuple[Finding, ...]
    equivalent: tuple[Equivalent, ...]
    ranking: tuple[Ranked, ...]
    baselines: tuple[Ranked, ...]
    refused_baselines: tuple[RefusedBaseline, ...]
    not_modelled: tuple[str, ...]
    unused: tuple[str, ...]
    cost: Cost
    own: OwnLengths | None = None


def make_plan(
    settings: StudySettings,
    top: int,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> StudyPlan:
    """Plan a study; raises ConfigError when it names no profile."""
    profile = study_profile(settings)
    asked, settings = settings, at_lengths(settings, TrialLengths.SEARCH)
    estimator = Estimator(settings, profile)
    confirming = Estimator(at_lengths(asked, lengths_of(asked, 0)), profile)
    examined = examine(settings)
    planned = [plan_setting(settings, profile, params) for params in examined.settings]
    runnable = [each for each in planned if isinstance(each, PlannedSetting)]
    groups = same_computation(settings, profile, runnable)
    named: dict[str, PlannedSetting] = {}
    refused_baselines: list[RefusedBaseline] = []
    for baseline in settings.baselines:
        found = plan_setting(settings, profile, baseline.params)
        if isinstance(found, Refusal):
            refused_baselines.append(RefusedBaseline(baseline.name, baseline.params, found.text))
        else:
            named[baseline.name] = found
    forecaster = Forecaster(settings, estimator, on_progress)
    first = [members[0] for members in groups]
    best = rank(forecaster, settings.workload.ladder, first, list(named.values()), top)
    alike = lookalikes(forecaster, best, first)
    forecaster.allow(EQUIVALENCE_WORK)
    for leader, members in zip(best, alike, strict=True):
        if members:
            pair = [leader, *members[:CHECKED]]
            forecaster.simulate(pair, settings.workload.ladder, CHECKED_SEEDS)
    checked = [each for members in alike for each in members[:CHECKED]]
    return StudyPlan(
        settings=settings,
        own=own_lengths(asked, estimator, [*best, *named.values()]),
        examined=examined,
        runnable=len(runnable),
        refused=_refused(examined.settings, planned),
        warnings=group(w for each in runnable for w in wastes(settings, profile, each)),
        equivalent=(
            *equivalents(profile, groups),
            *_near(forecaster, [*best, *named.values(), *checked]),
        ),
        ranking=tuple(
            best_first(
                settings,
                (
                    forecaster.ranked(each, None, len(members))
                    for each, members in zip(best, alike, strict=True)
                ),
            )
        ),
        baselines=tuple(forecaster.ranked(each, name, 0) for name, each in named.items()),
        refused_baselines=tuple(refused_baselines),
        not_modelled=not_modelled(_names(settings)),
        unused=_unused(settings, examined),
        cost=study_cost(settings, estimator, confirming, runnable, list(named.values())),
    )


def _names(settings: StudySettings) -> list[str]:
    """Every parameter that some server of the study is given."""
    named = [name for baseline in settings.baselines for name in baseline.params]
    return [*settings.engine.args, *(each.name for each in settings.parameters), *named]


def _unused(settings: StudySettings, examined: Examined) -> tuple[str, ...]:
    if examined.is_sampled:
        return ()
    used = {(name, value) for params in examined.settings for name, value in params.items()}
    return tuple(
        f"{parameter.name} {value}"
        for parameter in settings.parameters
        if isinstance(parameter, Choices)
        for value in parameter.values
        if (parameter.name, value) not in used
    )


def _refused(
    settings: Sequence[Params], planned: Sequence[PlannedSetting | Refusal]
) -> tuple[Finding, ...]:
    """Refusals by their kind."""
    return group(
        (each.kind.value, refusal_example(params, each.text))
        for params, each in zip(settings, planned, strict=True)
        if isinstance(each, Refusal)
    )


def _near(forecaster: Forecaster, simulated: Sequence[PlannedSetting]) -> list[Equivalent]:
    """Those whose simulations agree.

    Each is compared with the first of a group, so that small differences do not add up.
    """
    found: list[list[PlannedSetting]] = []
    for planned in simulated:
        for members in found:
            if may_be_near(members[0], planned) and forecaster.agree(members[0], planned):
                members.append(planned)
                break
        else:
            found.append([planned])
    return [
        Equivalent(Sameness.SIMULATION, tuple(each.params for each in members))
        for members in found
        if len(members) > 1
    ]


def plan_document(plan: StudyPlan) -> dict[str, object]:
    """The JSON answer of `runner plan`.

    `space.settings` counts the whole space, null when it is too large to count; `space.examined`
    and `space.runnable` count what was looked at, a seeded sample where `sampled` is true.
    `lengths` is there where the search has other lengths than the workload.
    """
    return {
        "name": plan.settings.name,
        "space": {
            "settings": plan.examined.total,
            "examined": len(plan.examined.settings),
            "runnable": plan.runnable,
            "sampled": plan.examined.is_sampled,
        },
        "not_modelled": list(plan.not_modelled),
        "unused": list(plan.unused),
        "refused": [_finding_document(finding) for finding in plan.refused],
        "warnings": [_finding_document(finding) for finding in plan.warnings],
        "equivalent": [
            {
                "basis": str(each.basis),
                "count": len(each.settings),
                "settings": [dict(params) for params in each.settings],
            }
            for each in plan.equivalent
        ],
        "ranking": [_ranked_document(row) for row in plan.ranking],
        "baselines": [
            *({"name": row.name, **_ranked_document(row)} for row in plan.baselines),
            *(
                {"name": each.name, "params": dict(each.params), "refused": each.reason}
                for each in plan.refused_baselines
            ),
        ],
        "trials": plan.cost.trials,
        "limited_by": plan.cost.limited_by,
        "launches": plan.cost.launches,
        "time_s": plan.cost.time_s,
        "energy_j": plan.cost.energy_j,
        **({} if plan.own is None else {"lengths": _lengths_document(plan.own)}),
    }


def _lengths_document(own: OwnLengths) -> dict[str, object]:
    """`other_leader`: the label of the setting that leads at the workload's lengths, or null."""
    return {
        "search": law_words(own.search),
        "workload": law_words(own.own),
        "other_leader": None if own.leader is None else setting_label(own.leader.params),
    }


def _finding_document(finding: Finding) -> dict[str, object]:
    return {"reason": finding.reason, "count": finding.count, "example": finding.example}


def _ranked_document(row: Ranked) -> dict[str, object]:
    rungs = [{**rung_document(rung), "basis": str(rung.basis)} for rung in row.rungs]
    return {
        "params": dict(row.planned.params),
        "label": setting_label(row.planned.params),
        "objective": plain(row.objective),
        "basis": str(row.basis),
        "reason": row.reason,
        "misses_slo": row.misses_slo,
        "alike": row.alike,
        "rungs": rungs,
    }
