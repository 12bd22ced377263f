"""What Optuna is told of each outcome, read back from a real SQLite storage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial

from runner.errors import StudyError
from runner.search.proposals import Proposal
from runner.search.study import Search
from runner.settings import Baseline, Direction, Objective, SloLimit, StudySettings
from runner.trial import Outcome
from tests.search_samples import CAP, DEPTH, bad, open_search, result_of, search_settings

LIMITS = (SloLimit("ttft_s", "p99", 2.0), SloLimit("tpot_s", "p99", 0.1))
TWO = (
    Objective("output_throughput", 32, Direction.MAXIMIZE),
    Objective("ttft_s.p99", 32, Direction.MINIMIZE),
)


@pytest.fixture
def search(tmp_path: Path) -> Iterator[Search]:
    opened = open_search(search_settings(baselines=()), tmp_path)
    yield opened
    opened.close()


def ask(search: Search) -> Proposal:
    proposal = search.ask()
    assert proposal is not None
    return proposal


def stored(folder: Path, number: int = 0) -> FrozenTrial:
    url = f"sqlite:///{folder / 'optuna.db'}"
    return optuna.load_study(study_name="demo", storage=url).trials[number]


def begin(folder: Path, **changes: Any) -> tuple[Search, Proposal]:  # noqa: ANN401
    """A search with these settings and its first proposal."""
    search = open_search(search_settings(**{"baselines": (), **changes}), folder)
    return search, ask(search)


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Outcome.COMPLETE, "COMPLETE"),
        (Outcome.PRUNED, "PRUNED"),
        (Outcome.INFEASIBLE, "PRUNED"),
        (Outcome.FAILED, "FAIL"),
        (Outcome.INVALID, "FAIL"),
        (Outcome.LOST, "FAIL"),
    ],
)
def test_each_outcome_is_told_by_the_table(
    search: Search, tmp_path: Path, outcome: Outcome, state: str
) -> None:
    proposal = ask(search)
    complete = outcome is Outcome.COMPLETE
    search.tell(result_of(proposal) if complete else bad(proposal, outcome))
    trial = stored(tmp_path)
    assert trial.state.name == state
    assert trial.user_attrs["outcome"] == str(outcome)
    assert trial.user_attrs["reason"] == (None if complete else f"was {outcome}")
    violated = any(excess > 0 for excess in trial.constraints.values())
    assert violated is (outcome is Outcome.INFEASIBLE)


def test_attributes_say_what_a_trial_repeats(search: Search, tmp_path: Path) -> None:
    first = ask(search)
    search.tell(bad(first, Outcome.FAILED))
    search.tell(result_of(ask(search)))
    attrs = stored(tmp_path, 1).user_attrs
    assert (attrs["retry_of"], attrs["repeat_of"], attrs["name"]) == (0, None, None)
    assert attrs["spec_hash"] == first.spec_hash


def test_complete_trial_has_its_values_and_limits(tmp_path: Path) -> None:
    search, proposal = begin(tmp_path, slo=LIMITS)
    search.tell(result_of(proposal, values=(321.5,), constraints=(0.25, -0.03)))
    trial = stored(tmp_path)
    assert trial.values == [321.5]
    assert trial.constraints == {"ttft_s.p99": 0.25, "tpot_s.p99": -0.03}


def test_pruned_trial_has_the_last_value_reported(search: Search, tmp_path: Path) -> None:
    proposal = ask(search)
    search.report(proposal.number, 0, 120.0)
    search.report(proposal.number, 1, 80.0)
    search.tell(result_of(proposal, outcome=Outcome.PRUNED, values=(120.0,)))
    trial = stored(tmp_path)
    assert trial.intermediate_values == {0: 120.0, 1: 80.0}
    assert trial.value == 80.0


def test_pruned_trial_that_reported_nothing_has_its_own_value(
    search: Search, tmp_path: Path
) -> None:
    search.tell(result_of(ask(search), outcome=Outcome.PRUNED, values=(120.0,)))
    assert stored(tmp_path).value == 120.0


def test_rung_measured_again_after_a_kill_may_be_reported_again(
    search: Search, tmp_path: Path
) -> None:
    proposal = ask(search)
    search.report(proposal.number, 0, 120.0)
    search.report(proposal.number, 0, 121.0)
    assert stored(tmp_path).intermediate_values == {0: 121.0}


def test_several_objectives_are_told_and_nothing_is_reported(tmp_path: Path) -> None:
    search, first = begin(tmp_path, objectives=TWO)
    search.report(first.number, 0, 120.0)
    assert search.should_stop(first.number, 0, 120.0) is None
    search.tell(result_of(first, values=(120.0, 0.5)))
    search.tell(result_of(ask(search), outcome=Outcome.PRUNED, values=(1.0, 2.0)))
    assert stored(tmp_path).values == [120.0, 0.5]
    assert stored(tmp_path).intermediate_values == {}
    assert (stored(tmp_path, 1).state.name, stored(tmp_path, 1).values) == ("PRUNED", None)


BASELINE = Baseline("pp8", {"tp_size": 1, "pp_size": 8})
WITHOUT_PIPELINE = Baseline("tp8", {"tp_size": 8, "pp_size": 1})


def test_baseline_is_told_what_its_servers_resolved(tmp_path: Path) -> None:
    search, proposal = begin(tmp_path, baselines=(BASELINE,))
    resolved = {**result_of(proposal).resolved, CAP: 64, "max_running_requests": 512}
    search.tell(result_of(proposal, resolved=resolved))
    assert stored(tmp_path).params == {
        "tp_size": 1,
        "pp_size": 8,
        DEPTH: 0,
        CAP: 64,
        "cuda_graph": True,
        "attention_backend": "triton",
    }


def test_value_resolved_outside_the_space_is_left_out(tmp_path: Path) -> None:
    search, proposal = begin(tmp_path, baselines=(BASELINE,))
    resolved = {**result_of(proposal).resolved, CAP: 65, "attention_backend": "fa3"}
    search.tell(result_of(proposal, resolved=resolved))
    assert stored(tmp_path).params == {"tp_size": 1, "pp_size": 8, DEPTH: 0, "cuda_graph": True}


def test_resolved_value_of_an_inactive_parameter_is_left_out(tmp_path: Path) -> None:
    search, proposal = begin(tmp_path, baselines=(WITHOUT_PIPELINE,))
    search.tell(result_of(proposal, resolved={**result_of(proposal).resolved, CAP: 4, DEPTH: 0}))
    params = stored(tmp_path).params
    assert not {CAP, DEPTH} & params.keys()


def test_what_the_user_wrote_wins_over_what_was_resolved(tmp_path: Path) -> None:
    search, proposal = begin(tmp_path, baselines=(BASELINE,))
    search.tell(result_of(proposal, resolved={**result_of(proposal).resolved, "tp_size": 2}))
    assert stored(tmp_path).params["tp_size"] == 1


def test_baseline_that_failed_is_told_what_is_known(tmp_path: Path) -> None:
    search, proposal = begin(tmp_path, baselines=(BASELINE,))
    search.tell(bad(proposal, Outcome.FAILED))
    assert stored(tmp_path).params == {"tp_size": 1, "pp_size": 8}


def test_telling_the_same_outcome_again_changes_nothing(search: Search, tmp_path: Path) -> None:
    result = result_of(ask(search))
    search.tell(result)
    before = stored(tmp_path)
    search.tell(replace(result, values=(1.0,), reason="again"))
    assert stored(tmp_path) == before


def test_telling_another_outcome_is_refused(search: Search) -> None:
    result = result_of(ask(search))
    search.tell(result)
    with pytest.raises(StudyError, match="trial 0 ended complete in the search storage, but lost"):
        search.tell(replace(result, outcome=Outcome.LOST))


def test_telling_a_trial_that_was_never_begun_is_refused(search: Search) -> None:
    result = result_of(ask(search))
    with pytest.raises(StudyError, match="trial 7 was never begun"):
        search.tell(replace(result, number=7))


def test_tell_that_was_killed_half_way_can_be_told_again(tmp_path: Path) -> None:
    """Everything but the state is there: what a kill before the last write leaves."""
    settings = search_settings(baselines=(BASELINE,), slo=LIMITS)
    first = open_search(settings, tmp_path)
    result = result_of(ask(first), constraints=(0.25, -0.03))
    first.close()
    study = optuna.load_study(study_name="demo", storage=f"sqlite:///{tmp_path / 'optuna.db'}")
    half = optuna.Trial(study, study.trials[0]._trial_id)  # noqa: SLF001 - no other way to it
    half.suggest_categorical("tp_size", [1, 2, 4, 8])
    half.set_constraint("ttft_s.p99", 0.25)
    half.set_user_attr("outcome", "complete")
    second = open_search(settings, tmp_path)
    assert [p.number for p in second.running()] == [0]
    second.tell(result)
    assert stored(tmp_path).state.name == "COMPLETE"
    assert stored(tmp_path).constraints == {"ttft_s.p99": 0.25, "tpot_s.p99": -0.03}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_never_reaches_optuna(tmp_path: Path, value: float) -> None:
    search, proposal = begin(tmp_path, slo=LIMITS)
    with pytest.raises(ValueError, match="is no measurement"):
        search.report(proposal.number, 0, value)
    with pytest.raises(ValueError, match="is no measurement"):
        search.should_stop(proposal.number, 0, value)
    with pytest.raises(ValueError, match="is no measurement"):
        search.tell(result_of(proposal, values=(value,), constraints=(0.0, 0.0)))
    with pytest.raises(ValueError, match="is no measurement"):
        search.tell(result_of(proposal, constraints=(0.0, value)))
    pruned = result_of(proposal, outcome=Outcome.PRUNED, values=(value,))
    with pytest.raises(ValueError, match="is no measurement"):
        search.tell(pruned)
    trial = stored(tmp_path)
    assert (trial.state.name, trial.params, trial.intermediate_values, trial.constraints) == (
        "RUNNING",
        proposal.params,
        {},
        {},
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": (1.0, 2.0)}, "has 2 values, the study 1 objectives"),
        ({"values": ()}, "has 0 values, the study 1 objectives"),
        ({"constraints": ()}, "has 0 constraint values, the study 2 limits"),
    ],
)
def test_wrong_number_of_values_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    search, proposal = begin(tmp_path, slo=LIMITS)
    complete = {"constraints": (0.0, 0.0), **changes}
    with pytest.raises(ValueError, match=message):
        search.tell(result_of(proposal, **complete))


def test_rung_budget_stops_a_trial_far_behind(tmp_path: Path) -> None:
    search = open_search(search_settings(baselines=()), tmp_path)
    for _ in range(4):
        search.tell(result_of(ask(search), values=(1000.0,)))
    proposal = ask(search)
    assert search.should_stop(proposal.number, 0, 850.0) is None
    reason = search.should_stop(proposal.number, 0, 500.0)
    assert reason is not None
    assert "500 at concurrency 32" in reason


def limited(settings: StudySettings) -> StudySettings:
    return replace(settings, search=replace(settings.search, launches=10))


def test_budget_is_left_until_it_is_used(tmp_path: Path) -> None:
    search = open_search(limited(search_settings()), tmp_path)
    assert search.budget_left(1e6, 9, 1e9)
    assert not search.budget_left(0.0, 10, 0.0)
    assert search.spent_budget(0.0, 10, 0.0) == "search.launches: 10 of 10 are used"
