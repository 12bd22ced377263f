"""From measured rungs to a trial's result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runner.canary import CanaryReference, CanaryState, GreedyOutput
from runner.measure.hopeless import HOPELESS
from runner.measure.metrics import judge_rung
from runner.plans import rung_plans
from runner.settings import StudySettings
from runner.trial import (
    ClientHealth,
    Failure,
    LoadPlan,
    LoadRun,
    Measurement,
    Outcome,
    RequestRecord,
    RequestStatus,
    RungRecord,
    RungResult,
    Stage,
)
from runner.verdict import DRIFTING, CanaryKeeper, RungKeeper, TrialIdentity, conclude
from tests.studies import study

IDENTITY = TrialIdentity(7, None, {"pp_size": 8}, "abc", None, None)
MEASURED = Measurement({"pp_size": 8}, rungs_measured=3, stopped_early=False)


def record(plan: LoadPlan, position: int, wanted: int = 32) -> RungRecord:
    """Each stream sends requests of 32 tokens in 3.2 s, one after the other."""
    requests = tuple(
        RequestRecord(
            request_id=f"r{stream:03d}-{turn}",
            replica=0,
            send_s=3.2 * turn,
            first_token_s=3.2 * turn + 0.1,
            end_s=3.2 * (turn + 1),
            token_s=tuple(3.2 * turn + 0.1 * (token + 1) for token in range(32)),
            prompt_tokens=64,
            output_tokens=32,
            wanted_tokens=wanted,
            cached_tokens=0,
            status=RequestStatus.OK,
        )
        for stream in range(plan.concurrency)
        for turn in range(6)
    )
    run = LoadRun(requests, 0.0, 3.2, 16.0, is_steady=True, client=ClientHealth(0.1, 0.0))
    return RungRecord(position, plan.concurrency, (run,), power=())


class Driver:
    """Keeps what the keeper calls back with."""

    def __init__(self, settings: StudySettings, reason: str | None = None) -> None:
        self.kept: list[RungRecord] = []
        self.judged: list[RungResult] = []
        self.asked: list[tuple[int, float, float]] = []
        self.reason = reason
        self.keeper = RungKeeper(
            settings=settings,
            plans=rung_plans(settings, 7),
            keep=self.kept.append,
            should_stop=self.should_stop,
            on_judged=self.judged.append,
        )

    def should_stop(self, position: int, value: float, doubt: float) -> str | None:
        self.asked.append((position, value, doubt))
        return self.reason

    def measure(self, *, wanted: int = 32) -> list[bool]:
        """Every rung until the keeper says stop."""
        answers: list[bool] = []
        for position, plan in enumerate(self.keeper.plans):
            answers.append(self.keeper.go_on(record(plan, position, wanted)))
            if not answers[-1]:
                break
        return answers


def test_a_trial_is_complete_when_every_rung_was_measured() -> None:
    driver = Driver(study())

    assert driver.measure() == [True, True, True]
    result = conclude(IDENTITY, MEASURED, driver.keeper, launch=3)

    assert result.outcome is Outcome.COMPLETE
    assert result.values == pytest.approx([320.0])
    assert [rung.concurrency for rung in result.rungs] == [32, 8, 1]
    assert (result.number, result.launch, result.reason) == (7, 3, None)
    assert len(driver.kept) == 3


def test_records_are_kept_before_they_are_judged() -> None:
    driver = Driver(study())
    order: list[str] = []
    driver.keeper.keep = lambda _: order.append("kept")
    driver.keeper.on_judged = lambda _: order.append("judged")

    driver.keeper.go_on(record(driver.keeper.plans[0], 0))

    assert order == ["kept", "judged"]


def test_a_reason_to_stop_prunes_it_and_its_value_stays() -> None:
    driver = Driver(study(), reason="clearly behind")

    assert driver.measure() == [False]
    result = conclude(IDENTITY, replace(MEASURED, stopped_early=True), driver.keeper, launch=3)

    assert (result.outcome, result.reason) == (Outcome.PRUNED, "clearly behind")
    assert result.values == pytest.approx([320.0])


def drifting(rung: RungRecord) -> RungRecord:
    return replace(rung, loads=tuple(replace(load, is_steady=False) for load in rung.loads))


def test_a_drifting_rung_that_is_far_behind_all_the_same_is_not_tried_again() -> None:
    driver = Driver(study(), reason="still far behind")
    assert not driver.keeper.go_on(drifting(record(driver.keeper.plans[0], 0)))
    ((position, value, doubt),) = driver.asked
    assert (position, doubt) == (0, DRIFTING)
    assert value == pytest.approx(320.0)
    result = conclude(IDENTITY, replace(MEASURED, stopped_early=True), driver.keeper, launch=3)
    assert (result.outcome, result.reason) == (Outcome.PRUNED, "still far behind")
    assert "not steady" in result.rungs[0].reasons[0]


def test_a_drifting_rung_that_may_be_good_is_invalid() -> None:
    driver = Driver(study())
    assert not driver.keeper.go_on(drifting(record(driver.keeper.plans[0], 0)))
    result = conclude(IDENTITY, MEASURED, driver.keeper, launch=3)
    assert result.outcome is Outcome.INVALID


def test_a_rung_that_is_unfair_in_another_way_is_tried_again_although_a_restart_drifts() -> None:
    driver = Driver(study(), reason="still far behind")
    rung = record(driver.keeper.plans[0], 0)
    (load,) = (replace(each, client=ClientHealth(0.95, 0.0)) for each in rung.loads)
    loads = (replace(load, is_steady=False), load, load)
    assert not driver.keeper.go_on(replace(rung, loads=loads))
    assert driver.asked == []
    assert conclude(IDENTITY, MEASURED, driver.keeper, launch=3).outcome is Outcome.INVALID


def cut_short(rung: RungRecord, worth: float) -> RungRecord:
    load = replace(rung.loads[0], is_steady=False, cut_below=worth)
    return replace(rung, loads=(load,))


def test_a_rung_that_was_cut_short_prunes_its_trial_and_keeps_its_value() -> None:
    driver = Driver(study(), reason="far behind 1250")
    assert not driver.keeper.go_on(cut_short(record(driver.keeper.plans[0], 0), 1000.0))
    result = conclude(IDENTITY, replace(MEASURED, stopped_early=True), driver.keeper, launch=3)
    said = f"cut short: at 320 tokens/s it was less than {HOPELESS:.0%} of the 1000 it had to reach"
    assert (result.outcome, result.reason) == (Outcome.PRUNED, f"{said}; far behind 1250")
    assert result.values == pytest.approx([320.0])
    (rung,) = result.rungs
    assert (rung.valid, rung.reasons, rung.notes, rung.cut_below) == (False, (said,), (), 1000.0)


def test_a_rung_that_was_cut_short_and_is_not_far_behind_is_invalid() -> None:
    driver = Driver(study())
    assert not driver.keeper.go_on(cut_short(record(driver.keeper.plans[0], 0), 1000.0))
    result = conclude(IDENTITY, MEASURED, driver.keeper, launch=3)
    assert result.outcome is Outcome.INVALID


def test_a_rung_that_was_cut_short_and_unfair_is_measured_again() -> None:
    driver = Driver(study(), reason="far behind")
    rung = cut_short(record(driver.keeper.plans[0], 0, wanted=33), 1000.0)
    assert not driver.keeper.go_on(rung)
    assert conclude(IDENTITY, MEASURED, driver.keeper, launch=3).outcome is Outcome.INVALID


def test_a_search_rung_is_told_what_it_must_reach() -> None:
    driver = Driver(study())
    driver.keeper.worth = {0: 80.0}.get
    told = [driver.keeper.next_load(position, []) for position in (0, 1)]
    assert [plan.worth for plan in told if plan is not None] == [80.0, None]


def test_a_re_measurement_is_never_told_what_it_must_reach() -> None:
    driver = Driver(study())
    driver.keeper.plans = rung_plans(study(), 7, is_repeat=True)
    driver.keeper.worth = {0: 80.0}.get
    plan = driver.keeper.next_load(0, [])
    assert plan is not None
    assert plan.worth is None


def test_a_rung_that_is_unfair_for_another_reason_too_is_not_judged_by_its_value() -> None:
    driver = Driver(study(), reason="still far behind")
    assert not driver.keeper.go_on(drifting(record(driver.keeper.plans[0], 0, wanted=33)))
    assert driver.asked == []
    assert conclude(IDENTITY, MEASURED, driver.keeper, launch=3).outcome is Outcome.INVALID


def test_a_reason_at_the_last_rung_comes_too_late_to_prune() -> None:
    driver = Driver(study())
    for position, plan in enumerate(driver.keeper.plans):
        driver.reason = "clearly behind" if position == 2 else None
        driver.keeper.go_on(record(plan, position))

    assert driver.keeper.is_decided
    assert conclude(IDENTITY, MEASURED, driver.keeper, None).outcome is Outcome.COMPLETE


def test_an_unfair_rung_of_the_objective_makes_it_invalid() -> None:
    driver = Driver(study())

    assert driver.measure(wanted=64) == [False]
    result = conclude(IDENTITY, replace(MEASURED, stopped_early=True), driver.keeper, launch=3)

    assert (result.outcome, result.stage) == (Outcome.INVALID, Stage.JUDGE)
    assert result.reason is not None
    assert result.reason.startswith("at concurrency 32: ")
    assert driver.asked == []


def test_an_unfair_rung_beside_the_objective_is_shown_but_not_fatal() -> None:
    driver = Driver(study())
    plans = driver.keeper.plans
    rungs = [record(plans[0], 0), record(plans[1], 1, wanted=64), record(plans[2], 2)]

    assert [driver.keeper.go_on(rung) for rung in rungs] == [True, True, True]
    result = conclude(IDENTITY, MEASURED, driver.keeper, launch=3)

    assert result.outcome is Outcome.COMPLETE
    assert [rung.valid for rung in result.rungs] == [True, False, True]


def test_what_cannot_be_computed_is_no_value() -> None:
    objective = [{"metric": "tokens_per_joule", "concurrency": 32, "direction": "maximize"}]
    driver = Driver(study(objectives=objective))
    driver.measure()

    result = conclude(IDENTITY, MEASURED, driver.keeper, launch=3)

    assert result.outcome is Outcome.INVALID
    assert result.values == ()


def test_a_failure_keeps_its_stage_reason_and_log() -> None:
    driver = Driver(study())
    failure = Failure(Stage.START, Outcome.INFEASIBLE, "out of memory", "server.log")

    result = conclude(IDENTITY, failure, driver.keeper, launch=None)

    assert (result.outcome, result.stage, result.reason, result.log_path) == (
        Outcome.INFEASIBLE,
        Stage.START,
        "out of memory",
        "server.log",
    )


def test_limits_are_seconds_over_or_under() -> None:
    slo = {"ttft_s": {"p99": 0.5}, "tpot_s": {"p50": 0.02}}
    driver = Driver(study(slo=slo))
    driver.measure()

    result = conclude(IDENTITY, MEASURED, driver.keeper, launch=3)

    assert result.constraints == pytest.approx((-0.4, 0.08))


def test_a_limit_that_was_not_measured_is_missed() -> None:
    one_token = study(slo={"tpot_s": {"p50": 0.02}})
    driver = Driver(one_token)
    plan = driver.keeper.plans[0]
    whole = record(plan, 0)
    single = tuple(
        replace(r, token_s=r.token_s[:1], output_tokens=1, wanted_tokens=1)
        for r in whole.loads[0].records
    )
    driver.keeper.go_on(replace(whole, loads=(replace(whole.loads[0], records=single),)))

    result = conclude(IDENTITY, replace(MEASURED, stopped_early=True), driver.keeper, None)

    assert result.constraints == (0.02,)


def test_judging_again_gives_the_same() -> None:
    settings = study()
    plan = rung_plans(settings, 7)[0]

    assert judge_rung(record(plan, 0), settings.slo, plan) == judge_rung(
        record(plan, 0), settings.slo, plan
    )


def test_outputs_are_kept_before_they_are_compared() -> None:
    right, wrong = GreedyOutput((1, 2), (3.0, 3.0)), GreedyOutput((1, 9), (3.0, 3.0))
    kept: list[object] = []
    reference = CanaryReference(trial=0, launch=0, numerics={}, outputs=(right,))
    keeper = replace(Driver(study()).keeper, canary=CanaryKeeper(reference, kept.append))

    assert keeper.check_outputs(()) is None
    assert kept == []
    assert keeper.check_outputs(((right,), (wrong,))) is not None
    assert kept == [((right,), (wrong,))]
    failure = Failure(Stage.CANARY, Outcome.INVALID, "wrong output")
    result = conclude(IDENTITY, failure, keeper, launch=3)
    assert result.canary is not None
    assert result.canary.state is CanaryState.MISMATCHED


def test_a_result_says_what_runs_otherwise_than_asked() -> None:
    driver = Driver(study())
    driver.measure()
    measured = replace(MEASURED, resolved={"cuda_graph": False, "pp_size": 1})

    result = conclude(IDENTITY, measured, driver.keeper, launch=3)

    assert result.differences["cuda_graph"] == (True, False)
