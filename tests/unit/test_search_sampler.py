"""What the sampler is shown and what it makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import optuna
import pytest

from runner.errors import ConfigError
from runner.expression import Expression
from runner.launch import MOST_IN_A_ROW, as_int, spec_hash
from runner.search.history import PastTrial
from runner.search.sampler import (
    MOST_DRAWS,
    MOST_DRAWS_ON_A_LAUNCH,
    SAMPLERS,
    StudyCopy,
    choose,
    contains,
    draw_seed,
    inside,
    is_point,
    known_settings,
    launch_that_is_up,
    make_sampler,
)
from runner.settings import Choices, FloatRange, IntRange, Parameter, StudySettings
from runner.space import satisfies
from runner.trial import Outcome, Params, ParamValue
from tests.search_samples import CAP, DEPTH, PARAMETERS, resolve, search_settings

TP8: Params = {"tp_size": 8, "pp_size": 1, "cuda_graph": True, "attention_backend": "triton"}


def sampled(number: int, params: Params, value: float = 1.0) -> PastTrial:
    return PastTrial(
        number,
        params,
        spec_hash(params),
        Outcome.COMPLETE,
        drawn=1,
        found=params,
        values=(value,),
    )


def pipeline(depth: int, cap: int, **more: ParamValue) -> Params:
    return {**TP8, "tp_size": 1, "pp_size": 8, DEPTH: depth, CAP: cap, **more}


def none_listed() -> None:
    return None


@pytest.mark.parametrize(
    ("parameter", "value", "is_inside"),
    [
        (Choices("x", (1, 2, 8)), 8, True),
        (Choices("x", (1, 2, 8)), 4, False),
        (Choices("x", (1, 2)), True, False),
        (Choices("x", (True, False)), 1, False),
        (Choices("x", (True, False)), False, True),
        (Choices("x", ("a", "b")), "b", True),
        (IntRange("x", 1, 64), 64, True),
        (IntRange("x", 1, 64), 65, False),
        (IntRange("x", 0, 8, step=4), 4, True),
        (IntRange("x", 0, 8, step=4), 2, False),
        (IntRange("x", 0, 8), True, False),
        (IntRange("x", 0, 8), 2.0, False),
        (IntRange("x", 0, 8), "2", False),
        (FloatRange("x", 0.1, 0.9), 0.9, True),
        (FloatRange("x", 0.0, 1.0), 1, True),
        (FloatRange("x", 0.1, 0.9), 0.95, False),
        (FloatRange("x", 0.1, 0.9), "0.5", False),
    ],
)
def test_value_is_inside_its_parameter(
    parameter: Parameter, value: ParamValue, is_inside: bool
) -> None:
    assert contains(parameter, value) is is_inside


def test_inside_keeps_active_values_that_lie_in_the_space() -> None:
    resolved: Params = {**pipeline(depth=0, cap=256), "max_running_requests": 2048}
    assert inside(PARAMETERS, resolved) == {k: v for k, v in pipeline(0, 1).items() if k != CAP}


def test_inside_leaves_conditional_values_out_where_they_mean_nothing() -> None:
    assert inside(PARAMETERS, {**TP8, DEPTH: 0, CAP: 4}) == TP8


def test_trial_with_a_gap_or_a_foreign_parameter_is_no_point_of_the_space() -> None:
    settings = search_settings()
    whole = sampled(0, pipeline(0, 4))
    gap = replace(whole, found={k: v for k, v in whole.found.items() if k != CAP})
    foreign = replace(whole, params={**whole.params, "chunked_prefill_size": 4096})
    assert is_point(settings, whole)
    assert not is_point(settings, gap)
    assert not is_point(settings, foreign)


def test_setting_that_a_baseline_turned_out_to_be_is_known() -> None:
    asked: Params = {"tp_size": 8, "pp_size": 1, DEPTH: 3}
    baseline = replace(sampled(0, TP8), name="tp8", params=asked, spec_hash=spec_hash(asked))
    assert spec_hash(TP8) in known_settings(search_settings(), [baseline])


def test_setting_is_known_without_its_inactive_parameters() -> None:
    asked: Params = {**TP8, DEPTH: 3}
    running = PastTrial(0, asked, spec_hash(asked), name="tp8")
    assert spec_hash(TP8) in known_settings(search_settings(), [running])


def test_seeds_of_draws_differ_by_study_ask_and_draw() -> None:
    seeds = [draw_seed(study, ask, drawn) for study in (0, 1) for ask in (0, 1) for drawn in (0, 1)]
    assert len(set(seeds)) == 8


def test_unknown_sampler_is_refused_with_the_valid_names() -> None:
    settings = search_settings(sampler="bayes")
    with pytest.raises(ConfigError, match=r"'bayes'; it can be one of: auto, tpe, random"):
        make_sampler(settings, 0, 0)


# Depth and cap belong together: high depth is good with a low cap and the other way round.
GOOD = [pipeline(0, 62), pipeline(8, 1), pipeline(0, 60), pipeline(8, 2), pipeline(0, 63)]
BAD = [
    *(pipeline(depth, cap) for depth in (0, 1) for cap in (1, 2, 3)),
    *(pipeline(depth, cap) for depth in (7, 8) for cap in (58, 60, 62)),
]
TOGETHER = [
    *(sampled(n, params, 1000.0) for n, params in enumerate([*GOOD, pipeline(8, 3)])),
    *(sampled(n, BAD[n % len(BAD)], 10.0) for n in range(6, 52)),
]
NO_PIPELINE = sampled(52, TP8, 5.0)
GAP = replace(
    sampled(53, pipeline(0, 4), 5.0),
    name="pp8-auto",
    found={k: v for k, v in pipeline(0, 4).items() if k != CAP},
)


def together(points: Sequence[Params]) -> float:
    """Of the points that chose both extremes, how many chose a pair that belongs together."""
    ends = [(as_int(p[DEPTH]) >= 4, as_int(p[CAP]) <= 8) for p in points if DEPTH in p]
    return sum(is_deep == is_low for is_deep, is_low in ends) / len(ends)


def draws(settings: StudySettings, history: Sequence[PastTrial]) -> list[Params]:
    copy = StudyCopy(settings, history)
    return [copy.draw(make_sampler(settings, copy.untried, seed)) for seed in range(60)]


@pytest.mark.parametrize(
    "history",
    [TOGETHER, [*TOGETHER, NO_PIPELINE], [*TOGETHER, NO_PIPELINE, GAP]],
    ids=["pipelines", "and one pp=1 trial", "and a baseline with a gap"],
)
def test_depth_and_cap_are_sampled_jointly_although_conditional(
    history: list[PastTrial],
) -> None:
    settings = search_settings(constraints=())
    assert together(draws(settings, history)) > 0.9


@pytest.mark.parametrize("multivariate", [False, True])
def test_other_ways_of_sampling_would_not_keep_them_together(multivariate: bool) -> None:
    """One by one, or jointly without groups, where a trial without a pipeline drops both."""
    copy = StudyCopy(search_settings(constraints=()), [*TOGETHER, NO_PIPELINE])
    samplers = (
        optuna.samplers.TPESampler(multivariate=multivariate, constant_liar=False, seed=seed)
        for seed in range(60)
    )
    assert together([copy.draw(sampler) for sampler in samplers]) < 0.5


def test_joint_space_has_depth_and_cap_also_with_a_trial_that_lacks_them() -> None:
    settings = search_settings()
    copy = StudyCopy(settings, [*TOGETHER, NO_PIPELINE])
    sampler = make_sampler(settings, 0, 0)
    joint = sampler.infer_relative_search_space(copy.study, copy.study.trials[0])
    assert {DEPTH, CAP} <= joint.keys()


def test_several_objectives_are_sampled_jointly_too() -> None:
    objective = search_settings().objectives[0]
    settings = search_settings(objectives=(objective, objective))
    history = [replace(trial, values=(1.0, 2.0)) for trial in [*TOGETHER, NO_PIPELINE]]
    copy = StudyCopy(settings, history)
    sampler = make_sampler(settings, 0, 0)
    joint = sampler.infer_relative_search_space(copy.study, copy.study.trials[0])
    assert {DEPTH, CAP} <= joint.keys()


def states(history: Sequence[PastTrial]) -> list[tuple[str, bool]]:
    """What the copy holds of a history: states, and whether the limits are kept."""
    study = StudyCopy(search_settings(), history).study
    return [
        (trial.state.name, all(excess <= 0 for excess in trial.constraints.values()))
        for trial in study.trials
        if trial.params
    ]


def test_copy_holds_what_tells_the_sampler_something() -> None:
    whole = sampled(0, pipeline(0, 4))
    assert states([whole]) == [("COMPLETE", True)]
    assert states([replace(whole, constraints={"ttft_s.p99": 0.2})]) == [("COMPLETE", False)]
    pruned = replace(whole, outcome=Outcome.PRUNED, reported={0: 1.0})
    assert states([pruned]) == [("PRUNED", True)]
    assert states([replace(whole, outcome=Outcome.INFEASIBLE, values=())]) == [("PRUNED", False)]


def test_copy_leaves_out_what_would_mislead_it() -> None:
    whole = sampled(0, pipeline(0, 4))
    assert states([replace(whole, repeat_of=7)]) == []
    assert states([GAP]) == []
    for outcome in (Outcome.FAILED, Outcome.INVALID, Outcome.LOST, None):
        assert states([replace(whole, outcome=outcome, values=())]) == []


def test_setting_that_failed_twice_is_infeasible_to_the_copy() -> None:
    first = replace(sampled(0, pipeline(0, 4)), outcome=Outcome.FAILED, values=())
    second = replace(first, number=1, retry_of=0)
    assert states([first, second]) == [("PRUNED", False)]


def test_trials_that_were_never_measured_are_no_start_up() -> None:
    """Ten infeasible trials and nothing else: TPE still draws at random."""
    settings = search_settings(constraints=())
    infeasible = [
        replace(sampled(n, pipeline(n % 9, n + 1)), outcome=Outcome.INFEASIBLE, values=())
        for n in range(10)
    ]
    copy = StudyCopy(settings, infeasible)
    chance = StudyCopy(settings, [])
    for seed in range(5):
        drawn = copy.draw(make_sampler(settings, copy.untried, seed))
        assert drawn == chance.draw(optuna.samplers.RandomSampler(seed=seed))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_constraint_that_few_points_keep_still_finds_a_choice(sampler: str) -> None:
    settings = search_settings(
        sampler=sampler,
        constraints=(Expression("pp_async_batch_depth * 64 + pp_max_micro_batch_size == 519"),),
    )
    points: list[Params] = [pipeline(8, 7)]
    choice = choose(settings, [], lambda: points)
    assert choice is not None
    assert satisfies(settings, choice.params)
    assert choice.drawn <= MOST_DRAWS


def test_nothing_left_of_a_listed_space_is_no_choice() -> None:
    settings = search_settings(constraints=(Expression("tp_size > 8"),))
    assert choose(settings, [], list) is None


def test_nothing_found_in_an_endless_space_is_no_choice() -> None:
    settings = search_settings(
        parameters=(FloatRange("mem_fraction_static", 0.5, 0.9),),
        constraints=(Expression("mem_fraction_static > 1"),),
    )
    assert choose(settings, [], none_listed) is None


def test_baseline_is_shown_by_what_its_servers_resolved() -> None:
    params: Params = {"tp_size": 8, "pp_size": 1}
    found = inside(PARAMETERS, resolve(params))
    baseline = replace(sampled(0, params), name="tp8", found=found)
    (trial,) = StudyCopy(search_settings(), [baseline]).study.trials[1:]
    assert trial.params == TP8


def test_second_setting_of_a_launch_differs_in_its_cap_alone() -> None:
    first = sampled(0, pipeline(3, 4))
    choice = choose(search_settings(), [first], none_listed)
    assert choice is not None
    assert {**choice.params, CAP: 4} == first.params
    assert choice.params != first.params


def test_cap_that_the_launch_has_no_room_for_is_not_its_second_setting() -> None:
    """32 running requests in 8 stages: caps above 4 need another launch, and few are below."""
    settings = search_settings()
    args = {**settings.engine.args, "max_running_requests": 32}
    settings = replace(settings, engine=replace(settings.engine, args=args))
    for seed in range(5):
        seeded = replace(settings, search=replace(settings.search, seed=seed))
        choice = choose(seeded, [sampled(0, pipeline(3, 4))], none_listed)
        assert choice is not None
        assert as_int(choice.params[CAP]) < 4
        assert choice.params[DEPTH] == 3


def test_launch_whose_caps_are_all_measured_gives_way_to_another() -> None:
    caps = Choices(CAP, (2, 4), when=Expression("pp_size > 1"))
    settings = search_settings(parameters=(*(p for p in PARAMETERS if p.name != CAP), caps))
    other = sampled(0, pipeline(3, 2))
    history = [other, sampled(1, pipeline(1, 2)), sampled(2, pipeline(3, 4))]
    choice = choose(settings, history, none_listed)
    assert choice is not None
    assert choice.drawn > MOST_DRAWS_ON_A_LAUNCH
    assert satisfies(settings, choice.params)


def test_cap_without_a_choice_is_no_reason_to_stay() -> None:
    one = Choices(CAP, (4,), when=Expression("pp_size > 1"))
    settings = search_settings(parameters=(*(p for p in PARAMETERS if p.name != CAP), one))
    assert launch_that_is_up(settings, [sampled(0, pipeline(3, 4))]) is None


def test_setting_without_live_parameters_is_alone_on_its_launch() -> None:
    assert launch_that_is_up(search_settings(), [sampled(0, TP8)]) is None


def test_no_launch_is_preferred_when_none_is_up() -> None:
    settings, whole = search_settings(), sampled(0, pipeline(0, 4))
    for ended in (Outcome.INFEASIBLE, Outcome.FAILED, Outcome.LOST, Outcome.INVALID):
        assert launch_that_is_up(settings, [whole, replace(whole, outcome=ended)]) is None
    assert launch_that_is_up(settings, [replace(whole, shares=3)]) is None
    assert launch_that_is_up(settings, []) is None


def test_re_measurements_in_between_change_nothing() -> None:
    settings, first = search_settings(), sampled(0, pipeline(3, 4))
    again = replace(sampled(1, pipeline(3, 4)), repeat_of=0)
    assert launch_that_is_up(settings, [first, again]) == launch_that_is_up(settings, [first])


def test_other_launches_have_their_turn_after_some_trials_in_a_row() -> None:
    settings = search_settings()
    history = [sampled(cap, pipeline(0, cap + 1)) for cap in range(MOST_IN_A_ROW)]
    assert launch_that_is_up(settings, history) is None
    assert launch_that_is_up(settings, [sampled(9, pipeline(8, 1)), *history[1:]]) is not None


@pytest.mark.parametrize("sampler", ["random", "qmc", "nsga2"])
def test_samplers_whose_draws_are_no_equals_prefer_no_launch(sampler: str) -> None:
    history = [sampled(0, pipeline(0, 4))]
    assert launch_that_is_up(search_settings(sampler=sampler), history) is None
