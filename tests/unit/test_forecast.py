"""Predictions of one setting: what is simulated, over seeds, and how bad input is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runner.errors import ConfigError
from runner.forecast.estimate import Estimator, estimate
from runner.forecast.given import parse_params
from runner.forecast.lengths import length_facts
from runner.forecast.predict import predict
from runner.forecast.prediction import Basis, prediction_document
from runner.forecast.setting import PlannedSetting, plan_setting, study_profile
from runner.forecast.simulate import Effort, Job, make_job, run_job, run_jobs
from runner.machine.shape import Refusal, RefusalKind
from runner.settings import Choices, MeasureSettings, SloLimit, StudySettings
from runner.trial import EngineKind, Lengths, LoadProtocol, LoadStart, Params
from tests.forecasting import CAP, DEPTH, small_study, with_workload

STUDY = small_study()
PP8: Params = {"pp_size": 8, "max_running_requests": 64}
EFFORT = Effort(lives=2.0, most_work=0.3e6, start=LoadStart.TOGETHER)


def planned(settings: StudySettings, params: Params) -> PlannedSetting:
    found = plan_setting(settings, study_profile(settings), params)
    assert isinstance(found, PlannedSetting), found
    return found


def refusal(settings: StudySettings, params: Params) -> Refusal:
    found = plan_setting(settings, study_profile(settings), params)
    assert isinstance(found, Refusal)
    return found


def job(settings: StudySettings, params: Params, level: float) -> Job:
    estimator = Estimator(settings, study_profile(settings))
    return make_job(settings, estimator, planned(settings, params), level, 0, EFFORT)


def test_a_prediction_has_every_rung_and_plain_numbers() -> None:
    document = prediction_document(predict(STUDY, PP8, seeds=2))
    assert (document["protocol"], document["output_tokens"]) == ("closed_loop", 12)
    rungs = document["rungs"]
    assert isinstance(rungs, list)
    assert [rung["concurrency"] for rung in rungs] == [1, 6]
    for rung in rungs:
        assert all(type(value) in (int, float) for value in rung.values())
        assert 0 < rung["busy_stages"] <= 8
        assert rung["slots"] <= 8
        low, high = rung["output_throughput_p10"], rung["output_throughput_p90"]
        assert low <= rung["output_throughput"] <= high
    assert rungs[0]["slots"] == pytest.approx(1.0, abs=0.1)


def test_one_seed_has_no_percentiles() -> None:
    rungs = prediction_document(predict(STUDY, PP8, seeds=1))["rungs"]
    assert isinstance(rungs, list)
    assert "output_throughput_p10" not in rungs[0]


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        ({}, True),
        ({"output_tokens": Lengths("uniform", 64, 192)}, False),
        ({"protocol": LoadProtocol.BURST}, False),
        ({"concurrency": (1,)}, False),
    ],
)
def test_equal_replies_of_a_closed_loop_remember_how_they_began(
    changes: dict[str, Any], is_told: bool
) -> None:
    """Two H200s measured 2,410 to 3,690 tokens/s begun one by one, 4,000 to 4,050 together."""
    engine = replace(STUDY.engine, profile="h200-llama-3.1-8b", args={"max_running_requests": 128})
    parameters = (Choices("pp_size", (2,)),)
    hardware = replace(STUDY.hardware, gpus=2)
    filled = replace(STUDY, engine=engine, parameters=parameters, hardware=hardware, baselines=())
    lengths = {"prompt_tokens": Lengths.fixed(256), "output_tokens": Lengths.fixed(128)}
    settings = with_workload(filled, concurrency=(64, 8), **lengths)
    settings = with_workload(settings, **changes)
    level = settings.workload.concurrency[0]
    objective = replace(STUDY.objectives[0], concurrency=level)
    settings = replace(settings, objectives=(objective,))
    highest, *others = predict(settings, {"pp_size": 2, "tp_size": 1}, seeds=1).rungs
    assert all(rung.together is None for rung in others)
    assert (highest.together is not None) is is_told
    if highest.together is not None:
        assert 2400 < highest.output_throughput < 3700
        assert 3600 < highest.together < 4400


def test_a_prediction_is_the_same_every_time() -> None:
    assert predict(STUDY, PP8, seeds=2) == predict(STUDY, PP8, seeds=2)


def test_processes_answer_what_one_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(STUDY, PP8, level) for level in (1, 6)]
    alone = [run_job(each) for each in jobs]
    monkeypatch.setattr("runner.forecast.simulate.WORTH_A_POOL", 0.0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    told: list[float] = []
    assert run_jobs(jobs, told.append) == alone
    assert told == [each.work for each in jobs]


@pytest.mark.parametrize("kind", list(EngineKind))
def test_every_kind_of_engine_is_predicted_alike(kind: EngineKind) -> None:
    settings = replace(STUDY, engine=replace(STUDY.engine, kind=kind, model="/no/such/model"))
    assert predict(settings, PP8, 1) == predict(STUDY, PP8, 1)


@pytest.mark.parametrize("protocol", [LoadProtocol.CLOSED_LOOP, LoadProtocol.BURST])
@pytest.mark.parametrize("cap", [8, 2, 1])
def test_the_closed_form_is_near_the_simulation(protocol: LoadProtocol, cap: int) -> None:
    # In a loop, equal lengths keep the phases that the start gave them for ever.
    is_burst = protocol is LoadProtocol.BURST
    lengths = Lengths.fixed(60) if is_burst else Lengths("uniform", 30, 90)
    settings = with_workload(STUDY, protocol=protocol, output_tokens=lengths)
    params = {**PP8, CAP: cap}
    found = [answer.rungs for answer in (predict(settings, params, 1), estimate(settings, params))]
    near = 0.15 if is_burst else 0.2
    for simulated, closed in zip(*found, strict=True):
        assert simulated.basis is Basis.SIMULATION
        assert closed.basis is Basis.CLOSED_FORM
        assert closed.output_throughput == pytest.approx(simulated.output_throughput, rel=near)
        assert closed.tpot_s == pytest.approx(simulated.tpot_s, rel=near)
        assert closed.power_w == pytest.approx(simulated.power_w, rel=0.3)


def test_a_launch_fills_its_gpus_with_servers() -> None:
    engine = replace(STUDY.engine, profile="h200-llama-3.1-8b")
    one = replace(STUDY, engine=engine, hardware=replace(STUDY.hardware, gpus=1))
    profile = study_profile(one)
    most = replace(one, hardware=replace(one.hardware, gpus=profile.gpus + 1))
    assert refusal(most, {}).kind is RefusalKind.GPUS, "more than the profile has"
    many = replace(one, hardware=replace(one.hardware, gpus=4))
    servers = plan_setting(many, profile, {})
    assert isinstance(servers, PlannedSetting)
    rungs = Estimator(many, profile).predict(servers).rungs
    alone = Estimator(one, profile).predict(planned(one, {})).rungs
    assert rungs[0].output_throughput == pytest.approx(alone[0].output_throughput)
    assert rungs[1].tpot_s < alone[1].tpot_s, "each server has 1 or 2 of the 6 requests"
    assert rungs[1].slots == 1.0
    assert rungs[0].power_w > alone[0].power_w, "idle servers draw power too"


def test_an_open_loop_has_rates() -> None:
    objective = replace(STUDY.objectives[0], concurrency=2.0)
    settings = replace(STUDY, objectives=(objective,), measure=MeasureSettings(0.1, 5, 10, 1, 1))
    settings = with_workload(
        settings, protocol=LoadProtocol.OPEN_LOOP, rate=(0.5, 2.0), concurrency=()
    )
    simulated, closed = predict(settings, PP8, 1), estimate(settings, PP8)
    assert [rung.level for rung in simulated.rungs] == [0.5, 2.0]
    assert closed.rungs[1].output_throughput == 24.0
    assert simulated.rungs[1].output_throughput == pytest.approx(24.0, rel=0.5)


def test_very_long_outputs_are_cut_off() -> None:
    settings = with_workload(STUDY, output_tokens=Lengths.fixed(20_000))
    found = job(settings, PP8, 6)
    assert found.is_cut_off
    assert not job(STUDY, PP8, 6).is_cut_off
    assert found.plan.max_window_s < 60
    assert found.work < 1.5 * EFFORT.most_work
    sample = run_job(found)
    assert sample.output_throughput > 0
    assert sample.ttft_s > 0, "none started in the window, but those before it did"
    assert sample.tpot_s > 0


@pytest.mark.parametrize(("tokens", "is_cut_off"), [(12, False), (20_000, True)])
def test_of_loads_that_are_cut_off_nothing_is_said_of_their_start(
    tokens: int, is_cut_off: bool
) -> None:
    """Streams that had no time to begin as in a study would show a difference that is none."""
    settings = with_workload(STUDY, output_tokens=Lengths.fixed(tokens))
    found = predict(settings, PP8, seeds=1)
    assert found.is_cut_off is is_cut_off
    assert (found.rungs[-1].together is None) is is_cut_off
    assert ("is_cut_off" in prediction_document(found)) is is_cut_off


def test_a_burst_runs_to_its_end_whatever_it_costs() -> None:
    lengths = Lengths("uniform", 50, 400)
    settings = with_workload(STUDY, protocol=LoadProtocol.BURST, output_tokens=lengths)
    estimator = Estimator(settings, study_profile(settings))
    jobs = [
        make_job(
            settings,
            estimator,
            planned(settings, PP8),
            6,
            0,
            Effort(1.0, most_work, LoadStart.TOGETHER),
        )
        for most_work in (1.0, 1e9)
    ]
    assert not any(each.is_cut_off for each in jobs)
    cheap, dear = map(run_job, jobs)
    assert cheap == dear
    whole = job(with_workload(settings, protocol=LoadProtocol.CLOSED_LOOP), PP8, 6)
    assert cheap.output_throughput < run_job(whole).output_throughput, "the tail counts"


def test_windows_last_some_lifetimes_and_end_with_a_period() -> None:
    settings = with_workload(STUDY, output_tokens=Lengths.fixed(60))
    plan = job(settings, PP8, 6).plan
    rung = estimate(settings, PP8).rungs[1]
    life_s = rung.ttft_s + 60 * rung.tpot_s
    assert plan.min_window_s == pytest.approx(EFFORT.lives * life_s)
    assert plan.max_window_s > plan.min_window_s + life_s


def test_limits_are_judged_at_their_percentile() -> None:
    limits = [(SloLimit("tpot_s", "p99", limit),) for limit in (1e-6, 100.0)]
    found = [predict(replace(STUDY, slo=slo), PP8, 1).rungs[1].misses_slo for slo in limits]
    assert found == [True, False]


@pytest.mark.parametrize(
    ("params", "kind", "words"),
    [
        ({"tp_size": 16}, RefusalKind.GPUS, "16 GPUs"),
        ({"tp_size": 1}, RefusalKind.MEMORY, "out of memory"),
        ({"tp_size": 3}, RefusalKind.HEADS, "does not divide"),
        ({"tp_size": 8, "ep_size": 3}, RefusalKind.EXPERTS, "must be a multiple of ep_size 3"),
        ({"pp_size": 8, "attention_backend": "fa3"}, RefusalKind.BACKEND, "fa3"),
        ({"pp_size": 8, "speculative_algorithm": "EAGLE"}, RefusalKind.VERSION, "speculative"),
        ({"pp_size": 8, "moe_dp_size": 2}, RefusalKind.VERSION, "moe_dp_size"),
        ({"pp_size": 8, "cuda_graph_backend_prefill": "foo"}, RefusalKind.VERSION, "one of break"),
        (
            {"pp_size": 8, "cuda_graph": True, "cuda_graph_backend_decode": "full"},
            RefusalKind.VERSION,
            "are the same flag: give one of them",
        ),
        ({"tp_size": 8, "chunked_prefill_size": 100, "page_size": 64}, RefusalKind.VERSION, "64"),
    ],
)
def test_what_cannot_run_says_why(params: Params, kind: RefusalKind, words: str) -> None:
    found = refusal(STUDY, params)
    assert found.kind is kind
    assert words in found.text
    prediction = predict(STUDY, params, 1)
    assert prediction.refused == found.text
    assert prediction_document(prediction)["rungs"] == []


def test_a_cap_beyond_what_the_kv_cache_allows_is_refused() -> None:
    settings = replace(STUDY, engine=replace(STUDY.engine, args={"max_total_tokens": 20}))
    found = refusal(settings, {"pp_size": 8, CAP: 8})
    assert found.kind is RefusalKind.MEMORY
    assert "out of the valid range [1, 1]: the KV cache of 20 tokens" in found.text
    assert predict(settings, {"pp_size": 8, CAP: 8}, 1).refused == found.text


def test_a_study_without_a_profile_is_told_which_there_are() -> None:
    settings = replace(STUDY, engine=replace(STUDY.engine, kind=EngineKind.SGLANG, profile=None))
    with pytest.raises(ConfigError, match=r"engine\.profile: missing.*h200-llama-3\.1-8b"):
        predict(settings, PP8, 1)


def test_params_are_read_like_a_study_file() -> None:
    text = "pp_size=8, tp_size=1,cuda_graph=false,attention_backend=triton,mem_fraction_static=1"
    with pytest.raises(ConfigError, match="mem_fraction_static: found 1"):
        parse_params(STUDY, text)
    assert parse_params(STUDY, text.replace("static=1", "static=0.5")) == {
        "pp_size": 8,
        "tp_size": 1,
        "cuda_graph": False,
        "attention_backend": "triton",
        "mem_fraction_static": 0.5,
    }


def test_a_partition_has_commas_of_its_own() -> None:
    params = parse_params(STUDY, "pp_size=8,pp_layer_partition=8,8,8,8,8,7,7,7,tp_size=1")
    assert params == {"pp_size": 8, "pp_layer_partition": "8,8,8,8,8,7,7,7", "tp_size": 1}
    even, given = (planned(STUDY, each) for each in ({"pp_size": 8}, params))
    assert even.shape.pp_layer_partition is None
    assert given.shape.pp_layer_partition == (8, 8, 8, 8, 8, 7, 7, 7)
    assert refusal(STUDY, {**params, "pp_size": 4, "tp_size": 2}).kind is RefusalKind.LAYERS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pp_sze=8", "did you mean 'pp_size'"),
        ("banana=8", "the study has"),
        ("tp=8", "is written 'tp_size'"),
        ("port=8", "is set by this program"),
        ("pp_size=eight", "found the text 'eight', expected a whole number, 1 or more"),
        ("pp_size=[8]", "expected a whole number, 1 or more"),
        ("pp_size=0", "1 or more"),
        ("pp_size=8,pp_size=4", "given twice"),
        ("pp_size", "expected name=value"),
        ("pp_size=8,", "expected name=value"),
        ("", "expected name=value"),
        ("=8", "expected name=value"),
        ("pp_size=", "found nothing"),
    ],
)
def test_wrong_params_are_one_clear_message(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match="--params") as caught:
        parse_params(STUDY, text)
    assert words in str(caught.value)


def test_laws_of_lengths_in_numbers() -> None:
    uniform = length_facts(Lengths("uniform", 64, 192))
    assert (uniform.mean, uniform.longest) == (128, 192)
    assert uniform.cv == pytest.approx(0.29, abs=0.01)
    assert length_facts(Lengths.fixed(7)).cv == 0
    assert length_facts(Lengths("recorded", values=(1, 3))).mean == 2
    normal = length_facts(Lengths("normal", 100, 10))
    assert normal.mean == pytest.approx(100, abs=1)
    assert normal.cv == pytest.approx(0.1, abs=0.01)


def test_depth_alone_changes_nothing_where_no_pipeline_is() -> None:
    assert estimate(STUDY, {"tp_size": 8, DEPTH: 8}) == estimate(STUDY, {"tp_size": 8})
