"""A setting by simulation: the study's own ladder, protocol and lengths, over several seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from runner.forecast.estimate import Estimator
from runner.forecast.prediction import Basis, Prediction
from runner.forecast.setting import not_modelled, plan_setting, study_profile
from runner.forecast.simulate import Effort, Job, Sample, combine, make_job, run_jobs
from runner.machine.shape import Refusal
from runner.plans import at_lengths
from runner.settings import StudySettings
from runner.trial import LoadStart, Params, TrialLengths

EFFORT = Effort(lives=3.0, most_work=1.2e6, start=LoadStart.GRADUAL)
AT_ONCE = replace(EFFORT, start=LoadStart.TOGETHER)
DEFAULT_SEEDS = 5


@dataclass(frozen=True, slots=True)
class Progress:
    """Work done so far, and in all, in the same unit."""

    done: float
    total: float


def predict(
    settings: StudySettings,
    params: Params,
    seeds: int = DEFAULT_SEEDS,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Prediction:
    """Simulate every rung of the study's ladder under each seed, and take the median.

    Pipelines have metastable states, so one run of a setting says little: what is told is the
    middle of several, with 10th and 90th percentile where they differ. The servers are those that
    a trial of the setting would get, replicas included; how long each rung is simulated:
    simulate.py. Where like replies remember how their load began, the highest rung is simulated
    with streams that begin together, too. Raises ConfigError when the study names no profile.
    """
    settings = at_lengths(settings, TrialLengths.WORKLOAD)
    profile = study_profile(settings)
    estimator = Estimator(settings, profile)
    planned = plan_setting(settings, profile, params)
    if isinstance(planned, Refusal):
        return estimator.refused(planned.text)
    ladder = settings.workload.ladder

    def jobs_at(level: float, effort: Effort) -> list[Job]:
        return [
            make_job(settings, estimator, planned, level, seed, effort) for seed in range(seeds)
        ]

    jobs: list[Job] = [job for level in ladder for job in jobs_at(level, EFFORT)]
    is_cut_off = any(job.is_cut_off for job in jobs)
    highest = max(ladder)
    has_other_start = settings.workload.remembers_start and not is_cut_off
    at_once = jobs_at(highest, AT_ONCE) if has_other_start else []
    total, done = sum(job.work for job in (*jobs, *at_once)), 0.0

    def note(work: float) -> None:
        nonlocal done
        done += work
        on_progress(Progress(done, total))

    samples: list[Sample] = run_jobs([*jobs, *at_once], note)
    rungs = tuple(
        combine(level, samples[place * seeds : (place + 1) * seeds])
        for place, level in enumerate(ladder)
    )
    if at_once:
        together = median(sample.output_throughput for sample in samples[len(jobs) :])
        rungs = tuple(
            replace(rung, together=together) if rung.level == highest else rung for rung in rungs
        )
    return Prediction(
        protocol=settings.workload.protocol,
        output_tokens=estimator.output.mean,
        basis=Basis.SIMULATION,
        rungs=rungs,
        seeds=seeds,
        is_cut_off=is_cut_off,
        not_modelled=not_modelled((*settings.engine.args, *params)),
    )
