"""The rows of a plan: what seeds cannot tell apart, the same numbers, what was measured."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from runner.forecast.order import best_first, same_rows
from runner.forecast.plan import make_plan
from runner.forecast.predict import predict
from runner.forecast.prediction import Basis, Prediction, RungPrediction
from runner.forecast.ranking import Ranked
from runner.forecast.setting import PlannedSetting, plan_setting, study_profile
from runner.insight.forecast_view import print_prediction
from runner.insight.plan_view import print_plan
from runner.machine.profile import load_profile
from runner.settings import Choices, Direction, IntRange, StudySettings
from runner.trial import Lengths, LoadProtocol, Params
from tests.forecasting import CAP, DEPTH, small_study, with_workload

STUDY = small_study()
LLAMA = replace(
    STUDY,
    engine=replace(STUDY.engine, profile="h200-llama-3.1-8b"),
    hardware=replace(STUDY.hardware, gpus=4),
    parameters=(Choices("tp_size", (1,)),),
    baselines=(),
)
TP8: Params = {"tp_size": 8}
GRAPH: Params = {"tp_size": 8, "cuda_graph": True}
EAGER: Params = {"tp_size": 8, "cuda_graph": False}
DEEP: Params = {"pp_size": 8, DEPTH: 4}


def row(
    params: Params, value: float, half: float | None, name: str | None = None, misses: bool = False
) -> Ranked:
    planned = plan_setting(STUDY, study_profile(STUDY), params)
    assert isinstance(planned, PlannedSetting)
    rung = RungPrediction(6, value, 0.1, 0.01, 1.0, 1.0, 1000.0, Basis.SIMULATION)
    if half is not None:
        rung = replace(rung, p10=value - half, p90=value + half)
    return Ranked(planned, name, value, Basis.SIMULATION, "", (rung,), misses, 0)


def order(*rows: Ranked, settings: StudySettings = STUDY) -> list[float]:
    return [each.objective for each in best_first(settings, rows)]


def test_the_best_comes_first_where_seeds_can_tell() -> None:
    rows = row(DEEP, 110, 2), row(TP8, 100, 2, "today"), row(GRAPH, 90, None)
    assert order(*reversed(rows)) == [110, 100, 90]
    falling = replace(STUDY.objectives[0], direction=Direction.MINIMIZE)
    assert order(*rows, settings=replace(STUDY, objectives=(falling,))) == [90, 100, 110]


def test_of_those_that_overlap_the_baseline_and_then_the_plainest_comes_first() -> None:
    eager = row(EAGER, 101, 2)
    assert order(eager, row(GRAPH, 100.5, 2), row(DEEP, 100.8, 2), row(TP8, 99, 1, "today")) == [
        *(99, 100.5),
        *(101, 100.8),
    ]


def test_what_misses_a_limit_does_not_overlap_with_what_keeps_it() -> None:
    assert order(row(TP8, 101, 2, "today", misses=True), row(EAGER, 100, 2)) == [100, 101]


def test_what_does_not_overlap_with_the_best_is_not_drawn_up_by_what_does() -> None:
    """100 - 104, 98 - 101, 96 - 99: the last overlaps with the second only."""
    rows = row(EAGER, 102, 2), row(DEEP, 99.5, 1.5), row(TP8, 97.5, 1.5, "today")
    assert order(*rows) == [102, 99.5, 97.5]


def test_rows_with_the_same_numbers_are_one() -> None:
    rows = row(TP8, 100, 2, "today"), row(GRAPH, 100, 2), row(DEEP, 90, 2)
    assert [len(group) for group in same_rows(STUDY, rows)] == [2, 1]
    graphs = (Choices("tp_size", (8,)), Choices("cuda_graph", (True, False)))
    stream = io.StringIO()
    print_plan(make_plan(replace(STUDY, parameters=graphs), top=3), stream)
    assert "tp8 [tp8] = tp8 graph = tp8 eager" in stream.getvalue()


@pytest.mark.parametrize(("tp_size", "is_told"), [(1, False), (2, False), (4, True)])
def test_what_was_measured_on_two_gpus_says_nothing_of_four(tp_size: int, is_told: bool) -> None:
    params: Params = {"tp_size": tp_size}
    answer, plan = io.StringIO(), io.StringIO()
    prediction = Prediction(
        LoadProtocol.CLOSED_LOOP, 12, Basis.SIMULATION, row(TP8, 1, None).rungs, seeds=1
    )
    print_prediction(prediction, LLAMA, params, answer)
    settings = replace(LLAMA, parameters=(Choices("tp_size", (tp_size,)),))
    print_plan(make_plan(settings, top=1), plan)
    for stream in (answer, plan):
        words = " ".join(stream.getvalue().split())
        assert ("measured with servers of at most 2 GPUs only" in words) is is_told
        assert "fitted to 41 measured throughputs" in words


def test_profiles_that_say_nothing_were_measured_whole() -> None:
    kimi = load_profile("rtx-pro-6000-x8-kimi-k2.6")
    assert kimi.measured_gpus is None
    assert load_profile("h200-qwen3-30b-a3b").measured_gpus == 2
    stream = io.StringIO()
    print_plan(make_plan(STUDY, top=1), stream)
    assert "was measured with servers" not in stream.getvalue()


def test_of_caps_that_the_closed_form_cannot_tell_apart_the_best_is_found() -> None:
    """Three slots under equal replies: 24 each hold all, but 64 let requests fall into step."""
    caps = IntRange(CAP, 22, 64)
    settings = replace(
        LLAMA,
        hardware=replace(LLAMA.hardware, gpus=2),
        engine=replace(LLAMA.engine, args={"max_running_requests": 128}),
        parameters=(Choices("pp_size", (2,)), Choices(DEPTH, (1,)), caps),
        objectives=(replace(LLAMA.objectives[0], concurrency=64),),
    )
    lengths = {"prompt_tokens": Lengths.fixed(256), "output_tokens": Lengths.fixed(128)}
    settings = with_workload(settings, concurrency=(64,), **lengths)
    (best,) = make_plan(settings, top=1).ranking
    assert best.planned.cap == 64
    narrow = predict(settings, {**best.planned.params, CAP: 24}, seeds=3)
    assert best.objective > 1.04 * narrow.rungs[0].output_throughput


@pytest.mark.parametrize(
    ("law", "is_told"), [(Lengths.fixed(12), True), (Lengths("uniform", 6, 18), False)]
)
def test_a_plan_says_how_its_loads_begin_where_that_lasts(law: Lengths, is_told: bool) -> None:
    stream = io.StringIO()
    print_plan(make_plan(with_workload(STUDY, output_tokens=law), top=1), stream)
    words = "Replies of like length keep the order in which a load began"
    assert (words in " ".join(stream.getvalue().split())) is is_told
