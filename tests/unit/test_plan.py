"""The plan of a study: what is grouped how, what is held to be the same, what is ranked."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest

from runner.expression import Expression
from runner.forecast.cost import study_cost
from runner.forecast.equivalence import (
    Equivalent,
    Sameness,
    equivalents,
    load_key,
    same_computation,
)
from runner.forecast.estimate import Estimator
from runner.forecast.examine import SAMPLED, examine
from runner.forecast.findings import group, wastes
from runner.forecast.own_lengths import own_lengths
from runner.forecast.plan import StudyPlan, make_plan, plan_document
from runner.forecast.predict import predict
from runner.forecast.prediction import Basis
from runner.forecast.ranking import Forecaster
from runner.forecast.setting import PlannedSetting, plan_setting, study_profile
from runner.forecast.simulate import Effort, make_job, run_job
from runner.insight.plan_view import print_plan
from runner.plans import at_lengths
from runner.settings import (
    Baseline,
    Choices,
    Direction,
    FloatRange,
    IntRange,
    Objective,
    SearchSettings,
    SloLimit,
    StudySettings,
)
from runner.trial import Lengths, LoadProtocol, LoadStart, Params, TrialLengths
from tests.forecasting import CAP, DEPTH, small_study, with_workload

STUDY = small_study()


def planned(params: Params, settings: StudySettings = STUDY) -> PlannedSetting:
    found = plan_setting(settings, study_profile(settings), params)
    assert isinstance(found, PlannedSetting), found
    return found


def wasted(params: Params, settings: StudySettings = STUDY) -> str:
    found = wastes(settings, study_profile(settings), planned(params, settings))
    return "\n".join(f"{reason} | {example}" for reason, example in found)


def same(settings: StudySettings, *params: Params) -> tuple[Equivalent, ...]:
    profile = study_profile(settings)
    found = [planned(each, settings) for each in params]
    return equivalents(profile, same_computation(settings, profile, found))


@pytest.fixture(scope="module")
def plan() -> StudyPlan:
    return make_plan(STUDY, top=3)


def test_the_space_and_the_baselines_are_planned(plan: StudyPlan) -> None:
    document = plan_document(plan)
    assert document["space"] == {
        "settings": 16,
        "examined": 16,
        "runnable": 16,
        "sampled": False,
    }
    assert [row.name for row in plan.baselines] == ["tp8"]
    assert set(document) >= {"name", "refused", "warnings", "equivalent", "ranking", "launches"}


def test_the_ranking_is_simulated_and_best_first(plan: StudyPlan) -> None:
    values = [row.objective for row in plan.ranking]
    assert values == sorted(values, reverse=True)
    for row in (*plan.ranking, *plan.baselines):
        assert row.basis is Basis.SIMULATION
        assert row.objective == row.rungs[1].output_throughput
        assert row.rungs[1].p10 is not None, "several seeds"
        assert row.reason
    depths = [row.planned.params[DEPTH] for row in plan.ranking]
    assert sorted(depths, key=str) == [0, 4], "one row a layout, at its best cap"


def test_the_first_of_the_ranking_is_what_predict_finds_best(plan: StudyPlan) -> None:
    """Several runs per layout are compared on the same seed."""
    best = plan.ranking[0]
    rates = {
        cap: predict(STUDY, {**best.planned.params, CAP: cap}, 1).rungs[1].output_throughput
        for cap in (1, 2, 4, 8)
    }
    assert best.objective > 0.97 * max(rates.values())


def test_a_plan_is_the_same_every_time(plan: StudyPlan) -> None:
    assert plan_document(make_plan(STUDY, top=3)) == plan_document(plan)


def test_reasons_are_in_words(plan: StudyPlan) -> None:
    (tp8,) = plan.baselines
    assert tp8.reason == "no pipeline: 2 all-reduces per layer over 8 GPUs"
    assert "of 8 stages busy" in plan.ranking[0].reason
    assert "slots" in plan.ranking[0].reason


def test_what_cannot_run_is_grouped_with_an_example() -> None:
    backends = Choices("attention_backend", ("triton", "fa3"))
    settings = small_study(
        parameters=(Choices("pp_size", (4, 8)), backends),
        baselines=(Baseline("tp1", {"tp_size": 1}),),
    )
    document = plan_document(make_plan(settings, top=2))
    refused = document["refused"]
    assert isinstance(refused, list)
    counts = {each["reason"]: each["count"] for each in refused}
    assert counts == {"attention backend refused": 2, "out of memory": 1}
    assert "pp4 fa3: attention backend fa3 does not run" in refused[0]["example"]
    baselines = document["baselines"]
    assert isinstance(baselines, list)
    assert "out of memory" in baselines[0]["refused"]


def test_a_space_of_which_nothing_can_run_is_told_as_such() -> None:
    settings = small_study(parameters=(Choices("tp_size", (1, 2)),), baselines=())
    document = plan_document(make_plan(settings, top=2))
    assert (document["ranking"], document["launches"], document["time_s"]) == ([], 0, 0.0)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"pp_size": 8, CAP: 1, "cuda_graph_max_bs": 64}, ""),
        ({"tp_size": 8, "cuda_graph_max_bs": 4}, "graphs up to 4, batches up to 6"),
        ({"pp_size": 2, "tp_size": 4, CAP: 2}, "2 x 2 < 6"),
        ({"tp_size": 8, "max_running_requests": 4}, "max_running_requests is below"),
        ({"tp_size": 8, "max_total_tokens": 100}, "100 tokens < 6 x 28"),
        ({"pp_size": 8, CAP: 4}, "fewer requests than stages"),
        ({"pp_size": 8, CAP: 8, "max_running_requests": 8}, "cannot be set live"),
    ],
)
def test_what_runs_but_wastes_is_warned_of(params: Params, words: str) -> None:
    assert words in wasted(params)


def test_a_cap_that_leaves_stages_idle_in_a_burst_is_warned_of() -> None:
    closed = with_workload(STUDY, concurrency=(32,))
    closed = replace(closed, objectives=(replace(STUDY.objectives[0], concurrency=32),))
    burst = with_workload(closed, protocol=LoadProtocol.BURST)
    assert "32 requests fill 4 of 8 stages' slots" in wasted({"pp_size": 8, CAP: 8}, burst)
    assert "stages are idle" not in wasted({"pp_size": 8, CAP: 4}, burst)
    assert "stages are idle" not in wasted({"pp_size": 8, CAP: 8}, closed), "newcomers spread"


def test_a_backend_without_graphs_is_warned_of() -> None:
    engine = replace(STUDY.engine, profile="cpu-blocking-pp2")
    settings = replace(STUDY, engine=engine, hardware=replace(STUDY.hardware, gpus=2))
    assert "does not run in a CUDA graph" in wasted({"attention_backend": "torch_native"}, settings)


def test_findings_are_grouped_by_reason_the_most_frequent_first() -> None:
    found = group([("a", "1"), ("b", "2"), ("b", "3")])
    assert [(each.reason, each.count, each.example) for each in found] == [
        ("b", 2, "2"),
        ("a", 1, "1"),
    ]


def test_equal_flags_are_equivalent() -> None:
    auto: Params = {"pp_size": 8, "max_running_requests": 64}
    (found,) = same(STUDY, auto, {**auto, CAP: 8}, {**auto, "attention_backend": "triton"})
    assert found.basis is Sameness.FLAGS
    assert len(found.settings) == 3


def test_a_partition_that_says_what_holds_anyway_is_equal() -> None:
    auto: Params = {"pp_size": 8, "max_running_requests": 64}
    same_layers, others = "7,7,7,8,8,8,8,8", "8,8,8,8,8,7,7,7"
    pair = [{**auto, "pp_layer_partition": layers} for layers in (same_layers, others)]
    (found,) = same(STUDY, auto, *pair)
    assert (found.basis, found.settings) == (Sameness.FLAGS, (auto, pair[0]))


def test_a_cap_that_is_never_reached_is_the_same_simulation() -> None:
    (found,) = same(STUDY, *({"pp_size": 8, CAP: cap} for cap in (5, 6, 7, 8)))
    assert found.basis is Sameness.COMPUTATION
    assert [each[CAP] for each in found.settings] == [6, 7, 8], "6 requests are sent at most"
    one, other = (predict(STUDY, {"pp_size": 8, CAP: cap}, 1) for cap in (6, 8))
    assert one == other


def test_what_runs_graphs_keeps_settings_apart() -> None:
    """Whether there are any is modelled; which, is not."""
    for name in ("cuda_graph_backend_prefill", "cuda_graph_backend_decode"):
        backends = ("breakable", "full", "disabled")
        settings: list[Params] = [{"tp_size": 8, name: backend} for backend in backends]
        assert same(STUDY, *settings) == ()
    off: Params = {"tp_size": 8, "disable_prefill_cuda_graph": True}
    assert same(STUDY, {"tp_size": 8}, off) == ()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"cuda_graph": True}, None),
        ({"cuda_graph": False}, "decode without CUDA graphs"),
        ({"disable_cuda_graph": True}, "no CUDA graphs"),
        ({"cuda_graph_backend_prefill": "disabled"}, "prefill without CUDA graphs"),
        ({"pp_size": 8, "tp_size": 1}, None),
        ({"pp_size": 8, "tp_size": 1, "cuda_graph": False}, "no CUDA graphs"),
    ],
)
def test_reasons_say_what_runs_without_graphs(params: Params, words: str | None) -> None:
    study = small_study(baselines=(Baseline("it", {"tp_size": 8, **params}),))
    (row,) = make_plan(study, top=1).baselines
    assert ("CUDA graphs" in row.reason) == (words is not None)
    assert (words or "") in row.reason


def test_parameters_that_the_model_does_not_know_keep_settings_apart() -> None:
    one: Params = {"tp_size": 8}
    assert same(STUDY, one, {**one, "schedule_policy": "lpm"}) == ()


def test_an_open_loop_has_no_most_requests() -> None:
    settings = with_workload(STUDY, protocol=LoadProtocol.OPEN_LOOP, rate=(1.0,), concurrency=())
    assert same(settings, {"pp_size": 8, CAP: 7}, {"pp_size": 8, CAP: 8}) == ()


PAIRS = [({DEPTH: 0, CAP: cap}, {DEPTH: 4, CAP: cap}) for cap in (2, 4)]


def test_what_only_the_closed_form_finds_equal_stays_apart() -> None:
    """Empty slots cost it nothing; in a simulation newcomers meet them, and land elsewhere."""
    told_apart = 0
    for concurrency in (5, 9):
        objectives = (replace(STUDY.objectives[0], concurrency=concurrency),)
        settings = replace(STUDY, objectives=objectives, baselines=())
        settings = with_workload(
            settings, output_tokens=Lengths("uniform", 10, 50), concurrency=(concurrency,)
        )
        for pair in PAIRS:
            one, other = (planned({"pp_size": 8, **each}, settings) for each in pair)
            estimator = Estimator(settings, study_profile(settings))
            forecaster = Forecaster(settings, estimator, lambda _: None)
            assert same(settings, one.params, other.params) == ()
            if not forecaster.looks_like(one, other):
                continue
            forecaster.simulate([one, other], [concurrency], 2)
            caps = Choices(CAP, (pair[0][CAP],))
            space = (Choices("pp_size", (8,)), Choices(DEPTH, (0, 4)), caps)
            found = make_plan(replace(settings, parameters=space), top=2)
            assert bool(found.equivalent) == forecaster.agree(one, other)
            told_apart += not found.equivalent
    assert told_apart, "the closed form sees less than the simulation"


def test_near_simulations_are_equivalent_and_others_are_not() -> None:
    """A cap of 5 is met once by 6 requests, one of 2 always."""
    settings = replace(STUDY, parameters=(Choices("pp_size", (8,)), Choices(CAP, (2, 5, 6, 7))))
    found = make_plan(replace(settings, baselines=()), top=3)
    groups = [{each[CAP] for each in group.settings} for group in found.equivalent]
    assert {6, 7} in groups
    assert not any({2, 6} <= caps for caps in groups)


def test_a_budget_that_is_spent_leaves_the_closed_form() -> None:
    estimator = Estimator(STUDY, study_profile(STUDY))
    setting = planned({"pp_size": 8, CAP: 2})
    forecaster = Forecaster(STUDY, estimator, lambda _: None, most_work=0.0)
    forecaster.simulate([setting], [1, 6], seeds=3)
    assert {rung.basis for rung in forecaster.rungs(setting)} == {Basis.CLOSED_FORM}
    forecaster.allow(1e9)
    forecaster.simulate([setting], [6], seeds=1)
    assert [rung.basis for rung in forecaster.rungs(setting)] == [
        Basis.CLOSED_FORM,
        Basis.SIMULATION,
    ]
    assert not forecaster.is_simulated(setting)


def test_a_minimised_objective_ranks_the_lowest_first() -> None:
    objective = Objective("tpot_s.mean", 6, Direction.MINIMIZE)
    found = make_plan(replace(STUDY, objectives=(objective,)), top=3).ranking
    values = [row.objective for row in found]
    assert values == sorted(values)
    assert max(values) < 1, "seconds, not tokens per second"


@pytest.mark.parametrize(
    "metric",
    [
        *("total_throughput", "request_throughput", "tokens_per_joule", "joules_per_request"),
        *("power_w", "achieved_concurrency", "ttft_s.p99", "e2e_s.mean", "itl_s.p50", "goodput"),
    ],
)
def test_every_metric_has_a_closed_form(metric: str) -> None:
    objective = Objective(metric, 6, Direction.MAXIMIZE)
    settings = replace(STUDY, objectives=(objective,))
    settings = with_workload(settings, output_tokens=Lengths.fixed(60))
    setting = planned({"tp_size": 8}, settings)
    estimator = Estimator(settings, study_profile(settings))
    ((_, closed),) = estimator.rung(setting, 6).objectives
    job = make_job(settings, estimator, setting, 6, 0, Effort(3.0, 1e6, LoadStart.TOGETHER))
    found = dict(run_job(job).objectives)
    if metric == "goodput":  # there is no limit to keep
        assert found == {}
    else:
        assert closed == pytest.approx(found[0], rel=0.35)


def test_large_and_continuous_spaces_are_sampled_with_the_studys_seed() -> None:
    share = FloatRange("mem_fraction_static", 0.8, 0.9)
    large = replace(STUDY, parameters=(*STUDY.parameters, share))
    found = examine(large)
    assert found.is_sampled
    assert len(found.settings) == SAMPLED
    assert found == examine(large)
    search = SearchSettings("auto", 20, 1, None, None, None, None)
    assert found.settings != examine(replace(large, search=search)).settings
    logged = (FloatRange("x", 1.0, 8.0, log=True), IntRange("y", 1, 10**6, log=True))
    steps = IntRange("z", 0, 10**6, step=5, when=Expression.parse("y > 1000"))
    sampled = examine(replace(STUDY, parameters=(*logged, steps))).settings
    assert all(1 <= float(each["x"]) <= 8 and ("z" in each) == (int(each["y"]) > 1000)
               for each in sampled)  # fmt: skip
    assert 0.4 < sum(int(each["y"]) > 1000 for each in sampled) / len(sampled) < 0.6


@pytest.mark.parametrize(
    ("trials", "launches"),
    [
        (1, 1 + 4),  # the baseline; 3 finalists and the baseline again
        (9, 1 + 4 + 3),  # four pairs, two launches for all caps: every second pair changes
    ],
)
def test_launches_are_counted(trials: int, launches: int) -> None:
    settings = replace(STUDY, search=replace(STUDY.search, trials=trials))
    cost = make_plan(settings, top=1).cost
    assert (cost.trials, cost.remeasured, cost.limited_by) == (trials, 4, None)
    assert cost.launches == launches


@pytest.mark.parametrize("name", ["minutes", "launches", "energy_j"])
def test_the_scarcest_budget_ends_a_study(name: str) -> None:
    search = replace(STUDY.search, trials=9)
    whole = make_plan(replace(STUDY, search=search), top=1).cost
    halves: dict[str, Any] = {
        "minutes": whole.time_s / 120,
        "launches": whole.launches // 2,
        "energy_j": whole.energy_j / 2,
    }
    generous: dict[str, Any] = {"minutes": 1e6, "launches": 10**6, "energy_j": 1e12}
    search = replace(search, **{**generous, name: halves[name]})
    cost = make_plan(replace(STUDY, search=search), top=1).cost
    assert cost.limited_by == name
    assert cost.trials == 9 // 2
    assert cost.time_s == pytest.approx(whole.time_s / 2)
    assert cost.energy_j == pytest.approx(whole.energy_j / 2)


def test_what_the_model_does_not_know_is_said_and_not_ranked() -> None:
    policy = Choices("schedule_policy", ("fcfs", "lpm"))
    settings = replace(STUDY, parameters=(*STUDY.parameters, policy))
    plan = make_plan(settings, top=4)
    assert plan.not_modelled == ("schedule_policy",)
    layouts = [(row.planned.shape.pp_async_batch_depth) for row in plan.ranking]
    assert len(layouts) == len(set(layouts)), "one row for both policies"
    assert predict(settings, {"pp_size": 8, "schedule_policy": "lpm"}, 1).not_modelled == (
        "schedule_policy",
    )


def test_values_that_no_setting_has_are_named() -> None:
    sizes = Choices("tp_size", (1, 16))
    settings = replace(STUDY, parameters=(sizes, Choices("pp_size", (8,))))
    assert make_plan(settings, top=1).unused == ("tp_size 16",)


def test_time_and_energy_follow_the_trials() -> None:
    estimator = Estimator(STUDY, study_profile(STUDY))
    setting = planned({"tp_size": 8})

    def cost(trials: int, time_scale: float) -> tuple[float, float]:
        search = replace(STUDY.search, trials=trials)
        engine = replace(STUDY.engine, time_scale=time_scale)
        settings = replace(STUDY, search=search, engine=engine)
        settings = replace(settings, measure=replace(STUDY.measure, repeats=0))
        runnable = [replace(setting) for _ in range(9)]
        found = study_cost(settings, estimator, estimator, runnable, [])
        return found.time_s, found.energy_j

    one_s, one_j = cost(1, 1.0)
    fast_s, fast_j = cost(1, 10.0)
    assert fast_s == pytest.approx(one_s / 10)
    assert fast_j == one_j
    more_s, more_j = cost(5, 1.0)
    assert one_s < more_s < 5 * one_s, "one launch serves all"
    assert one_j < more_j
    assert 8 * 88 < one_j / one_s < 8 * 600, "watts of 8 GPUs"


def test_load_keys_know_what_the_load_can_meet() -> None:
    profile = study_profile(STUDY)

    def key(**params: Any) -> object:  # noqa: ANN401 - any parameter
        return load_key(STUDY, profile, planned({"tp_size": 8, **params}))

    plain = key()
    assert key(max_running_requests=6) == plain
    assert key(max_running_requests=5) != plain
    assert key(chunked_prefill_size=4096) == plain
    assert key(chunked_prefill_size=-1) == plain
    assert key(chunked_prefill_size=16) != plain
    assert key(cuda_graph_max_bs=8) == plain
    assert key(cuda_graph_max_bs=5) != plain
    assert key(cuda_graph=False) != plain
    assert key(max_total_tokens=10_000) == plain
    assert key(max_total_tokens=100) != plain
    assert key(mem_fraction_static=0.85) == plain
    assert key(attention_backend="flashinfer") != plain


def long_study(**search: Any) -> StudySettings:  # noqa: ANN401 - any field of SearchSettings
    """Replies of 48 tokens, searched at 12."""
    settings = with_workload(STUDY, output_tokens=Lengths.fixed(48))
    fields = {"output_tokens": Lengths.fixed(12), **search}
    return replace(settings, search=replace(settings.search, **fields))


def test_a_plan_ranks_by_the_search_and_says_so(plan: StudyPlan) -> None:
    found = make_plan(long_study(), top=3)
    assert [row.planned.params for row in found.ranking] == [
        row.planned.params for row in plan.ranking
    ]
    assert [row.objective for row in found.ranking] == [row.objective for row in plan.ranking]
    document = plan_document(found)
    assert document["lengths"] == {
        "search": "12 tokens",
        "workload": "48 tokens",
        "other_leader": "pp8 d0 cap1",
    }
    assert "lengths" not in plan_document(plan)
    stream = io.StringIO()
    print_plan(found, stream)
    assert (
        "12 tokens is what the search asks for, and what is ranked here; finalists and baselines "
        "are measured again at your 48 tokens."
    ) in " ".join(stream.getvalue().split())


def test_finalists_cost_what_the_users_lengths_take(plan: StudyPlan) -> None:
    found = make_plan(long_study(), top=3).cost
    all_long = make_plan(long_study(output_tokens=None), top=3).cost
    assert plan.cost.time_s < found.time_s < all_long.time_s
    assert plan.cost.energy_j < found.energy_j < all_long.energy_j
    assert (found.trials, found.remeasured) == (all_long.trials, all_long.remeasured)


def test_a_plan_warns_when_the_users_lengths_have_another_leader() -> None:
    """Short replies are mostly prefill, long ones mostly decode."""
    settings = with_workload(STUDY, concurrency=(6,))
    estimator = Estimator(settings, study_profile(settings))
    rows = [
        planned({"tp_size": 1, "pp_size": 8, CAP: 1}),
        planned({"tp_size": 4, "pp_size": 2, CAP: 3}),
        planned({"tp_size": 8, "pp_size": 1}),
    ]

    def leader(estimated: Estimator) -> PlannedSetting:
        return max(rows, key=lambda row: estimated.rung(row, 6).output_throughput)

    laws = [Lengths.fixed(tokens) for tokens in (12, 400)]
    leaders = [
        leader(Estimator(with_workload(settings, output_tokens=law), estimator.profile))
        for law in laws
    ]
    assert leaders[0] is not leaders[1], "else this test shows nothing"
    asked = with_workload(settings, output_tokens=laws[1])
    asked = replace(asked, search=replace(asked.search, output_tokens=laws[0]))
    short = Estimator(at_lengths(asked, TrialLengths.SEARCH), estimator.profile)
    found = own_lengths(asked, short, rows)
    assert found is not None
    assert found.leader is leaders[1]
    assert own_lengths(settings, estimator, rows) is None


def test_a_prediction_is_for_the_users_lengths() -> None:
    setting = {"tp_size": 8}
    own = with_workload(STUDY, output_tokens=Lengths.fixed(48))
    assert predict(long_study(), setting, 1) == predict(own, setting, 1)


def test_a_short_simulation_that_saw_no_latency_is_judged_by_what_it_shows() -> None:
    """The study's own window would see it; the rule of a limit is the trial's."""
    work = with_workload(STUDY, output_tokens=Lengths.fixed(3000), concurrency=(6,))
    for limit_s, misses in ((100.0, False), (0.001, True)):
        settings = replace(work, slo=(SloLimit("tpot_s", "p99", limit_s),))
        estimator = Estimator(settings, study_profile(settings))
        setting = planned({"tp_size": 8}, settings)
        job = make_job(
            settings,
            estimator,
            setting,
            6,
            0,
            Effort(lives=0.01, most_work=1e4, start=LoadStart.TOGETHER),
        )
        assert job.is_cut_off
        assert run_job(job).misses_slo is misses
