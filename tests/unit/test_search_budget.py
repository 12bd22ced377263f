"""When a trial is not worth its other rungs, and when a study has spent its budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from runner.search.budget import reason_to_stop, spent_budget, worth
from runner.search.history import PastTrial
from runner.settings import Direction, Objective, SearchSettings
from runner.trial import Outcome

SPEED = Objective("output_throughput", 32, Direction.MAXIMIZE)
DELAY = Objective("ttft_s.p99", 32, Direction.MINIMIZE)
TRIAL = PastTrial(9, {"pp_size": 8}, "hash-9")


def complete(number: int, value: float, excess_s: float = 0.0) -> PastTrial:
    limits = {"ttft_s.p99": excess_s}
    ended = Outcome.COMPLETE
    return PastTrial(number, {}, f"hash-{number}", ended, values=(value,), constraints=limits)


def pruned(number: int, value: float) -> PastTrial:
    ended = Outcome.PRUNED
    return PastTrial(number, {}, f"hash-{number}", ended, values=(value,), reported={0: value})


HISTORY = [complete(0, 100.0), complete(1, 60.0), complete(2, 80.0), complete(3, 90.0), TRIAL]


def stop(
    value: float,
    trial: PastTrial = TRIAL,
    history: Sequence[PastTrial] = HISTORY,
    objective: Objective = SPEED,
    position: int = 0,
) -> str | None:
    return reason_to_stop(trial, history, [objective], position, value)


def test_clearly_slower_trial_is_stopped_with_the_numbers_in_the_reason() -> None:
    assert stop(79.0) == (
        "output_throughput 79 at concurrency 32 is more than 20% behind 100, "
        "the best so far (trial 0)"
    )


@pytest.mark.parametrize("value", [80.0, 95.0, 200.0])
def test_trial_within_a_fifth_of_the_best_goes_on(value: float) -> None:
    assert stop(value) is None


@pytest.mark.parametrize(("value", "stops"), [(72.0, False), (72.1, True)])
def test_smaller_is_better_when_minimized(value: float, stops: bool) -> None:
    assert (stop(value, objective=DELAY) is not None) is stops


@pytest.mark.parametrize(
    ("objective", "value", "stops"),
    [(SPEED, 61.0, True), (SPEED, 62.0, False), (DELAY, 103.0, True), (DELAY, 102.0, False)],
)
def test_a_value_in_doubt_is_taken_at_its_best(
    objective: Objective, value: float, stops: bool
) -> None:
    """61 x 1.3 is below 80, 103 x 0.7 is above 72."""
    reason = reason_to_stop(TRIAL, HISTORY, [objective], 0, value, doubt=0.3)
    assert (reason is not None) is stops
    assert reason is None or "not steady yet, still" in reason


def test_trial_is_stopped_only_at_the_rung_of_the_objective() -> None:
    assert stop(1.0, position=1) is None


@pytest.mark.parametrize(
    "trial", [replace(TRIAL, name="tp8"), replace(TRIAL, repeat_of=0)], ids=["baseline", "repeat"]
)
def test_baselines_and_remeasurements_are_never_stopped(trial: PastTrial) -> None:
    assert stop(1.0, trial=trial) is None


def test_first_four_trials_are_never_stopped() -> None:
    assert stop(1.0, history=[*HISTORY[:3], TRIAL]) is None


def test_trials_without_a_value_do_not_count_as_first_trials() -> None:
    failed = [PastTrial(n, {}, f"hash-{n}", Outcome.FAILED) for n in range(4, 8)]
    assert stop(1.0, history=[*HISTORY[:3], *failed, TRIAL]) is None


def test_pruned_trials_are_compared_with_too() -> None:
    history = [pruned(0, 100.0), pruned(1, 50.0), complete(2, 10.0), complete(3, 10.0), TRIAL]
    assert stop(79.0, history=history) is not None


def test_remeasurements_are_not_compared_with() -> None:
    lucky = replace(complete(4, 1000.0), repeat_of=0)
    assert stop(95.0, history=[*HISTORY[:4], lucky, TRIAL]) is None


def test_trial_that_misses_a_limit_is_no_reason_to_stop() -> None:
    fast_but_late = [complete(n, 1000.0, excess_s=0.1) for n in range(4)]
    assert stop(60.0, history=[*fast_but_late, TRIAL]) is None
    assert stop(60.0, history=[*fast_but_late, complete(4, 70.0), TRIAL]) is None
    assert stop(50.0, history=[*fast_but_late, complete(4, 70.0), TRIAL]) is not None


def test_several_objectives_never_stop_a_trial() -> None:
    assert reason_to_stop(TRIAL, HISTORY, [SPEED, DELAY], 0, 1.0) is None


@pytest.mark.parametrize(
    ("limits", "spent"),
    [
        ({}, None),
        ({"minutes": 30.0}, None),
        ({"minutes": 29.0}, "search.minutes: 29.5 of 29 are used"),
        ({"launches": 7}, "search.launches: 7 of 7 are used"),
        ({"launches": 8}, None),
        ({"energy_j": 5000.0}, "search.energy_j: 5000 of 5000 are used"),
        ({"energy_j": 5001.0}, None),
    ],
)
def test_spent_budget_is_named_with_its_numbers(
    limits: dict[str, float], spent: str | None
) -> None:
    search = replace(SearchSettings("auto", 20, 0, None, None, None, None), **limits)  # type: ignore[arg-type]
    assert spent_budget(search, 29.5, 7, 5000.0) == spent


@pytest.mark.parametrize("value", [79.9, 80.0, 80.1])
def test_a_load_must_reach_what_does_not_stop_its_trial(value: float) -> None:
    least = worth(TRIAL, HISTORY, [SPEED], 0)
    assert least is not None
    assert (stop(value) is not None) is (value < least)


@pytest.mark.parametrize(
    "trial",
    [replace(TRIAL, name="tp8"), replace(TRIAL, repeat_of=0), replace(TRIAL, retry_of=5)],
    ids=["baseline", "repeat", "retry"],
)
def test_what_must_be_measured_in_full_has_nothing_to_reach(trial: PastTrial) -> None:
    assert worth(trial, HISTORY, [SPEED], 0) is None


@pytest.mark.parametrize(
    "objective",
    [
        DELAY,
        replace(SPEED, metric="total_throughput"),
        replace(SPEED, metric="tokens_per_joule"),
        replace(SPEED, direction=Direction.MINIMIZE),
    ],
)
def test_only_a_throughput_that_the_load_sees_must_be_reached(objective: Objective) -> None:
    assert worth(TRIAL, HISTORY, [objective], 0) is None


def test_nothing_must_be_reached_where_nothing_would_be_stopped() -> None:
    assert worth(TRIAL, HISTORY, [SPEED], 1) is None
    assert worth(TRIAL, HISTORY, [SPEED, DELAY], 0) is None
    assert worth(TRIAL, [*HISTORY[:3], TRIAL], [SPEED], 0) is None
    assert worth(TRIAL, [TRIAL], [SPEED], 0) is None
