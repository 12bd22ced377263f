"""The loop: ask, launch, measure, store, log, tell. A study cut off anywhere continues here.

Order of writing, so that a kill at any instant loses nothing: raw records of each rung, then
result.json (its presence is the state), then Optuna, then MLflow in the background. What a dead
driver left behind is found in that order too: a trial that is RUNNING in Optuna is told if its
result.json is there, else measured under its number from its next unmeasured rung; results that
MLflow does not have are logged when the study continues.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from runner.canary import CanaryRecord
from runner.clock import Clock, ClockAnchor
from runner.cluster.executor import RunningLaunch
from runner.engines.sglang.backends import impossible
from runner.errors import ClusterLost, ConfigError, StudyError, TrialError
from runner.expression import Expression
from runner.held_launch import HeldLaunch
from runner.insight.live import Note, RungDone, TrialDone, TrialStarted, View
from runner.launch import LaunchPlan, plan_launch
from runner.measure.canary import numerics_of
from runner.plans import rung_plans, warmup_plan
from runner.record.background import BackgroundTracker
from runner.record.store import StudyStore
from runner.run_trial import run_trial
from runner.search.proposals import Proposal
from runner.search.study import Search
from runner.settings import StudySettings
from runner.sharing import Sharing
from runner.trial import (
    EngineKind,
    Failure,
    GreedyOutput,
    LaunchSpec,
    LoadPlan,
    Outcome,
    Params,
    RungResult,
    Stage,
    TrialResult,
    TrialSpec,
)
from runner.verdict import CanaryKeeper, RungKeeper, TrialIdentity, conclude, shared_result

MOST_LOSSES = 5


@dataclass(frozen=True, slots=True)
class Study:
    """Everything the loop works with."""

    settings: StudySettings
    store: StudyStore
    search: Search
    tracker: BackgroundTracker
    launches: HeldLaunch
    view: View
    sharing: Sharing


def tune(study: Study) -> None:
    """Run the study until its budget is spent or its space is exhausted.

    Raises:
        StudyError: it cannot go on (five losses or thirty trials without a measurement in a row,
            no GPUs, a full disk).
        Interrupted: the user asked to stop; what was measured is kept.
    """
    check_whole(study)
    adopt_outputs(study)
    study.sharing.note_all()
    tell_finished(study)
    for proposal in proposals(study):
        result = study.search.settle(measure(study, proposal))
        finish(study, result)
        stop_after_losses(study, result)
    if (reason := study.search.why_stuck()) is not None:
        raise StudyError(reason)


def check_whole(study: Study) -> None:
    """Files and search storage must know the same trials; nothing is written before they do."""
    begun = {trial.number: trial for trial in study.search.trials()}
    kept = {result.number: result for result in study.store.results()}
    ended = {number for number, trial in begun.items() if not trial.is_running}
    folder = study.store.folder
    if lost := sorted(ended - kept.keys()):
        raise StudyError(
            f"trials {lost} ended, but have no result.json below {folder}; restore them: their "
            "runs in MLflow keep a copy among the artifacts"
        )
    strange = [n for n, r in kept.items() if n not in begun or begun[n].spec_hash != r.spec_hash]
    if strange:
        raise StudyError(
            f"the search storage does not know trials {strange} of {folder}: it was deleted or "
            "exchanged; restore it, or delete the study's folder to start anew"
        )


def adopt_outputs(study: Study) -> None:
    """What complete trials said stays what others are compared with, should its file be gone."""
    for result in sorted(study.store.results(), key=lambda each: each.number):
        if result.outcome is Outcome.COMPLETE:
            study.store.canary.adopt(study.store.trial_folder(result.number))


def tell_finished(study: Study) -> None:
    """Log and tell the trials that a dead driver had finished but not told."""
    for proposal in study.search.running():
        result = study.store.read_result(proposal.number)
        if result is not None:
            log_and_tell(study, result)


def proposals(study: Study) -> Iterator[Proposal]:
    """First what a dead driver left unfinished, then what the search proposes within budget."""
    yield from study.search.running()
    while study.search.budget_left(*spent(study)):
        study.search.restrict(impossible_here(study))
        proposal = study.search.ask()
        if proposal is None:
            return
        yield proposal


def impossible_here(study: Study) -> tuple[Expression, ...]:
    """What settings must keep on these GPUs, once they are known: the first launch finds out."""
    gpus = study.store.read_idle() or ()
    return impossible(study.settings, tuple(gpu.capability for gpu in gpus))


def spent(study: Study) -> tuple[float, int, float]:
    """Minutes, launches and joules that the study has used so far."""
    results = study.store.results()
    energy_j = sum(rung.energy_j or 0.0 for rung in measured_rungs(results))
    return study.store.minutes_used(), study.store.launches_used(), energy_j


def measured_rungs(results: Sequence[TrialResult]) -> Iterator[RungResult]:
    """The rungs that were measured, each once: not those that a trial shares."""
    for result in results:
        if result.shares is None:
            yield from result.rungs


def measure(study: Study, proposal: Proposal) -> TrialResult:
    """Measure one proposal, to a result that says how long that took.

    `timing_s`: `total` from the proposal to its result, in it `launch` (until its servers were
    ready, their predecessors' end included) and `measured` (inside the windows of its rungs).
    """
    clock = Clock(study.settings.engine.time_scale)
    begun_s = clock.now_s()
    result = measure_on_launch(study, proposal)
    if study.settings.engine.kind is EngineKind.SIMULATED:
        return result  # the same to the bit each time
    ready_s = study.launches.ready_s
    timing_s = {**result.timing_s, "total": clock.now_s() - begun_s}
    timing_s["launch"] = max(ready_s - begun_s, 0.0) if result.launch is not None else 0.0
    return replace(result, timing_s=timing_s)


def measure_on_launch(study: Study, proposal: Proposal) -> TrialResult:
    """Measure one proposal on the launch it needs; typed failures become outcomes."""
    identity = TrialIdentity(
        number=proposal.number,
        name=proposal.name,
        params=proposal.params,
        spec_hash=proposal.spec_hash,
        retry_of=proposal.retry_of,
        repeat_of=proposal.repeat_of,
        lengths=proposal.lengths,
    )
    keeper = RungKeeper(
        settings=study.settings,
        plans=plans_of(study, proposal),
        keep=partial(study.store.write_rung, proposal.number),
        should_stop=partial(report_rung, study, proposal.number),
        on_judged=partial(judged, study, proposal.number),
        canary=canary_keeper(study, proposal),
        worth=partial(study.search.worth, proposal.number),
    )
    study.view.handle(
        TrialStarted(
            proposal.number, proposal.name, proposal.params, proposal.repeat_of, proposal.lengths
        )
    )
    plan = launch_plan(study, proposal)
    if isinstance(plan, Failure):
        return conclude(identity, plan, keeper, launch=None)
    kept = continue_rungs(study, proposal, keeper)
    spec = trial_spec(study, proposal, plan)
    spec = replace(spec, first_rung=len(spec.rungs) if keeper.is_decided else kept)
    begin(study, spec, launch=None, servers=None)
    is_new = kept == 0 and proposal.repeat_of is None
    if is_new and (shown := shared(study, identity, plan)) is not None:
        return shown
    try:
        servers = study.launches.servers_for(plan, fresh=proposal.fresh_launch)
    except (TrialError, ClusterLost) as error:
        return conclude(identity, Failure.of(error, Stage.START), keeper, launch=None)
    launch = study.launches.spec
    study.sharing.note(launch)
    if is_new and (shown := shared(study, identity, plan)) is not None:
        return shown
    begin(study, spec, launch, servers)
    if study.settings.engine.kind is not EngineKind.SIMULATED:
        study.tracker.wait()
    measured = run_trial(spec, servers, keeper)
    if isinstance(measured, Failure):
        study.launches.release()
    same_as = study.sharing.identity(plan, identity.lengths)
    return conclude(identity, measured, keeper, launch.number if launch else None, same_as)


def shared(study: Study, identity: TrialIdentity, plan: LaunchPlan) -> TrialResult | None:
    """The result of a trial that need not be measured: its servers resolve to another one's."""
    original = study.sharing.original(study.sharing.identity(plan, identity.lengths))
    if original is None:
        return None
    study.view.handle(
        Note(
            f"trial {identity.number} resolves to the same servers as trial {original.number}, "
            "so it shows that one's measurement"
        )
    )
    return shared_result(study.settings, identity, original)


def canary_keeper(study: Study, proposal: Proposal) -> CanaryKeeper:
    """Compares what the servers of a proposal say, with the study's reference for its numerics."""
    numerics = numerics_of({**study.settings.engine.args, **proposal.params})
    keep = partial(keep_outputs, study, proposal.number, numerics)
    return CanaryKeeper(study.store.canary.reference(numerics), keep)


def keep_outputs(
    study: Study, number: int, numerics: Params, replicas: Sequence[Sequence[GreedyOutput]]
) -> None:
    """Put what the servers say on disk before anything judges it."""
    launch = study.launches.spec
    outputs = tuple(tuple(outputs) for outputs in replicas)
    record = CanaryRecord(number, -1 if launch is None else launch.number, numerics, outputs)
    study.store.write_outputs(record)


def launch_plan(study: Study, proposal: Proposal) -> LaunchPlan | Failure:
    """The launch the setting needs; one that cannot be placed is infeasible."""
    try:
        is_repeat = proposal.repeat_of is not None
        return plan_launch(study.settings, proposal.params, is_repeat=is_repeat)
    except ConfigError as error:
        return Failure(Stage.PLACE, Outcome.INFEASIBLE, str(error))


def continue_rungs(study: Study, proposal: Proposal, keeper: RungKeeper) -> int:
    """Judge again what a dead driver had measured of this trial; the next rung to measure."""
    kept = study.store.measured_rungs(proposal.number)
    for rung in kept:
        keeper.judge(rung)
    if kept:
        study.view.handle(Note(f"trial {proposal.number} continues after {len(kept)} of its rungs"))
    return len(kept)


def plans_of(study: Study, proposal: Proposal) -> tuple[LoadPlan, ...]:
    """The rungs that measure a proposal."""
    is_repeat = proposal.repeat_of is not None
    return rung_plans(study.settings, proposal.number, proposal.lengths, is_repeat=is_repeat)


def trial_spec(study: Study, proposal: Proposal, plan: LaunchPlan) -> TrialSpec:
    """What to measure for a proposal."""
    return TrialSpec(
        number=proposal.number,
        params=proposal.params,
        live=plan.live,
        rungs=plans_of(study, proposal),
        warmup=warmup_plan(study.settings, proposal.number, proposal.lengths),
        spec_hash=proposal.spec_hash,
        name=proposal.name,
        retry_of=proposal.retry_of,
        repeat_of=proposal.repeat_of,
        lengths=proposal.lengths,
    )


def begin(
    study: Study, spec: TrialSpec, launch: LaunchSpec | None, servers: RunningLaunch | None
) -> None:
    """Write down that this trial runs, on which launch and by which clock."""
    scale = study.settings.engine.time_scale
    if servers is None:
        anchor = ClockAnchor.take(Clock(scale))
    else:
        anchor = ClockAnchor(time.time(), servers.now_s(), scale)
    study.store.write_spec(spec, launch, anchor)


def report_rung(study: Study, number: int, position: int, value: float, doubt: float) -> str | None:
    """Tell the search how the rung went; its reason to stop this trial, None to go on.

    A value in doubt is told only where it says enough to stop.
    """
    reason = study.search.should_stop(number, position, value, doubt)
    if reason or not doubt:
        study.search.report(number, position, value)
    return reason


def judged(study: Study, number: int, rung: RungResult) -> None:
    """Show a judged rung."""
    study.view.handle(RungDone(number, rung))


def finish(study: Study, result: TrialResult) -> None:
    """Store, then log, then tell."""
    study.store.write_result(result)
    log_and_tell(study, result)


def log_and_tell(study: Study, result: TrialResult) -> None:
    """Tell Optuna, then MLflow; what a kill leaves out is told and logged by the next session.

    Before that, what the servers of a complete trial say becomes what others are compared with.
    """
    if result.outcome is Outcome.COMPLETE:
        study.store.canary.adopt(study.store.trial_folder(result.number))
    study.search.tell(result)
    study.tracker.log_trial(result)
    study.view.handle(TrialDone(result))


def stop_after_losses(study: Study, result: TrialResult) -> None:
    """Five losses in a row say that the machine, not the settings, is at fault."""
    if result.outcome is Outcome.LOST and study.search.losses_in_a_row() >= MOST_LOSSES:
        raise StudyError(
            f"{MOST_LOSSES} trials in a row were lost; the last: {result.reason}. "
            "Check the GPUs and Ray, then run the same command again"
        )
