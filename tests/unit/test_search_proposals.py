"""Retries, baselines, re-measurements: which trial is due, over histories written by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.search.history import PastTrial, count
from runner.search.proposals import (
    MOST_TRIES,
    finalists,
    given_up,
    is_tried_again,
    next_baseline,
    proposal_of,
    repeat_due,
    retry_due,
    search_is_full,
    settle,
)
from runner.settings import Baseline, Direction, MeasureSettings, Objective
from runner.trial import Outcome
from tests.samples import make_result

COMPLETE, PRUNED, INFEASIBLE = Outcome.COMPLETE, Outcome.PRUNED, Outcome.INFEASIBLE
FAILED, INVALID, LOST = Outcome.FAILED, Outcome.INVALID, Outcome.LOST
SPEED = Objective("output_throughput", 32, Direction.MAXIMIZE)
DELAY = Objective("ttft_s.p99", 32, Direction.MINIMIZE)


def past(
    number: int, outcome: Outcome | None = COMPLETE, *values: float, **more: object
) -> PastTrial:
    fields: dict[str, object] = {"params": {"pp_size": number}, "spec_hash": f"hash-{number}"}
    return PastTrial(number, outcome=outcome, values=values, **{**fields, **more})  # type: ignore[arg-type]


def chain(*outcomes: Outcome) -> list[PastTrial]:
    """One setting tried again and again."""
    return [
        past(number, outcome, retry_of=number - 1 if number else None)
        for number, outcome in enumerate(outcomes)
    ]


def measure(repeats: int = 1, finalists: int = 2) -> MeasureSettings:
    return MeasureSettings(0.01, 10.0, 120.0, repeats, finalists)


@pytest.mark.parametrize(
    ("outcomes", "again"),
    [
        ([COMPLETE], False),
        ([PRUNED], False),
        ([INFEASIBLE], False),
        ([FAILED], True),
        ([FAILED, FAILED], False),
        ([FAILED, COMPLETE], False),
        ([INVALID], True),
        ([INVALID, INVALID], True),
        ([INVALID, INVALID, INVALID], False),
        ([INVALID, INVALID, FAILED], False),
        ([INVALID, FAILED], True),
        ([LOST], True),
        ([LOST, LOST, LOST, LOST], True),
        ([FAILED, LOST], True),
        ([FAILED, LOST, FAILED], False),
        ([LOST, LOST, FAILED], True),
        ([INVALID, LOST, LOST, INVALID], True),
    ],
)
def test_setting_is_tried_again_by_the_table_of_outcomes(
    outcomes: list[Outcome], again: bool
) -> None:
    history = chain(*outcomes)
    assert is_tried_again(outcomes) is again
    assert retry_due(history) == (history[-1] if again else None)


@given(st.lists(st.sampled_from([FAILED, INVALID]), min_size=1, max_size=8))
def test_bad_setting_is_given_up_after_three_tries_in_any_order(outcomes: list[Outcome]) -> None:
    begun = 1
    while begun < len(outcomes) and is_tried_again(outcomes[:begun]):
        begun += 1
    history = chain(*outcomes[:begun])
    assert len(history) <= MOST_TRIES
    is_open = retry_due(history) is not None
    assert given_up(history) == (frozenset() if is_open else {history[-1].number})


def test_retry_that_runs_is_not_begun_twice() -> None:
    assert retry_due([past(0, FAILED), past(1, None, retry_of=0)]) is None


def test_first_of_several_bad_trials_is_retried_first() -> None:
    history = [past(0), past(1, LOST), past(2, FAILED)]
    assert retry_due(history) == history[1]


def test_infeasible_and_lost_settings_are_not_given_up_by_failing() -> None:
    assert given_up([past(0, INFEASIBLE), past(1, LOST), past(2, COMPLETE)]) == frozenset()


def test_third_invalid_result_is_kept_as_failed_for_the_same_reason() -> None:
    running = past(2, None, retry_of=1)
    history = [*chain(INVALID, INVALID), running]
    third = make_result(2, None, outcome=INVALID, reason="not steady")
    kept = settle(history, third)
    assert (kept.outcome, kept.reason) == (FAILED, "not steady")


@pytest.mark.parametrize("outcome", [INVALID, LOST, FAILED, COMPLETE])
def test_earlier_results_are_kept_as_they_are(outcome: Outcome) -> None:
    history = [past(0, INVALID), past(1, None, retry_of=0)]
    result = make_result(1, None, outcome=outcome)
    assert settle(history, result) == result


def test_baselines_come_in_order_and_once_whatever_became_of_them() -> None:
    first, second = Baseline("tp8", {"tp_size": 8}), Baseline("pp8", {"pp_size": 8})
    assert next_baseline([], [first, second]) == first
    assert next_baseline([past(0, FAILED, name="tp8")], [first, second]) == second
    done = [past(0, FAILED, name="tp8"), past(1, None, name="pp8")]
    assert next_baseline(done, [first, second]) is None


def test_remeasured_baseline_does_not_count_as_its_first_measurement() -> None:
    first = Baseline("tp8", {"tp_size": 8})
    assert next_baseline([past(4, name="tp8", repeat_of=1)], [first]) == first


def test_search_is_full_when_those_that_count_or_run_are_enough() -> None:
    history = [past(0), past(1, PRUNED), past(2, INFEASIBLE), past(3, FAILED), past(4, None)]
    assert search_is_full(history, 3)
    assert not search_is_full(history, 4)
    assert not search_is_full([past(0), past(1, repeat_of=0), past(2, None, repeat_of=0)], 2)


def test_finalists_and_baselines_are_measured_again_in_rounds() -> None:
    history = [
        past(0, COMPLETE, 1.0, name="tp8"),
        *(past(n, COMPLETE, float(n)) for n in (1, 2, 3)),
    ]
    turns: list[int] = []
    while (due := repeat_due(history, [SPEED], measure(repeats=2))) is not None:
        turns.append(due.number)
        history.append(past(len(history), COMPLETE, 9.0, repeat_of=due.number))
    assert turns == [3, 2, 0, 3, 2, 0]


def test_repeat_that_ended_badly_was_its_turn() -> None:
    history = [past(0, COMPLETE, 1.0), past(1, INFEASIBLE, repeat_of=0)]
    assert repeat_due(history, [SPEED], measure()) is None


def test_retry_of_a_repeat_is_no_further_turn() -> None:
    history = [past(0, COMPLETE, 1.0), past(1, FAILED, repeat_of=0)]
    history.append(past(2, COMPLETE, 1.0, repeat_of=0, retry_of=1))
    assert repeat_due(history, [SPEED], measure(repeats=2)) == history[0]


@pytest.mark.parametrize("changes", [{"repeats": 0}, {"finalists": 0}])
def test_nothing_is_measured_again_when_none_is_asked_for(changes: dict[str, int]) -> None:
    assert repeat_due([past(0, COMPLETE, 1.0)], [SPEED], measure(**changes)) is None


def test_baseline_that_failed_is_not_measured_again() -> None:
    assert repeat_due([past(0, FAILED, name="tp8")], [SPEED], measure()) is None


def test_finalists_are_the_best_by_direction_and_pruned_ones_are_none() -> None:
    history = [past(0, COMPLETE, 5.0), past(1, COMPLETE, 7.0), past(2, PRUNED, 9.0)]
    assert [t.number for t in finalists(history, [SPEED], 2)] == [1, 0]
    assert [t.number for t in finalists(history, [DELAY], 2)] == [0, 1]


def test_finalists_keep_the_limits_before_they_are_fast() -> None:
    history = [
        past(0, COMPLETE, 9.0, constraints={"ttft_s.p99": 0.5}),
        past(1, COMPLETE, 1.0, constraints={"ttft_s.p99": -0.5}),
        past(2, COMPLETE, 8.0, constraints={"ttft_s.p99": 0.1}),
    ]
    assert [t.number for t in finalists(history, [SPEED], 3)] == [1, 2, 0]


def test_finalists_of_several_objectives_are_those_that_none_beats() -> None:
    history = [
        past(0, COMPLETE, 5.0, 2.0),
        past(1, COMPLETE, 9.0, 9.0),
        past(2, COMPLETE, 4.0, 3.0),
        past(3, COMPLETE, 6.0, 1.0),
    ]
    assert [t.number for t in finalists(history, [SPEED, DELAY], 2)] == [1, 3]


def test_equal_finalists_stay_in_the_order_of_their_numbers() -> None:
    history = [past(n, COMPLETE, 5.0) for n in range(4)]
    assert [t.number for t in finalists(history, [SPEED], 3)] == [0, 1, 2]


def test_only_a_remeasurement_asks_for_a_fresh_launch() -> None:
    assert proposal_of(past(3, None, repeat_of=1)).fresh_launch
    assert not proposal_of(past(3, None, retry_of=1)).fresh_launch


def test_counts_leave_remeasurements_out_but_for_running_ones() -> None:
    history = [
        *(past(n, outcome) for n, outcome in enumerate(Outcome)),
        past(6, COMPLETE, repeat_of=0),
        past(7, FAILED, repeat_of=0),
        past(8, None, repeat_of=0),
        past(9, None),
    ]
    counts = count(history, wanted=20)
    assert (counts.complete, counts.pruned, counts.infeasible) == (1, 1, 1)
    assert (counts.failed, counts.invalid, counts.lost) == (1, 1, 1)
    assert (counts.running, counts.wanted, counts.remeasured) == (2, 20, 1)


def test_a_shared_measurement_is_neither_a_finalist_nor_measured_again() -> None:
    history = [past(0, COMPLETE, 9.0), past(1, COMPLETE, 9.0, shares=0, name="same")]
    assert [trial.number for trial in finalists(history, (SPEED,), 2)] == [0]
    due = repeat_due(history, (SPEED,), measure())
    assert due is not None
    assert due.number == 0
    again = [*history, past(2, COMPLETE, 9.0, repeat_of=0)]
    assert repeat_due(again, (SPEED,), measure()) is None
