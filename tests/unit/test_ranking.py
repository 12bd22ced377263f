from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.insight.ranking import Ranking, rank
from runner.settings import Direction, MeasureSettings, Objective
from runner.trial import Outcome, TrialResult
from tests.samples import claimed_rung, make_result, make_rung, make_settings

STUDY = make_settings()
PRECISE = make_settings(measure=MeasureSettings(0.001, 10.0, 120.0, 1, 3))


def numbers(ranking: Ranking) -> list[int]:
    return [setting.number for setting in ranking.settings]


def contenders(ranking: Ranking) -> list[int]:
    return [setting.number for setting in ranking.contenders]


def best_number(ranking: Ranking) -> int | None:
    return None if ranking.best is None else ranking.best.number


def test_without_results_nothing_is_best() -> None:
    ranking = rank([], STUDY)
    assert ranking.best is None
    assert ranking.settings == ranking.contenders == ranking.baselines == ()


def test_higher_is_first_when_maximised() -> None:
    ranking = rank([make_result(0, 100.0), make_result(1, 300.0), make_result(2, 200.0)], STUDY)
    assert numbers(ranking) == [1, 2, 0]
    assert contenders(ranking) == [1]


def test_lower_is_first_when_minimised() -> None:
    study = make_settings(objectives=(Objective("ttft_s.p99", 32, Direction.MINIMIZE),))
    ranking = rank([make_result(0, 3.0), make_result(1, 1.0), make_result(2, 2.0)], study)
    assert numbers(ranking) == [1, 2, 0]
    assert ranking.advantage(over=ranking.settings[2], of=ranking.settings[0]) == 3.0


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.COMPLETE])
def test_only_complete_trials_are_ranked(outcome: Outcome) -> None:
    unfinished = make_result(0, 900.0, outcome=outcome)
    assert numbers(rank([unfinished, make_result(1, 100.0)], STUDY)) == [1]


def test_repeats_belong_to_their_setting_and_are_averaged() -> None:
    results = [make_result(0, 100.0), make_result(1, 99.0), make_result(2, 90.0, repeat_of=0)]
    ranking = rank(results, STUDY)
    setting = next(s for s in ranking.settings if s.number == 0)
    assert [m.number for m in setting.measurements] == [0, 2]
    assert setting.values == (95.0,)
    assert [r.output_throughput for r in setting.rungs_at(32)] == [100.0, 90.0]


def test_a_failed_repeat_leaves_its_setting_as_it_was() -> None:
    ranking = rank([make_result(0, 100.0), make_result(1, None, repeat_of=0)], STUDY)
    assert ranking.settings[0].values == (100.0,)


def test_an_unconfirmed_setting_never_leads() -> None:
    results = [
        make_result(0, 110.0),
        make_result(1, 106.0),  # higher than the mean of 0, but measured once
        make_result(2, 100.0, repeat_of=0),
        make_result(3, 90.0),
    ]
    ranking = rank(results, STUDY)
    assert numbers(ranking) == [0, 1, 3]
    assert 1 in contenders(ranking)


def test_a_remeasured_baseline_does_not_lead_over_better_settings() -> None:
    results = [
        make_result(0, 50.0, name="pp8-auto"),
        make_result(1, 100.0),
        make_result(2, 50.0, repeat_of=0, name="pp8-auto"),
    ]
    assert numbers(rank(results, STUDY)) == [1, 0]


def test_a_baseline_can_win() -> None:
    ranking = rank([make_result(0, 200.0, name="tp8"), make_result(1, 100.0)], STUDY)
    assert best_number(ranking) == 0
    assert [s.name for s in ranking.baselines] == ["tp8"]


def test_settings_that_miss_a_limit_come_last_by_how_much() -> None:
    results = [
        make_result(0, 300.0, constraints=(0.5,)),
        make_result(1, 100.0, constraints=(-0.1,)),
        make_result(2, 200.0, constraints=(0.2,)),
    ]
    ranking = rank(results, STUDY)
    assert numbers(ranking) == [1, 2, 0]
    assert contenders(ranking) == [1]


def test_a_confirmed_setting_that_misses_a_limit_does_not_lead() -> None:
    results = [
        make_result(0, 300.0, constraints=(0.5,)),
        make_result(1, 100.0, constraints=(-0.1,)),
        make_result(2, 300.0, repeat_of=0, constraints=(0.5,)),
    ]
    assert best_number(rank(results, STUDY)) == 1


def test_when_all_miss_the_limits_the_nearest_leads() -> None:
    results = [
        make_result(0, 300.0, constraints=(0.5, -1.0)),
        make_result(1, 200.0, constraints=(0.1, 0.2)),
    ]
    assert best_number(rank(results, STUDY)) == 1


def test_noise_is_what_windows_report_while_nothing_was_repeated() -> None:
    wide = make_rung(32, 100.0, output_throughput_halfwidth=4.0)
    ranking = rank([make_result(0, 100.0, rungs=(wide,)), make_result(1, 95.0, rungs=())], STUDY)
    assert ranking.noise == pytest.approx(0.04)
    assert contenders(ranking) == [0, 1]  # 5 % apart, 4 % * sqrt(2) of noise


def test_noise_is_the_spread_between_repeats_once_there_are_any() -> None:
    results = [
        make_result(0, 101.0),
        make_result(1, 99.0, repeat_of=0),
        make_result(2, 80.0),
    ]
    ranking = rank(results, STUDY)
    assert ranking.noise == pytest.approx(12.706 * 0.01 * 2**0.5)
    assert contenders(ranking) == [0, 2]  # one pair of measurements says little about noise


