"""Rungs in virtual time, on the very servers of the simulated engine.

One job is one rung of one setting under one seed. How long it simulates is bounded by what the
study would measure and by a budget of work, never by the clock, so that a result does not depend on
the machine. Streams begin as `start` says: gradually, as the study's own, or together with a ramp-
up of one lifetime of a request, which is cheaper and wrong: such streams stay together, equal
replies for ever, and prefill together, up to twice as fast as a study would measure. A window lasts
at least the study's `min_window_s` and `lives` lifetimes, and at most `END_LIVES` lifetimes more,
so that it can end with a whole period; where ramp-up and window would cost more than `most_work`,
as long as that allows, but `min_window_s`. A load of very long outputs is so cut off before its
requests end. A burst always runs to its end: its tail is part of its number.
"""

from __future__ import annotations

import ctypes
import os
import signal
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

from runner.engines.simulated import SimulatedServers
from runner.forecast.estimate import Estimator
from runner.forecast.lengths import length_facts
from runner.forecast.prediction import Basis, RungPrediction
from runner.forecast.setting import PlannedSetting
from runner.forecast.watch import WatchedPipeline
from runner.load.ramp import USUAL_LIVES
from runner.measure.attainment import excess_s
from runner.measure.metrics import judge_rung, metric_value, percentile
from runner.measure.window import GIVE_UP
from runner.pipeline import Pipeline, Profile, ServerShape, slots
from runner.plans import levels, rung_plans
from runner.settings import StudySettings
from runner.trial import (
    LaunchSpec,
    LoadPlan,
    LoadProtocol,
    LoadRun,
    LoadStart,
    RungRecord,
    RungResult,
)

