"""From measured rungs to a trial's result: what is kept, what it is worth, whether to go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from runner.canary import CanaryReference, CanaryResult, CanaryState, GreedyOutput
from runner.measure.attainment import excess_s
from runner.measure.canary import judge_outputs
from runner.measure.idle import POWER_METRICS
from runner.measure.metrics import judge_rung, metric_value
from runner.measure.resolved import differences
from runner.measure.restarts import FEWEST, next_restart
from runner.measure.validity import is_unsteady
from runner.plans import levels
from runner.settings import StudySettings
from runner.trial import (
    Failure,
    LoadPlan,
    LoadRun,
    Measurement,
    Outcome,
    Params,
    RungRecord,
    RungResult,
    Stage,
    TrialLengths,
    TrialResult,
)

DRIFTING = 0.3
"""How far a rate that still drifts may be off, relative: what servers without CUDA graphs do."""


@dataclass(frozen=True, slots=True)
class TrialIdentity:
    """What a result says of which trial it is."""

    number: int
    name: str | None
    params: Params
    spec_hash: str
    retry_of: int | None
    repeat_of: int | None
    lengths: TrialLengths = TrialLengths.SEARCH


@dataclass(slots=True)
class CanaryKeeper:
    """Keeps what the servers say, then compares it; `result` is what their last answer came to.

    `reference` None: the study has no good launch with these numerics yet.
    """

    reference: CanaryReference | None
    keep: Callable[[Sequence[Sequence[GreedyOutput]]], None]
    result: CanaryResult | None = None

    def check(self, replicas: Sequence[Sequence[GreedyOutput]]) -> str | None:
        """What is wrong with the outputs of the replicas; None: nothing."""
        if not replicas:
            return None
        self.keep(replicas)
        self.result = judge_outputs(self.reference, replicas, self.result)
        return self.result.difference if self.result.state is CanaryState.MISMATCHED else None


@dataclass(slots=True)
class RungKeeper:
    """The driver's side of a trial (trial.Judge): keeps each rung, judges it, decides.

    `keep` puts the raw record on disk before anything judges it; `should_stop` is the search's
    rung budget: from position, value and how far that may be off to a reason to stop, or None.
    `worth` is what the load of the rung at a position must reach to matter (tokens/s), if known.
    """

    settings: StudySettings
    plans: Sequence[LoadPlan]
    keep: Callable[[RungRecord], None]
    should_stop: Callable[[int, float, float], str | None]
    on_judged: Callable[[RungResult], None]
    canary: CanaryKeeper | None = None
    worth: Callable[[int], float | None] = lambda _: None
    rungs: list[RungResult] = field(default_factory=list)
    invalid: str | None = None
    stopped: str | None = None

    def check_outputs(self, replicas: Sequence[Sequence[GreedyOutput]]) -> str | None:
        """See CanaryKeeper.check."""
        return None if self.canary is None else self.canary.check(replicas)

    def next_load(self, position: int, loads: Sequence[LoadRun]) -> LoadPlan | None:
        """The next restart of a rung's load, by the rule of measure/restarts.py.

        What claims a precision is measured in full, whatever it comes to.
        """
        plan = next_restart(self.plans[position], loads)
        if plan is None or plan.restarts >= FEWEST:
            return plan
        return replace(plan, worth=self.worth(position))

    def go_on(self, rung: RungRecord) -> bool:
        """Keep and judge one rung; False ends the trial here."""
        self.keep(rung)
        return self.judge(rung)

    def judge(self, rung: RungRecord) -> bool:
        """Judge one rung that is already on disk."""
        result = judge_rung(rung, self.settings.slo, self.plans[rung.position])
        self.rungs.append(result)
        self.on_judged(result)
        if self._is_objective(result) and not result.valid:
            self.stopped = self._far_behind(rung, result)
            if self.stopped is None:
                self.invalid = f"at concurrency {result.concurrency}: {'; '.join(result.reasons)}"
            return False
        value = metric_value(result, self.settings.objectives[0].metric)
        if value is None or len(self.settings.objectives) > 1:
            return True
        reason = self.should_stop(result.position, value, 0.0)
        is_last = result.position == len(self.plans) - 1
        self.stopped = None if is_last else reason
        return self.stopped is None

    def _far_behind(self, rung: RungRecord, result: RungResult) -> str | None:
        """Why a rung that only drifts too much, or was cut short, need not be measured again.

        None: it must be.
        """
        value = metric_value(result, self.settings.objectives[0].metric)
        is_cut = result.cut_below is not None
        is_that_alone = len(result.reasons) == 1 and (
            is_cut or is_unsteady(rung, self.plans[rung.position])
        )
        if value is None or not is_that_alone or len(self.settings.objectives) > 1:
            return None
        reason = self.should_stop(result.position, value, DRIFTING)
        return f"{result.reasons[0]}; {reason}" if is_cut and reason is not None else reason

    @property
    def is_decided(self) -> bool:
        """Whether the rungs kept so far already end the trial."""
        ended = self.invalid is not None or self.stopped is not None
        return ended or len(self.rungs) == len(self.plans)

    def _is_objective(self, rung: RungResult) -> bool:
        order = levels(self.settings)
        return any(order[rung.position] == each.concurrency for each in self.settings.objectives)


def conclude(
    identity: TrialIdentity,
    measured: Measurement | Failure,
    keeper: RungKeeper,
    launch: int | None,
    same_as: str | None = None,
) -> TrialResult:
    """The result of a trial; its values are present when every objective was measured.

    `same_as`: the identity of what ran (sharing.py).
    """
    stage, outcome, reason, log_path = _outcome(measured, keeper)
    values = objective_values(keeper.settings, keeper.rungs)
    if outcome is Outcome.COMPLETE and values is None:
        stage, outcome = Stage.JUDGE, Outcome.INVALID
        reason = _missing_words(keeper.settings, keeper.rungs)
    resolved = measured.resolved if isinstance(measured, Measurement) else {}
    asked = {**keeper.settings.engine.args, **identity.params}
    return TrialResult(
        number=identity.number,
        name=identity.name,
        params=identity.params,
        resolved=resolved,
        outcome=outcome,
        reason=reason,
        retry_of=identity.retry_of,
        repeat_of=identity.repeat_of,
        spec_hash=identity.spec_hash,
        launch=launch,
        stage=stage,
        values=values or (),
        constraints=slo_constraints(keeper.settings, keeper.rungs),
        rungs=tuple(keeper.rungs),
        log_path=log_path,
        timing_s={"measured": sum(rung.window_s for rung in keeper.rungs)},
        lengths=identity.lengths,
        canary=None if keeper.canary is None else keeper.canary.result,
        differences=differences(asked, resolved),
        identity=same_as,
    )


def shared_result(
    settings: StudySettings, identity: TrialIdentity, original: TrialResult
) -> TrialResult:
    """The result of a trial that shows the measurement of another one, whose servers are equal."""
    asked = {**settings.engine.args, **identity.params}
    return replace(
        original,
        number=identity.number,
        name=identity.name,
        params=identity.params,
        retry_of=identity.retry_of,
        repeat_of=identity.repeat_of,
        spec_hash=identity.spec_hash,
        timing_s={"measured": 0.0},
        differences=differences(asked, original.resolved),
        shares=original.number,
    )


def objective_values(
    settings: StudySettings, rungs: Sequence[RungResult]
) -> tuple[float, ...] | None:
    """The value of each objective, None when any is not there."""
    values = []
    for objective in settings.objectives:
        rung = _rung_at(settings, rungs, objective.concurrency)
        value = None if rung is None else metric_value(rung, objective.metric)
        if value is None:
            return None
        values.append(value)
    return tuple(values)


def _missing_words(settings: StudySettings, rungs: Sequence[RungResult]) -> str:
    """Which objective has no value, and which GPUs' power it lacks."""
    words = "an objective could not be computed: its records are missing"
    for objective in settings.objectives:
        rung = _rung_at(settings, rungs, objective.concurrency)
        if rung is None or metric_value(rung, objective.metric) is not None:
            continue
        words = f"{objective.metric} at concurrency {rung.concurrency} is unavailable"
        blind = [gpu.gpu_uuid for gpu in rung.gpus if gpu.energy_j is None]
        if objective.metric in POWER_METRICS and blind:
            words += f": the power of GPU {', '.join(blind)} could not be read"
        return words
    return words


def slo_constraints(settings: StudySettings, rungs: Sequence[RungResult]) -> tuple[float, ...]:
    """Each limit's excess in seconds at the first objective's rung; <= 0 is kept."""
    rung = _rung_at(settings, rungs, settings.objectives[0].concurrency)
    if rung is None:
        return ()
    return tuple(
        excess_s(metric_value(rung, f"{limit.metric}.{limit.percentile}"), limit.limit_s)
        for limit in settings.slo
    )


def _outcome(
    measured: Measurement | Failure, keeper: RungKeeper
) -> tuple[Stage | None, Outcome, str | None, str | None]:
    if isinstance(measured, Failure):
        return measured.stage, measured.outcome, measured.message, measured.log_path
    if keeper.invalid is not None:
        return Stage.JUDGE, Outcome.INVALID, keeper.invalid, None
    if keeper.stopped is not None:
        return None, Outcome.PRUNED, keeper.stopped, None
    return None, Outcome.COMPLETE, None, None


def _rung_at(
    settings: StudySettings, rungs: Sequence[RungResult], level: float
) -> RungResult | None:
    position = levels(settings).index(level)
    return next((rung for rung in rungs if rung.position == position), None)
