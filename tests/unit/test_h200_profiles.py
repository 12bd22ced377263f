"""The H200 profiles: as fast and as thirsty as measured, and the terms that make them so."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from runner.forecast.predict import predict
from runner.machine.graphs import Launching
from runner.machine.hardware import Profile
from runner.machine.profile import load_profile
from runner.machine.shape import ServerShape, shape_of
from runner.machine.stage import StageModel, clock_share, local_watts
from runner.pipeline import Pipeline, PipelineRequest
from runner.settings import Direction, Objective
from runner.trial import Params
from tests.bench import h200
from tests.bench.h200 import Point, Row, mean_error
from tests.samples import make_settings

LLAMA = h200.quiet_profile("llama")
MOE = h200.quiet_profile("moe")
MODELS = ("llama", "moe")


@cache
def rows() -> tuple[Row, ...]:
    return tuple(h200.rows())


def modelled(quantity: str) -> dict[tuple[str, int], float]:
    return {(row.server, row.users): row.modelled for row in rows() if row.quantity == quantity}


@pytest.mark.parametrize(
    ("quantity", "most"),
    [
        ("output_tok_s", 0.06),
        ("decode_tok_s", 0.06),
        ("tpot_p50_ms", 0.06),
        ("watts", 0.06),
        ("ttft_p50_ms", 0.25),
        ("sm_clock_mhz", 0.02),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_the_mean_error_over_all_measured_points(model: str, quantity: str, most: float) -> None:
    assert mean_error(rows(), model, quantity) <= most


@pytest.mark.parametrize("model", MODELS)
def test_servers_with_graphs_are_modelled_closely(model: str) -> None:
    graphs = [row for row in rows() if row.server.endswith("-graph")]
    for quantity in ("output_tok_s", "decode_tok_s", "itl_p50_ms"):
        assert mean_error(graphs, model, quantity) <= 0.03


def test_without_graphs_every_point_is_slower_and_draws_less() -> None:
    speed, watts = modelled("output_tok_s"), modelled("watts")
    eager = [key for key in speed if key[0].endswith("-eager")]
    assert len(eager) > 15
    for server, users in eager:
        twin = (server.replace("-eager", "-graph"), users)
        if twin in speed:
            assert speed[server, users] < speed[twin]
            assert watts[server, users] < watts[twin]


def test_torch_native_is_the_slowest() -> None:
    speed = modelled("output_tok_s")
    for users in (1, 8, 16):
        slowest = speed["llama-torch_native", users]
        others = [value for (server, n), value in speed.items() if n == users and "llama" in server]
        assert slowest == min(others)


@pytest.mark.parametrize("quantity", ["output_tok_s", "tpot_p50_ms"])
def test_more_users_are_faster_together_and_slower_each(quantity: str) -> None:
    values = modelled(quantity)
    for server in {server for server, _ in values}:
        users = sorted(count for name, count in values if name == server)
        in_order = [values[server, count] for count in users]
        assert all(few < many for few, many in pairwise(in_order)), server


def test_watts_lie_between_idle_and_the_limit() -> None:
    for watts in modelled("watts").values():
        assert LLAMA.gpu.server_idle_w < watts < LLAMA.gpu.power_limit_w


def test_starts_take_about_as_long_as_measured() -> None:
    totals = [row for row in h200.start_rows() if row.quantity == "start total"]
    assert {row.server for row in totals} >= {"llama-triton-graph", "moe-flashinfer-graph"}
    for row in totals:
        assert abs(row.error) < 0.15, row


@pytest.mark.parametrize(
    ("backend", "running", "tokens_per_s", "tpot_s"),
    [("triton", 128, 2131.0, 0.0589), ("fa3", 128, 1916.0, 0.0687), ("fa3", 64, 982.0, 0.0622)],
)
def test_decode_without_graphs_is_as_fast_as_measured(
    backend: str, running: int, tokens_per_s: float, tpot_s: float
) -> None:
    """128 streams of 256 + 128 tokens; prefills keep their graphs (docs/results/h200-x1.md)."""
    params: Params = {
        "cuda_graph": False,
        "attention_backend": backend,
        "max_running_requests": running,
    }
    study = make_settings(objectives=(Objective("output_throughput", 128, Direction.MAXIMIZE),))
    load = replace(study.workload, concurrency=(128,))
    one = replace(study.hardware, gpus=1)
    engine = replace(study.engine, profile="h200-qwen3-30b-a3b")
    study = replace(study, engine=engine, hardware=one, workload=load)
    (rung,) = predict(study, params, seeds=1).rungs
    assert rung.output_throughput == pytest.approx(tokens_per_s, rel=0.1)
    assert rung.tpot_s == pytest.approx(tpot_s, rel=0.1)


def test_both_profiles_describe_one_gpu() -> None:
    assert replace(MOE.gpu, flop_per_s=0.0) == replace(LLAMA.gpu, flop_per_s=0.0)


@pytest.mark.parametrize(("profile", "tokens_per_s"), [(LLAMA, 44_000), (MOE, 72_000)])
def test_prefill_runs_at_the_power_limit_and_a_lower_clock(
    profile: Profile, tokens_per_s: float
) -> None:
    stages = StageModel(profile, ServerShape())
    prefill = stages.cost(8192, 32, Launching.GRAPH)
    assert 8192 / prefill.gpu_s[0] == pytest.approx(tokens_per_s, rel=0.03)
    assert prefill.busy_w == profile.gpu.power_limit_w
    assert 1400 < prefill.clock * profile.gpu.sm_clock_mhz < 1800
    decode = stages.cost(8, 8, Launching.GRAPH)
    assert decode.clock == 1.0
    assert decode.busy_w < prefill.busy_w


def test_the_clock_falls_until_the_power_limit_is_kept() -> None:
    gpu = LLAMA.gpu
    limit = gpu.power_limit_w
    assert clock_share(gpu, limit) == 1.0
    share = clock_share(gpu, 1000.0)
    beyond_idle_w = (1000.0 - gpu.server_idle_w) * share**gpu.clock_exponent
    assert beyond_idle_w == pytest.approx(limit - gpu.server_idle_w)
    assert clock_share(replace(gpu, clock_exponent=0.0), 1000.0) == 1.0


def test_tails_draw_what_the_profile_says() -> None:
    gpu = LLAMA.gpu
    assert gpu.tail_w is not None
    assert local_watts(gpu, 0.0, 1.0) == pytest.approx(gpu.tail_w)
    assert local_watts(gpu, 0.0, 0.0) == gpu.memory_bound_w
    assert local_watts(replace(gpu, tail_w=None), 0.0, 1.0) == gpu.memory_bound_w


def test_sequences_cost_time_of_their_own() -> None:
    triton = StageModel(LLAMA, ServerShape()).cost(64, 64, Launching.GRAPH)
    flashinfer = StageModel(LLAMA, ServerShape(attention_backend="flashinfer"))
    extra_s = flashinfer.cost(64, 64, Launching.GRAPH).gpu_s[0] - triton.gpu_s[0]
    assert extra_s == pytest.approx(64 * LLAMA.backends["flashinfer"].sequence_s)


def first_token_s(profile: Profile, shape: ServerShape) -> float:
    pipeline = Pipeline(profile, shape, seed=0)
    pipeline.submit(PipelineRequest("one", 256, 8), 0.0)
    token, *_ = pipeline.step().tokens
    return token.time_s


def test_a_first_token_waits_for_the_launch_of_the_next_batch() -> None:
    host = LLAMA.host
    eager = shape_of({"disable_cuda_graph": True, "attention_backend": "triton"})
    launch_s = host.schedule_s + 32 * host.eager_layer_s
    results_s = 2 * (host.result_s + host.result_request_s)
    expected = host.accept_s + host.http_s + 2 * launch_s + results_s
    assert first_token_s(LLAMA, eager) == pytest.approx(expected)
    one_after_another = replace(LLAMA, host=replace(host, is_overlapped=False))
    assert first_token_s(one_after_another, eager) < expected - 0.9 * launch_s


def test_launches_hide_behind_the_gpu() -> None:
    pipeline = Pipeline(LLAMA, ServerShape(), seed=0)
    pipeline.submit(PipelineRequest("one", 1000, 5), 0.0)
    times_s = [token.time_s for _ in range(5) for token in pipeline.step().tokens]
    stages = StageModel(LLAMA, ServerShape())
    step_s = stages.cost(1, 1, Launching.GRAPH).gpu_s[0] + 1002 * stages.kv_s[0]
    assert times_s[2] - times_s[1] == pytest.approx(step_s)


def test_a_burst_trickles_in() -> None:
    pipeline = Pipeline(LLAMA, ServerShape(), seed=0)
    for name in ("a", "b", "c"):
        pipeline.submit(PipelineRequest(name, 256, 4), 0.0)
    batches = [pipeline.step().batches[0] for _ in range(2)]
    assert [batch.new_seqs for batch in batches] == [1, 2]
    assert pipeline.running == 3


def test_the_loss_of_clock_reaches_the_activity() -> None:
    point = Point("llama-triton-graph", 32, 1, first_wave_cached=False, lead_s=0.0, measured={})
    clock_mhz = h200.simulate(LLAMA, point)["sm_clock_mhz"]
    assert 1850 < clock_mhz < 1975
    pipeline = Pipeline(load_profile("cpu-blocking-pp2"), ServerShape(), seed=0)
    pipeline.submit(PipelineRequest("one", 64, 4), 0.0)
    while pipeline.next_step_s() is not None:
        pipeline.step()
    assert pipeline.gpu_activity(10.0)[0].slow_s == 0.0


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_overlapped_steps_go_forward_in_time(cuda_graph: bool) -> None:
    pipeline = Pipeline(load_profile("h200-qwen3-30b-a3b"), ServerShape(cuda_graph=cuda_graph), 1)
    sent_s = {str(i): 0.017 * i * (i % 5) for i in range(40)}
    for name, now_s in sent_s.items():
        pipeline.submit(PipelineRequest(name, 40 + 97 * int(name), 1 + int(name) % 7), now_s)
    before, seen_s, last_s = pipeline.gpu_activity(0.0)[0], 0.0, 0.0
    while (now_s := pipeline.next_step_s() or -1.0) >= 0.0:
        after = pipeline.gpu_activity(now_s)[0]
        assert before.busy_s <= after.busy_s <= now_s
        most_j = (now_s - seen_s) * MOE.gpu.power_limit_w
        assert 0.0 <= after.energy_j - before.energy_j <= most_j + 1e-6
        before, seen_s = after, now_s
        for token in pipeline.step().tokens:
            assert token.time_s >= max(last_s, sent_s[token.request_id] + MOE.host.http_s)
            last_s = token.time_s
    assert pipeline.is_idle
