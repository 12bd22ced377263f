"""The straight line of a trial, on servers that do what a test tells them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from runner.errors import (
    ClusterLost,
    Infeasible,
    Interrupted,
    Invalid,
    LoadFailed,
    RunnerError,
    ServerFailed,
)
from runner.run_trial import run_trial
from runner.trial import (
    BatchSample,
    ClientHealth,
    Failure,
    GreedyOutput,
    Lengths,
    LoadPlan,
    LoadProtocol,
    LoadRun,
    Measurement,
    Outcome,
    Params,
    PowerSample,
    RungRecord,
    Stage,
    TrialSpec,
)


def plan(phase: str, concurrency: int = 4) -> LoadPlan:
    lengths = Lengths.fixed(8)
    return LoadPlan(phase, LoadProtocol.CLOSED_LOOP, concurrency, lengths, lengths, seed=0)


TRIAL = TrialSpec(
    number=3,
    params={"pp_size": 2},
    live={"pp_max_micro_batch_size": 2},
    rungs=(plan("rung-0", 32), plan("rung-1", 8), plan("rung-2", 1)),
    warmup=plan("warmup", 32),
    spec_hash="abc",
)


@dataclass
class ScriptedServers:
    """Records what it was asked; raises `error` when it comes to `phase`."""

    phase: str = ""
    error: RunnerError | None = None
    calls: list[str] = field(default_factory=list)

    def _step(self, phase: str) -> None:
        self.calls.append(phase)
        if phase == self.phase and self.error is not None:
            raise self.error

    def set_live(self, live: Params) -> Params:
        self._step("live")
        return {**live, "tp_size": 1}

    def greedy_outputs(self) -> tuple[tuple[GreedyOutput, ...], ...]:
        self._step("greedy")
        return ((GreedyOutput((self.calls.count("greedy"),), (None,)),),)

    def run_load(self, plan: LoadPlan) -> LoadRun:
        self._step(plan.phase)
        return LoadRun((), 0.0, 1.0, 2.0, is_steady=True, client=ClientHealth(0.1, 0.0))

    def read_power(self, start_s: float, end_s: float) -> tuple[PowerSample, ...]:
        self._step(f"power {start_s:.0f}-{end_s:.0f}")
        return ()

    def read_batches(self, start_s: float, end_s: float) -> tuple[BatchSample, ...]:
        loads = sum(call.startswith("power") for call in self.calls)
        return (BatchSample((start_s + end_s) / 2, 0, running=loads),)

    def check_alive(self) -> None:
        self._step("alive")


@dataclass
class ScriptedJudge:
    """Asks for `restarts` loads a rung; goes on up to the rung `last`; keeps what it is told.

    The output of the first `wrong` times that it is told is wrong.
    """

    restarts: int = 1
    last: int = 99
    wrong: int = 0
    seen: list[RungRecord] = field(default_factory=list)

    def check_outputs(self, replicas: Sequence[Sequence[GreedyOutput]]) -> str | None:
        asked = replicas[0][0].tokens[0]
        return f"wrong output, answer {asked}" if asked <= self.wrong else None

    def next_load(self, position: int, loads: Sequence[LoadRun]) -> LoadPlan | None:
        if len(loads) == self.restarts:
            return None
        base = TRIAL.rungs[position]
        return replace(base, phase=f"{base.phase}-{len(loads)}")

    def go_on(self, rung: RungRecord) -> bool:
        self.seen.append(rung)
        return rung.position < self.last


def test_a_trial_is_one_line() -> None:
    servers, judge = ScriptedServers(), ScriptedJudge()

    measured = run_trial(TRIAL, servers, judge)

    assert measured == Measurement(
        {"pp_max_micro_batch_size": 2, "tp_size": 1}, rungs_measured=3, stopped_early=False
    )
    assert [(rung.position, rung.concurrency) for rung in judge.seen] == [(0, 32), (1, 8), (2, 1)]
    rung = ["power 1-2", "alive"]
    first, second, third = "rung-0-0", "rung-1-0", "rung-2-0"
    assert servers.calls == ["live", "greedy", "warmup", first, *rung, second, *rung, third, *rung]


def test_each_restart_of_a_rung_has_its_load_its_power_and_its_batches() -> None:
    servers, judge = ScriptedServers(), ScriptedJudge(restarts=3, last=0)

    run_trial(TRIAL, servers, judge)

    loads = [f"rung-0-{number}" for number in range(3)]
    assert servers.calls[3:] == [call for load in loads for call in (load, "power 1-2")] + ["alive"]
    assert len(judge.seen[0].loads) == 3
    assert [sample.running for sample in judge.seen[0].batches] == [1, 2, 3]


def test_the_driver_may_stop_it_between_rungs() -> None:
    servers = ScriptedServers()

    measured = run_trial(TRIAL, servers, ScriptedJudge(last=1))

    assert isinstance(measured, Measurement)
    assert (measured.rungs_measured, measured.stopped_early) == (2, True)
    assert "rung-2-0" not in servers.calls


def test_it_continues_at_its_next_unmeasured_rung() -> None:
    servers = ScriptedServers()

    run_trial(replace(TRIAL, first_rung=2), servers, ScriptedJudge())

    assert [call for call in servers.calls if call.startswith(("warm", "rung"))] == [
        "warmup",
        "rung-2-0",
    ]


def test_nothing_left_to_measure_asks_what_resolved_and_what_is_said() -> None:
    servers = ScriptedServers()

    run_trial(replace(TRIAL, first_rung=3), servers, ScriptedJudge())

    assert servers.calls == ["live", "greedy"]


def test_wrong_output_is_asked_for_again_and_what_stands_is_invalid() -> None:
    servers = ScriptedServers()

    measured = run_trial(TRIAL, servers, ScriptedJudge(wrong=2))

    assert measured == Failure(Stage.CANARY, Outcome.INVALID, "wrong output, answer 2")
    assert servers.calls == ["live", "greedy", "greedy"]


def test_output_that_is_right_when_asked_again_is_measured() -> None:
    measured = run_trial(TRIAL, ScriptedServers(), ScriptedJudge(wrong=1))

    assert isinstance(measured, Measurement)


@pytest.mark.parametrize(
    ("phase", "error", "stage", "outcome"),
    [
        ("live", Infeasible("cap 99"), Stage.LIVE, Outcome.INFEASIBLE),
        ("greedy", ServerFailed("no answer"), Stage.CANARY, Outcome.FAILED),
        ("warmup", LoadFailed("all failed"), Stage.WARMUP, Outcome.FAILED),
        ("rung-1-0", Invalid("throttled"), Stage.MEASURE, Outcome.INVALID),
        ("alive", ClusterLost("node died"), Stage.MEASURE, Outcome.LOST),
    ],
)
def test_typed_failures_become_values(
    phase: str, error: RunnerError, stage: Stage, outcome: Outcome
) -> None:
    measured = run_trial(TRIAL, ScriptedServers(phase, error), ScriptedJudge())

    assert isinstance(measured, Failure)
    assert (measured.stage, measured.outcome, measured.message) == (stage, outcome, str(error))


def test_an_interruption_is_no_failure() -> None:
    with pytest.raises(Interrupted):
        run_trial(TRIAL, ScriptedServers("rung-0-0", Interrupted("asked")), ScriptedJudge())