def test_a_setting_is_worth_what_its_claims_say() -> None:
    claimed = make_result(2, 90.0, repeat_of=0, rungs=(claimed_rung(90.0, 2.0),))
    ranking = rank([make_result(0, 100.0), make_result(1, 80.0), claimed], STUDY)
    assert ranking.settings[0].values == (90.0,)
    assert [r.output_throughput for r in ranking.settings[0].rungs_at(32)] == [90.0]
    assert ranking.halfwidth(ranking.settings[0]) == 2.0
    assert ranking.halfwidth(ranking.settings[1]) is None


def test_several_claims_are_averaged_and_their_error_shrinks() -> None:
    claims = [
        make_result(number, value, repeat_of=0, rungs=(claimed_rung(value, 2.0),))
        for number, value in ((1, 90.0), (2, 94.0))
    ]
    ranking = rank([make_result(0, 100.0), *claims], STUDY)
    assert ranking.settings[0].values == (92.0,)
    assert ranking.halfwidth(ranking.settings[0]) == pytest.approx(2.0 / 2**0.5)


@pytest.mark.parametrize(("other", "is_contender"), [(97.0, True), (96.0, False)])
def test_claimed_settings_are_told_apart_by_what_they_claim(
    other: float, *, is_contender: bool
) -> None:
    # 2 % each: apart from 2.83 on, whatever single measurements scatter.
    results = [
        make_result(0, 120.0),
        make_result(1, 60.0),
        make_result(2, 99.0, repeat_of=0, rungs=(claimed_rung(99.0, 2.0),)),
        make_result(3, other, repeat_of=1, rungs=(claimed_rung(other, 2.0),)),
    ]
    ranking = rank(results, STUDY)
    assert ranking.noise > 0.5
    assert (1 in contenders(ranking)) is is_contender


def test_more_repeats_make_noise_smaller() -> None:
    results = [make_result(n, v, repeat_of=None if n == 0 else 0) for n, v in _six_around_100()]
    ranking = rank([*results, make_result(10, 90.0)], STUDY)
    assert ranking.noise < 0.04
    assert contenders(ranking) == [0]


def _six_around_100() -> list[tuple[int, float]]:
    return list(enumerate((101.0, 99.0, 101.0, 99.0, 101.0, 99.0)))


def test_noise_is_never_below_the_wanted_precision() -> None:
    results = [make_result(0, 100.0), make_result(1, 100.0, repeat_of=0)]
    assert rank(results, STUDY).noise == STUDY.measure.precision


def test_with_two_objectives_contenders_are_those_nobody_beats() -> None:
    objectives = (
        Objective("output_throughput", 32, Direction.MAXIMIZE),
        Objective("ttft_s.p99", 1, Direction.MINIMIZE),
    )
    results = [
        make_result(0, 1.0, values=(100.0, 2.0)),
        make_result(1, 1.0, values=(80.0, 1.0)),
        make_result(2, 1.0, values=(70.0, 1.5)),
    ]
    ranking = rank(results, make_settings(objectives=objectives))
    assert numbers(ranking) == [0, 1, 2]
    assert contenders(ranking) == [0, 1]


def test_advantage_over_a_baseline_of_zero_is_unknown() -> None:
    ranking = rank([make_result(0, 0.0, name="tp8"), make_result(1, 10.0)], STUDY)
    assert ranking.advantage(over=ranking.baselines[0], of=ranking.settings[0]) is None


@st.composite
def studies(draw: st.DrawFn) -> list[TrialResult]:
    count = draw(st.integers(1, 8))
    value = st.floats(0.0, 1e4)
    results = [make_result(n, draw(value), constraints=(draw(value) - 5e3,)) for n in range(count)]
    for number in range(count, count + draw(st.integers(0, 6))):
        repeat_of = draw(st.integers(0, count - 1))
        results.append(make_result(number, draw(value), repeat_of=repeat_of, constraints=(0.0,)))
    return draw(st.permutations(results))


@given(studies())
def test_any_study_has_one_order_and_its_best_is_a_contender(results: list[TrialResult]) -> None:
    ranking = rank(results, PRECISE)
    assert sorted(numbers(ranking)) == sorted(r.number for r in results if r.repeat_of is None)
    assert contenders(ranking)[0] == best_number(ranking)
    assert rank(sorted(results, key=lambda r: r.number), PRECISE) == ranking
    leader_violates = ranking.settings[0].violation > 0.0
    assert not leader_violates or all(s.violation > 0.0 for s in ranking.settings)


def test_a_rate_that_is_no_whole_number_finds_its_rung() -> None:
    study = make_settings(objectives=(Objective("output_throughput", 2.5, Direction.MAXIMIZE),))
    rung = make_rung(2, 180.0, output_throughput_halfwidth=5.0)
    results = [make_result(0, 175.0), make_result(1, 180.0, repeat_of=0, rungs=(rung,))]
    ranking = rank(results, study)
    assert ranking.halfwidth(ranking.settings[0]) == 5.0


def test_a_shared_measurement_stands_behind_its_source_and_confirms_nothing() -> None:
    results = [
        make_result(0, 100.0),
        make_result(1, 100.0, shares=0, name="same"),
        make_result(2, 99.9),
        make_result(3, 98.0, repeat_of=0),
    ]
    ranking = rank(results, STUDY)
    assert numbers(ranking) == [0, 1, 2]
    assert [setting.number for setting in ranking.measured] == [0, 2]
    assert contenders(ranking) == [0, 2]
    shown = ranking.find(1)
    assert shown is not None
    assert shown.values == ranking.settings[0].values == (99.0,)
    assert [setting.number for setting in ranking.baselines] == [1]
    assert ranking.noise == rank([results[0], *results[2:]], STUDY).noise
