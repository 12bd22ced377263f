"""The order of what a search asks for, on a real SQLite storage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from runner.errors import StudyError
from runner.expression import Expression
from runner.forecast.refusals import known_refusal
from runner.launch import plan_launch, spec_hash
from runner.search.proposals import MOST_TRIES, Proposal
from runner.search.stuck import MOST_UNMEASURED
from runner.search.study import Search
from runner.settings import Baseline, Choices, IntRange, MeasureSettings, StudySettings
from runner.space import enumerate_space
from runner.trial import Lengths, Outcome, Stage, TrialLengths, TrialResult
from tests.search_samples import (
    BASELINES,
    CAP,
    DEPTH,
    bad,
    chosen,
    finish,
    on_real_servers,
    open_search,
    result_of,
    search_settings,
    throughput,
)

SMALL = (Choices("tp_size", (1, 2, 4, 8)), Choices("cuda_graph", (True, False)))
NO_REPEATS = MeasureSettings(0.01, 10.0, 120.0, 0, 0)


@pytest.fixture
def search(tmp_path: Path) -> Iterator[Search]:
    """A search of eight trials, two of them baselines, that repeats nothing."""
    opened = open_search(search_settings(trials=8, measure=NO_REPEATS), tmp_path)
    yield opened
    opened.close()


def ask(search: Search) -> Proposal:
    proposal = search.ask()
    assert proposal is not None
    return proposal


def stored(folder: Path, name: str = "demo") -> optuna.Study:
    return optuna.load_study(study_name=name, storage=f"sqlite:///{folder / 'optuna.db'}")


def test_baselines_come_first_as_the_user_wrote_them(search: Search) -> None:
    asked = finish(search)
    assert [(p.number, p.name, p.params) for p in asked[:2]] == [
        (n, baseline.name, baseline.params) for n, baseline in enumerate(BASELINES)
    ]
    assert [p.name for p in asked[2:]] == [None] * 6


def test_search_ends_when_enough_trials_count(search: Search) -> None:
    assert len(finish(search)) == 8
    counts = search.counts()
    assert (counts.complete, counts.wanted, counts.running) == (8, 8, 0)
    assert search.ask() is None


def test_trials_that_do_not_count_are_made_up_for(search: Search) -> None:
    ends = {3: Outcome.INFEASIBLE, 4: Outcome.PRUNED, 5: Outcome.INFEASIBLE}

    def measure(proposal: Proposal) -> object:
        outcome = ends.get(proposal.number)
        return result_of(proposal) if outcome is None else bad(proposal, outcome)

    asked = finish(search, measure)  # type: ignore[arg-type]
    counts = search.counts()
    assert len(asked) == 10
    assert (counts.complete, counts.pruned, counts.infeasible) == (7, 1, 2)


def test_few_trials_leave_baselines_out(tmp_path: Path) -> None:
    search = open_search(search_settings(trials=1, measure=NO_REPEATS), tmp_path)
    assert [p.name for p in finish(search)] == ["tp8"]


def test_every_proposal_keeps_the_constraints_and_is_new(search: Search) -> None:
    proposals = chosen(finish(search))
    assert len({p.spec_hash for p in proposals}) == len(proposals)
    for proposal in proposals:
        params = proposal.params
        assert int(params["tp_size"]) * int(params["pp_size"]) == 8
        assert (DEPTH in params) == (CAP in params) == (int(params["pp_size"]) > 1)


def test_failed_setting_is_asked_for_once_more_as_a_new_trial(search: Search) -> None:
    first = ask(search)
    search.tell(bad(first, Outcome.FAILED))
    second = ask(search)
    assert second == replace(first, number=1, retry_of=0)
    search.tell(bad(second, Outcome.FAILED))
    assert ask(search).name == "pp8-auto"


def test_invalid_setting_is_asked_for_twice_more_and_then_settled_as_failed(
    search: Search,
) -> None:
    outcomes = []
    for _ in range(3):
        result = search.settle(bad(ask(search), Outcome.INVALID))
        outcomes.append(result.outcome)
        search.tell(result)
    assert outcomes == [Outcome.INVALID, Outcome.INVALID, Outcome.FAILED]
    assert ask(search).name == "pp8-auto"


def test_lost_setting_is_asked_for_until_it_is_measured(search: Search) -> None:
    asked = []
    for _ in range(6):
        asked.append(ask(search))
        search.tell(bad(asked[-1], Outcome.LOST))
    assert {p.params["tp_size"] for p in asked} == {8}
    assert [p.retry_of for p in asked] == [None, 0, 1, 2, 3, 4]
    assert search.losses_in_a_row() == 6


def test_complete_trial_ends_a_row_of_losses(search: Search) -> None:
    search.tell(bad(ask(search), Outcome.LOST))
    search.tell(bad(ask(search), Outcome.LOST))
    search.tell(result_of(ask(search)))
    assert search.losses_in_a_row() == 0


def test_several_can_be_asked_for_at_once_and_all_differ(search: Search) -> None:
    asked = [ask(search) for _ in range(8)]
    assert search.ask() is None
    assert len({p.spec_hash for p in asked}) == 8
    assert search.running() == tuple(asked)
    search.tell(bad(asked[4], Outcome.INFEASIBLE))
    assert ask(search).spec_hash not in {p.spec_hash for p in asked}


def test_nothing_is_measured_again_while_the_search_runs(tmp_path: Path) -> None:
    search = open_search(search_settings(trials=3), tmp_path)
    asked = [ask(search) for _ in range(3)]
    for proposal in asked[:2]:
        search.tell(result_of(proposal))
    assert search.ask() is None
    search.tell(result_of(asked[2]))
    assert ask(search).repeat_of is not None


def test_finalists_and_baselines_are_measured_again_on_fresh_launches(tmp_path: Path) -> None:
    search = open_search(search_settings(trials=8), tmp_path)
    asked = finish(search)
    firsts = {p.number: p for p in asked[:8]}
    again = asked[8:]
    assert {0, 1} <= {p.repeat_of for p in again}
    assert len(again) == len({p.repeat_of for p in again}) >= 3
    for repeat in again:
        first = firsts[repeat.repeat_of or 0]
        assert (repeat.params, repeat.name) == (first.params, first.name)
        assert repeat.fresh_launch
        assert not first.fresh_launch
    assert (search.counts().complete, search.counts().remeasured) == (8, len(again))


def test_failed_repeat_is_tried_once_more_as_a_repeat(tmp_path: Path) -> None:
    search = open_search(search_settings(trials=2), tmp_path)
    for _ in range(2):
        search.tell(result_of(ask(search)))
    repeat = ask(search)
    search.tell(bad(repeat, Outcome.FAILED))
    retry = ask(search)
    assert retry == replace(repeat, number=3, retry_of=repeat.number)
    assert retry.fresh_launch


def test_raised_budget_goes_on_with_the_search(tmp_path: Path) -> None:
    settings = search_settings(trials=4)
    first = open_search(settings, tmp_path)
    finish(first)
    first.close()
    raised = open_search(replace(settings, search=replace(settings.search, trials=6)), tmp_path)
    asked = finish(raised)
    assert len(chosen(asked)) == 2
    assert raised.counts().complete == 6
    done = [p.repeat_of for p in (*asked,) if p.repeat_of is not None]
    assert len(done) == len(set(done))


def small(trials: int = 100) -> StudySettings:
    settings = search_settings(
        trials=trials,
        parameters=SMALL,
        constraints=(Expression("tp_size < 8"),),
        baselines=(Baseline("tp1", {"tp_size": 1}),),
    )
    return on_real_servers(settings)


def test_exhausted_space_ends_the_search(tmp_path: Path) -> None:
    """Six settings, one of which the baseline turns out to be."""
    search = open_search(small(), tmp_path)
    asked = finish(search)
    points = enumerate_space(search_settings(parameters=SMALL, constraints=()), 100)
    assert points is not None
    assert len(points) == 8
    assert len(chosen(asked)) == 5
    assert len([p for p in asked if p.repeat_of is not None]) >= 3


def test_infeasible_settings_are_never_asked_for_again(tmp_path: Path) -> None:
    search = open_search(small(), tmp_path)
    asked = finish(search, lambda proposal: bad(proposal, Outcome.INFEASIBLE))
    assert len(asked) == 7
    assert len({p.spec_hash for p in asked}) == 7


def test_setting_that_failed_twice_is_never_asked_for_again(tmp_path: Path) -> None:
    search = open_search(small(), tmp_path)
    asked = finish(search, lambda proposal: bad(proposal, Outcome.FAILED))
    assert len(asked) == 14
    assert [p.retry_of for p in asked] == [None if n % 2 == 0 else n - 1 for n in range(14)]


def test_setting_that_the_profile_refuses_is_never_asked_for(tmp_path: Path) -> None:
    """Of 80 settings few can run; each that can is asked for once, and no other."""
    settings = search_settings(
        trials=100,
        parameters=(
            *(Choices(name, (1, 2, 4, 8)) for name in ("tp_size", "pp_size")),
            Choices("ep_size", (1, 8)),
            Choices("mem_fraction_static", (0.5, 0.88)),
        ),
        constraints=(),
        baselines=(),
        measure=NO_REPEATS,
    )
    known = known_refusal(settings)
    points = enumerate_space(settings, 100) or []
    can_run = {spec_hash(params) for params in points if known(params) is None}
    asked = finish(open_search(settings, tmp_path))
    assert [len(points), len(asked)] == [40, 5]
    assert {p.spec_hash for p in asked} == can_run


def test_real_servers_are_asked_for_what_no_rule_refuses(tmp_path: Path) -> None:
    settings = search_settings(
        trials=100,
        parameters=(Choices("tp_size", (1, 2, 8)), Choices("ep_size", (1, 2, 8))),
        constraints=(),
        baselines=(),
        measure=NO_REPEATS,
    )
    asked = finish(open_search(on_real_servers(settings), tmp_path))
    pairs = sorted((p.params["tp_size"], p.params["ep_size"]) for p in asked)
    assert pairs == [(1, 1), (2, 1), (2, 2), (8, 1), (8, 2), (8, 8)]


def test_baseline_is_tried_whatever_is_known_of_it(tmp_path: Path) -> None:
    settings = search_settings(baselines=(Baseline("tp1", {"tp_size": 1, "pp_size": 1}),))
    assert ask(open_search(settings, tmp_path)).name == "tp1"


def never_runs(**changes: Any) -> StudySettings:  # noqa: ANN401 - any field of StudySettings
    return on_real_servers(search_settings(trials=4, baselines=(), measure=NO_REPEATS, **changes))


@pytest.mark.parametrize("outcome", [Outcome.INFEASIBLE, Outcome.FAILED, Outcome.INVALID])
def test_search_that_measures_nothing_ends_by_itself(tmp_path: Path, outcome: Outcome) -> None:
    search = open_search(never_runs(), tmp_path)
    asked = finish(search, lambda proposal: bad(proposal, outcome))
    assert MOST_UNMEASURED <= len(asked) <= MOST_UNMEASURED + MOST_TRIES
    assert f"{len(asked)} trials in a row" in (search.why_stuck() or "")


def test_next_session_tries_as_many_again(tmp_path: Path) -> None:
    first = open_search(never_runs(), tmp_path)
    finish(first, lambda proposal: bad(proposal, Outcome.INFEASIBLE))
    first.close()
    second = open_search(never_runs(), tmp_path)
    assert second.why_stuck() is None
    asked = finish(second, lambda proposal: bad(proposal, Outcome.INFEASIBLE))
    assert [p.number for p in asked] == list(range(MOST_UNMEASURED, 2 * MOST_UNMEASURED))


def test_measurement_in_between_begins_the_row_anew(tmp_path: Path) -> None:
    """The second trial of the session is measured; its finalist is still confirmed at the end."""
    repeating = MeasureSettings(0.01, 10.0, 120.0, 1, 1)
    search = open_search(replace(never_runs(), measure=repeating), tmp_path)

    def measure(proposal: Proposal) -> TrialResult:
        is_good = proposal.number == 1 or proposal.repeat_of is not None
        return result_of(proposal) if is_good else bad(proposal, Outcome.INFEASIBLE)

    asked = finish(search, measure)
    assert len(asked) == 2 + MOST_UNMEASURED + 1
    assert asked[-1].repeat_of == 1
    assert search.why_stuck() is not None


def test_dead_drivers_trials_are_found_as_they_were_asked_for(tmp_path: Path) -> None:
    settings = search_settings(trials=4, measure=NO_REPEATS)
    first = open_search(settings, tmp_path)
    asked = [ask(first) for _ in range(3)]
    first.tell(result_of(asked[1]))
    first.close()
    second = open_search(settings, tmp_path)
    assert second.running() == (asked[0], asked[2])
    assert second.counts().running == 2


def test_losses_of_a_dead_driver_do_not_stop_the_next(tmp_path: Path) -> None:
    settings = search_settings()
    first = open_search(settings, tmp_path)
    for _ in range(5):
        first.tell(bad(ask(first), Outcome.LOST))
    first.close()
    second = open_search(settings, tmp_path)
    assert second.losses_in_a_row() == 0
    assert ask(second).retry_of == 4


def test_parameters_of_a_proposal_are_stored_with_the_trial(tmp_path: Path) -> None:
    search = open_search(search_settings(baselines=()), tmp_path)
    proposal = ask(search)
    (trial,) = stored(tmp_path).trials
    assert trial.state is optuna.trial.TrialState.RUNNING
    assert trial.params == proposal.params
    assert trial.user_attrs["spec_hash"] == proposal.spec_hash


def test_baseline_has_no_parameters_until_its_servers_resolved_them(tmp_path: Path) -> None:
    search = open_search(search_settings(), tmp_path)
    ask(search)
    (trial,) = stored(tmp_path).trials
    assert trial.params == {}
    assert trial.user_attrs["params"] == BASELINES[0].params


def test_waiting_trial_of_another_hand_is_left_alone(tmp_path: Path) -> None:
    open_search(search_settings(), tmp_path).close()
    stored(tmp_path).enqueue_trial({"tp_size": 8})
    search = open_search(search_settings(), tmp_path)
    assert search.running() == ()
    assert ask(search).number == 1


def test_trials_of_another_program_are_refused(tmp_path: Path) -> None:
    open_search(search_settings(), tmp_path).close()
    stored(tmp_path).ask()
    with pytest.raises(StudyError, match="written by another program"):
        open_search(search_settings(), tmp_path)


def test_study_of_other_directions_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'optuna.db'}"
    optuna.create_study(study_name="demo", storage=url, directions=["minimize", "maximize"])
    with pytest.raises(StudyError, match="to minimize and maximize, not maximize; give"):
        open_search(search_settings(), tmp_path)


def no_start(proposal: Proposal) -> TrialResult:
    """Servers with two stages or more cannot start."""
    if proposal.params.get("pp_size", 1) == 1:
        return result_of(proposal)
    return replace(bad(proposal, Outcome.INFEASIBLE), stage=Stage.START)


def test_launch_that_was_refused_is_refused_for_every_cap(tmp_path: Path) -> None:
    """Settings that differ only in what is set live share their launch, and its refusal."""
    parameters = (Choices("pp_size", (1, 8)), IntRange(DEPTH, 0, 8), IntRange(CAP, 1, 64))
    settings = search_settings(
        trials=30, parameters=parameters, constraints=(), baselines=(), measure=NO_REPEATS
    )
    asked = chosen(finish(open_search(settings, tmp_path), no_start))
    refused = [plan_launch(settings, p.params).key for p in asked if p.params["pp_size"] != 1]
    assert len(refused) > 3
    assert len(refused) == len(set(refused))


def test_live_value_that_was_refused_says_nothing_of_its_launch(tmp_path: Path) -> None:
    parameters = (Choices("pp_size", (8,)), IntRange(CAP, 1, 64))
    settings = search_settings(
        trials=9, parameters=parameters, constraints=(), baselines=(), measure=NO_REPEATS
    )
    search = open_search(settings, tmp_path)
    for _ in range(4):
        search.tell(replace(bad(ask(search), Outcome.INFEASIBLE), stage=Stage.LIVE))
    assert search.ask() is not None


def test_only_launch_that_was_refused_ends_the_search(tmp_path: Path) -> None:
    parameters = (Choices("pp_size", (8,)), IntRange(CAP, 1, 64))
    settings = search_settings(
        trials=9, parameters=parameters, constraints=(), baselines=(), measure=NO_REPEATS
    )
    search = open_search(settings, tmp_path)
    search.tell(no_start(ask(search)))
    assert search.ask() is None


def with_two_laws(settings: StudySettings) -> StudySettings:
    """The study with shorter replies in its search than in its workload."""
    return replace(settings, search=replace(settings.search, output_tokens=Lengths.fixed(16)))


def test_only_re_measurements_and_their_retries_have_the_lengths_of_the_workload(
    tmp_path: Path,
) -> None:
    search = open_search(with_two_laws(search_settings(trials=4)), tmp_path)

    def measure(proposal: Proposal) -> TrialResult:
        is_bad = proposal.number in (1, 6)
        return bad(proposal, Outcome.FAILED) if is_bad else result_of(proposal)

    asked = finish(search, measure)
    own = {p.number for p in asked if p.lengths is TrialLengths.WORKLOAD}
    assert own == {p.number for p in asked if p.repeat_of is not None}
    assert {p.number for p in asked if p.retry_of is not None} == {2, 7}
    assert asked[2].lengths is TrialLengths.SEARCH
    assert asked[7].lengths is TrialLengths.WORKLOAD
    search.close()
    attrs = [trial.user_attrs["lengths"] for trial in stored(tmp_path).trials]
    assert attrs == [str(p.lengths) for p in asked]


def test_a_dead_drivers_re_measurement_keeps_its_lengths(tmp_path: Path) -> None:
    settings = with_two_laws(search_settings(trials=2))
    first = open_search(settings, tmp_path)
    for _ in range(2):
        first.tell(result_of(ask(first)))
    repeat = ask(first)
    first.close()
    assert repeat.lengths is TrialLengths.WORKLOAD
    assert open_search(settings, tmp_path).running() == (repeat,)


def test_values_at_other_lengths_teach_the_sampler_nothing_and_stop_no_trial(
    tmp_path: Path,
) -> None:
    """A study that goes on after its finalists were measured, whatever these gave."""
    settings = with_two_laws(search_settings(trials=5))
    longer = replace(settings, search=replace(settings.search, trials=7))

    def proposed(factor: float) -> list[Proposal]:
        def measure(proposal: Proposal) -> TrialResult:
            is_own = proposal.lengths is TrialLengths.WORKLOAD
            value = throughput(proposal.params) * (factor if is_own else 1.0)
            return result_of(proposal, values=(value,))

        folder = tmp_path / f"{factor}"
        folder.mkdir()
        first = open_search(settings, folder)
        before = finish(first, measure)
        first.close()
        again = open_search(longer, folder)
        new = ask(again)
        best = max(throughput(p.params) for p in before if p.repeat_of is None)
        assert again.should_stop(new.number, 0, 0.9 * best) is None
        assert again.should_stop(new.number, 0, 0.7 * best) is not None
        again.tell(measure(new))
        return [*before, new, *finish(again, measure)]

    assert proposed(0.01) == proposed(100.0)
