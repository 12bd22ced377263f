"""One trial as one straight line on running servers. Imports the words only."""

from __future__ import annotations

from runner.errors import ClusterLost, TrialError
from runner.trial import (
    Failure,
    GoOn,
    LoadPlan,
    Measurement,
    RungRecord,
    RunningServers,
    Stage,
    TrialSpec,
)


def run_trial(trial: TrialSpec, servers: RunningServers, go_on: GoOn) -> Measurement | Failure:
    """Set the live parameters, warm up, measure each rung; measures and does not judge."""
    stage = Stage.LIVE
    try:
        resolved = servers.set_live(trial.live)
        stage = Stage.WARMUP
        if trial.first_rung < len(trial.rungs):
            servers.run_load(trial.warmup)
        stage = Stage.MEASURE
        for position in range(trial.first_rung, len(trial.rungs)):
            rung = measure_rung(position, trial.rungs[position], servers)
            servers.check_alive()
            is_last = position == len(trial.rungs) - 1
            if not go_on(rung) and not is_last:
                return Measurement(resolved, position + 1, stopped_early=True)
        return Measurement(resolved, len(trial.rungs), stopped_early=False)
    except (TrialError, ClusterLost) as error:
        return Failure.of(error, stage)


def measure_rung(position: int, plan: LoadPlan, servers: RunningServers) -> RungRecord:
    """One rung: drive the load, then read the power of its very window."""
    load = servers.run_load(plan)
    power = servers.read_power(load.window_start_s, load.window_end_s)
    return RungRecord(position, plan.concurrency, load, power)
