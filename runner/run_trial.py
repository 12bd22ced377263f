"""One trial as one straight line on running servers. Imports the words only."""

from __future__ import annotations

from runner.errors import ClusterLost, Invalid, TrialError
from runner.trial import (
    BatchSample,
    Failure,
    Judge,
    LoadRun,
    Measurement,
    PowerSample,
    RungRecord,
    RunningServers,
    Stage,
    TrialSpec,
)


def run_trial(trial: TrialSpec, servers: RunningServers, judge: Judge) -> Measurement | Failure:
    """Set the live parameters, check the output, warm up, measure each rung; does not judge."""
    stage = Stage.LIVE
    try:
        resolved = servers.set_live(trial.live)
        stage = Stage.CANARY
        check_outputs(servers, judge)
        stage = Stage.WARMUP
        if trial.first_rung < len(trial.rungs):
            servers.run_load(trial.warmup)
        stage = Stage.MEASURE
        for position in range(trial.first_rung, len(trial.rungs)):
            rung = measure_rung(trial, position, servers, judge)
            servers.check_alive()
            is_last = position == len(trial.rungs) - 1
            if not judge.go_on(rung) and not is_last:
                return Measurement(resolved, position + 1, stopped_early=True)
        return Measurement(resolved, len(trial.rungs), stopped_early=False)
    except (TrialError, ClusterLost) as error:
        return Failure.of(error, stage)


def check_outputs(servers: RunningServers, judge: Judge) -> None:
    """Raise Invalid when the servers say what they should not, and again when asked again."""
    if judge.check_outputs(servers.greedy_outputs()) is None:
        return
    wrong = judge.check_outputs(servers.greedy_outputs())
    if wrong is not None:
        raise Invalid(wrong)


def measure_rung(
    trial: TrialSpec, position: int, servers: RunningServers, judge: Judge
) -> RungRecord:
    """One rung: its load as often as the driver asks, each with its power and its batches."""
    loads: list[LoadRun] = []
    power: list[PowerSample] = []
    batches: list[BatchSample] = []
    while (plan := judge.next_load(position, loads)) is not None:
        load = servers.run_load(plan)
        power += servers.read_power(*load.window)
        batches += servers.read_batches(*load.window)
        loads.append(load)
    concurrency = trial.rungs[position].concurrency
    return RungRecord(position, concurrency, tuple(loads), tuple(power), tuple(batches))