# What simulating costs, in microseconds of one ordinary core.
TOKEN_WORK, VISIT_WORK, EMPTY_VISIT_WORK, STEP_WORK = 3.0, 4.0, 1.0, 15.0
END_LIVES = 1.2
RAMP_LIVES = {LoadStart.GRADUAL: USUAL_LIVES, LoadStart.TOGETHER: 1.0}
RAMP_WORK = {LoadStart.GRADUAL: 0.7, LoadStart.TOGETHER: 1.0}  # of what all streams would take
LONGEST_RAMP = 1.5  # of what it is expected to take
SAFETY = 5.0  # how much longer than its estimate a burst may last
WORTH_A_POOL = 1.5e6  # work for which processes are started
LAUNCH = 0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to simulate: lifetimes of a request in the window, and the most work of a rung."""

    lives: float
    most_work: float
    start: LoadStart


@dataclass(frozen=True, slots=True)
class Job:
    """One rung of one setting under one seed.

    `work` is its estimated cost; `ttft_s` and `tpot_s` are the closed form's, for loads too short
    to show them. `is_cut_off`: it is stopped before its first requests end, or
    all of its streams have begun as they would.
    """

    settings: StudySettings
    planned: PlannedSetting
    plan: LoadPlan
    position: int
    work: float
    ttft_s: float
    tpot_s: float
    is_cut_off: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """What one job gave; `objectives` by place in the study, as far as there is a value."""

    output_throughput: float
    ttft_s: float
    tpot_s: float
    busy_stages: float
    slots: float
    power_w: float
    objectives: tuple[tuple[int, float], ...]
    misses_slo: bool


def make_job(
    settings: StudySettings,
    estimator: Estimator,
    planned: PlannedSetting,
    level: float,
    seed: int,
    effort: Effort,
) -> Job:
    """The job of one rung; `seed` stands for the number of the trial that would measure it."""
    position = levels(settings).index(level)
    plan = rung_plans(settings, seed)[position]
    rung = estimator.rung(planned, level)
    bounded, work = bound(planned, plan, rung, estimator.output.mean, effort)
    life_s = rung.tpot_s * estimator.output.mean
    is_cut_off = plan.protocol is not LoadProtocol.BURST and (
        life_s > bounded.max_window_s or _has_short_ramp(bounded, life_s, effort)
    )
    return Job(settings, planned, bounded, position, work, rung.ttft_s, rung.tpot_s, is_cut_off)


def bound(
    planned: PlannedSetting,
    plan: LoadPlan,
    rung: RungPrediction,
    output_tokens: float,
    effort: Effort,
) -> tuple[LoadPlan, float]:
    """The plan with a window as the module says, and what it will cost by the closed form."""
    life_s = rung.ttft_s + rung.tpot_s * output_tokens
    work_per_s = _work_per_s(planned, rung)
    if plan.protocol is LoadProtocol.BURST:
        burst_s = plan.concurrency * output_tokens / rung.output_throughput
        longest_s = SAFETY * max(burst_s, plan.min_window_s)
        return replace(plan, max_window_s=longest_s / GIVE_UP), work_per_s * burst_s
    ramp_s = min(RAMP_LIVES[effort.start] * life_s, effort.most_work / work_per_s)
    affordable_s = max(effort.most_work / work_per_s - ramp_s, plan.min_window_s)
    shortest_s = min(max(plan.min_window_s, effort.lives * life_s), affordable_s)
    longest_s = min(shortest_s + END_LIVES * life_s, max(affordable_s, plan.max_window_s))
    is_gradual = effort.start is LoadStart.GRADUAL
    window = replace(
        plan,
        start=effort.start,
        min_window_s=shortest_s,
        max_window_s=longest_s,
        min_periods=1,
        max_ramp_s=LONGEST_RAMP * ramp_s if is_gradual else min(ramp_s, longest_s),
    )
    return window, work_per_s * (RAMP_WORK[effort.start] * ramp_s + longest_s)


def _has_short_ramp(plan: LoadPlan, life_s: float, effort: Effort) -> bool:
    """Whether streams have no time to begin one after another as in a study."""
    is_gradual = effort.start is LoadStart.GRADUAL and plan.concurrency > 1
    ramp_s = RAMP_LIVES[effort.start] * life_s
    return is_gradual and plan.max_ramp_s is not None and plan.max_ramp_s < ramp_s


def _work_per_s(planned: PlannedSetting, rung: RungPrediction) -> float:
    """What a second of virtual time costs."""
    shape = planned.shape
    rounds = planned.engines / max(rung.tpot_s, 1e-4)
    tokens = TOKEN_WORK * rung.output_throughput
    if shape.pp_size == 1:
        return tokens + STEP_WORK * rounds
    empty = max(slots(shape) - rung.slots, 0.0)
    visits = VISIT_WORK * rung.slots + EMPTY_VISIT_WORK * empty
    return tokens + shape.pp_size * rounds * visits


def run_job(job: Job) -> Sample:
    """Simulate one rung."""
    watched: list[WatchedPipeline] = []

    def make(profile: Profile, shape: ServerShape, seed: int, start_s: float) -> Pipeline:
        watched.append(WatchedPipeline(profile, shape, seed, start_s))
        return watched[-1]

    launch = job.planned.launch
    args, replicas = launch.server_args, launch.replicas
    spec = LaunchSpec(LAUNCH, launch.key, args, replicas, launch.gpus_per_replica)
    servers = SimulatedServers(job.settings, spec, make)
    servers.set_live(launch.live)
    load = servers.run_load(job.plan)
    span = (load.window_start_s, load.window_end_s)
    power = servers.read_power(*span)
    record = RungRecord(job.position, job.plan.concurrency, (load,), power)
    rung = judge_rung(record, job.settings.slo, job.plan)
    busy = sum(gpu.utilization or 0.0 for gpu in rung.gpus)
    ttft_s = rung.ttft_s.mean if rung.ttft_s else _mean(_first_tokens_s(load)) or job.ttft_s
    tpot_s = rung.tpot_s.mean if rung.tpot_s else _mean(_tokens_s(load)) or job.tpot_s
    return Sample(
        output_throughput=rung.output_throughput,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        busy_stages=busy / job.planned.shape.tp_size / job.planned.engines,
        slots=sum(each.occupied_slots(*span) for each in watched) / len(watched),
        power_w=rung.power_w or 0.0,
        objectives=_objectives(job, rung),
        misses_slo=_misses_slo(job, rung, ttft_s, tpot_s),
    )


def _first_tokens_s(load: LoadRun) -> list[float]:
    """Times to the first token of the whole load, for windows in which none came."""
    return [r.first_token_s - r.send_s for r in load.records if r.first_token_s is not None]


def _tokens_s(load: LoadRun) -> list[float]:
    """Times per token of unfinished requests, for windows in which none ended."""
    return [
        (r.token_s[-1] - r.token_s[0]) / (len(r.token_s) - 1)
        for r in load.records
        if len(r.token_s) > 1
    ]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _objectives(job: Job, rung: RungResult) -> tuple[tuple[int, float], ...]:
    level = levels(job.settings)[job.position]
    values = (
        (place, metric_value(rung, objective.metric))
        for place, objective in enumerate(job.settings.objectives)
        if objective.concurrency == level
    )
    return tuple((place, value) for place, value in values if value is not None)


def _misses_slo(job: Job, rung: RungResult, ttft_s: float, tpot_s: float) -> bool:
    """By the rule of a trial; where this shorter window saw no latency, by the mean it shows."""
    e2e_s = ttft_s + tpot_s * (length_facts(job.plan.output_tokens).mean - 1)
    shown = {"ttft_s": ttft_s, "tpot_s": tpot_s, "itl_s": tpot_s, "e2e_s": e2e_s}
    for limit in job.settings.slo:
        value = metric_value(rung, f"{limit.metric}.{limit.percentile}")
        if excess_s(shown[limit.metric] if value is None else value, limit.limit_s) > 0:
            return True
    return False


def run_jobs(
    jobs: Sequence[Job], on_done: Callable[[float], None] = lambda _: None
) -> list[Sample]:
    """All jobs, in their order; on every CPU when there is enough to do.

    `on_done` is told the work of each job as it is done.
    """
    workers = min(os.cpu_count() or 1, len(jobs))
    if workers < 2 or sum(job.work for job in jobs) < WORTH_A_POOL:  # noqa: PLR2004
        samples = []
        for job in jobs:
            samples.append(run_job(job))
            on_done(job.work)
        return samples
    context = get_context("fork")
    with ProcessPoolExecutor(workers, context, _die_with, (os.getpid(),)) as pool:
        futures = [pool.submit(run_job, job) for job in jobs]
        samples = []
        try:
            for future, job in zip(futures, jobs, strict=True):
                samples.append(future.result())
                on_done(job.work)
        except BaseException:  # Ctrl-C, too: leaving the pool would wait for all that is queued
            pool.shutdown(cancel_futures=True)
            raise
        return samples


def _die_with(parent: int) -> None:
    """Begin a worker: Ctrl-C is its parent's to handle, and it ends when the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def combine(level: float, samples: Sequence[Sample]) -> RungPrediction:
    """The median over seeds of each number."""
    rates = sorted(sample.output_throughput for sample in samples)
    differ = rates[-1] > rates[0]
    places = sorted({place for sample in samples for place, _ in sample.objectives})
    return RungPrediction(
        level=level,
        output_throughput=statistics.median(rates),
        ttft_s=statistics.median(sample.ttft_s for sample in samples),
        tpot_s=statistics.median(sample.tpot_s for sample in samples),
        busy_stages=statistics.median(sample.busy_stages for sample in samples),
        slots=statistics.median(sample.slots for sample in samples),
        power_w=statistics.median(sample.power_w for sample in samples),
        basis=Basis.SIMULATION,
        p10=percentile(rates, 0.1) if differ else None,
        p90=percentile(rates, 0.9) if differ else None,
        objectives=tuple(
            (at, statistics.median(v for s in samples for place, v in s.objectives if place == at))
            for at in places
        ),
        misses_slo=2 * sum(sample.misses_slo for sample in samples) > len(samples),
    )
