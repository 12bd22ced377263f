"""The event loop: admission as a real server shows it, times as the closed form has them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.machine.profile import load_profile
from runner.pipeline import (
    BatchReport,
    Pipeline,
    PipelineRequest,
    Profile,
    ServerShape,
    Token,
    slots,
)

CPU = load_profile("cpu-blocking-pp2")
RTX = load_profile("rtx-pro-6000-x8-kimi-k2.6")
STEP_S = 0.015  # a decode step of 32 requests of the MoE on one H200, about
SHAPE = ServerShape(pp_size=2, pp_async_batch_depth=2, max_running_requests=16)


@dataclass(frozen=True)
class Ran:
    """What came out of a pipeline that ran to its end."""

    tokens: tuple[Token, ...]
    batches: tuple[BatchReport, ...]
    slot_of: dict[str, set[int]]

    @property
    def end_s(self) -> float:
        return self.tokens[-1].time_s


def run(pipeline: Pipeline) -> Ran:
    tokens: list[Token] = []
    batches: list[BatchReport] = []
    slot_of: dict[str, set[int]] = {}
    while pipeline.next_step_s() is not None:
        step = pipeline.step()
        tokens += step.tokens
        batches += step.batches
        for token in step.tokens:
            slot_of.setdefault(token.request_id, set()).add(step.batches[0].slot)
    assert pipeline.is_idle
    return Ran(tuple(tokens), tuple(batches), slot_of)


def submit(pipeline: Pipeline, count: int, now_s: float = 0.0, **lengths: int) -> None:
    tokens = {"prompt_tokens": 16, "output_tokens": 24, **lengths}
    for _ in range(count):
        name = f"r{pipeline.running + pipeline.queued:04d}"
        pipeline.submit(PipelineRequest(name, **tokens), now_s)


def log_of(batch: BatchReport) -> str:
    if batch.is_prefill:
        return f"P{batch.new_seqs}/r{batch.running}/q{batch.queue}"
    return f"D{batch.running}/q{batch.queue}"


def burst_throughput(
    profile: Profile, shape: ServerShape, count: int, output_tokens: int = 100
) -> float:
    pipeline = Pipeline(profile, shape, seed=1)
    submit(pipeline, count, prompt_tokens=1, output_tokens=output_tokens)
    ran = run(pipeline)
    return len(ran.tokens) / ran.end_s


@pytest.mark.parametrize(
    ("cap", "count", "expected"),
    [
        (8, 8, "P1/r0/q0 P7/r0/q0 D1/q0 D7/q0 D1/q0 D7/q0"),
        (4, 8, "P1/r0/q0 P4/r0/q0 P3/r0/q0 D1/q0 D4/q0 D3/q0 D1/q0 D4/q0 D3/q0"),
        (2, 8, "P1/r0/q1 P2/r0/q0 P2/r0/q0 P2/r0/q0 P1/r1/q0 D2/q0 D2/q0 D2/q0"),
        (1, 8, "P1/r0/q4 P1/r0/q4 P1/r0/q4 P1/r0/q4 D1/q4 D1/q4 D1/q4"),
        (4, 12, "P1/r0/q0 P4/r0/q0 P4/r0/q0 P3/r0/q0 D1/q0 D4/q0 D4/q0 D3/q0"),
    ],
)
def test_a_burst_fills_the_slots_as_on_a_real_server(cap: int, count: int, expected: str) -> None:
    """Recorded from SGLang 0.5.23, pp 2, depth 2: the first request is launched alone."""
    pipeline = Pipeline(CPU, SHAPE, seed=1)
    pipeline.set_cap(cap)
    submit(pipeline, 1)
    pipeline.step()
    next_s = pipeline.next_step_s()
    assert next_s is not None
    submit(pipeline, count - 1, next_s)
    logged = " ".join(log_of(batch) for batch in run(pipeline).batches)
    assert logged.startswith(expected + " ")


def test_a_request_refused_for_want_of_rows_keeps_its_slot_closed() -> None:
    """A slot refused because others held the rows opens when one of its own requests ends."""
    pipeline = Pipeline(CPU, replace(SHAPE, max_running_requests=4), seed=1)
    pipeline.set_cap(4)
    lengths = {"long": 40, "short": 8, "other": 40, "third": 40, "late": 4}
    for name, tokens in lengths.items():
        pipeline.submit(PipelineRequest(name, 16, tokens), 0.0)
    ran = run(pipeline)
    assert ran.slot_of["late"] == ran.slot_of["short"]


def test_a_live_cap_leaves_the_members_of_a_slot() -> None:
    pipeline = Pipeline(CPU, SHAPE, seed=1)
    submit(pipeline, 8, output_tokens=50)
    for _ in range(6):
        pipeline.step()
    pipeline.set_cap(2)
    decodes = [batch.running for batch in run(pipeline).batches if not batch.is_prefill]
    assert decodes[0] == 8


def test_a_long_prompt_is_prefilled_in_consecutive_slots() -> None:
    shape = replace(SHAPE, chunked_prefill_size=16)
    pipeline = Pipeline(CPU, shape, seed=1)
    pipeline.submit(PipelineRequest("long", prompt_tokens=40, output_tokens=3), 0.0)
    ran = run(pipeline)
    prefills = [(batch.slot, batch.new_tokens) for batch in ran.batches if batch.is_prefill]
    assert prefills == [(0, 16), (1, 16), (2, 8)]
    assert ran.slot_of["long"] == {2}
    assert [token.completion_tokens for token in ran.tokens] == [1, 2, 3]


def test_cached_tokens_are_not_prefilled() -> None:
    pipeline = Pipeline(CPU, SHAPE, seed=1)
    pipeline.submit(PipelineRequest("warm", 100, 2, cached_tokens=60), 0.0)
    assert run(pipeline).batches[0].new_tokens == 40


def test_a_request_larger_than_the_kv_cache_runs_alone() -> None:
    pipeline = Pipeline(CPU, replace(SHAPE, max_total_tokens=100), seed=1)
    pipeline.submit(PipelineRequest("huge", 90, 90), 0.0)
    pipeline.submit(PipelineRequest("next", 10, 10), 0.0)
    ran = run(pipeline)
    assert [token.request_id for token in ran.tokens] == ["huge"] * 90 + ["next"] * 10


def crowded() -> Pipeline:
    """Two slots, each of which sees room for its own two requests of 10 + 40 tokens only."""
    shape = replace(SHAPE, pp_async_batch_depth=0, max_total_tokens=130, max_running_requests=4)
    pipeline = Pipeline(CPU, shape, seed=1)
    for name in ("a", "b", "c", "d"):
        pipeline.submit(PipelineRequest(name, 10, 40), 0.0)
    pipeline.set_cap(2)
    return pipeline


def test_slots_that_overlook_each_other_retract_requests() -> None:
    pipeline = crowded()
    ran = run(pipeline)
    assert pipeline.retractions > 0
    assert Counter(token.request_id for token in ran.tokens) == dict.fromkeys("abcd", 40)
    again = [batch.new_tokens for batch in ran.batches if batch.is_prefill][2:]
    assert all(tokens > 10 for tokens in again), "what was produced is prefilled again"
    assert max(batch.tokens_used for batch in ran.batches) <= 130


def test_one_slot_retracts_nothing_because_it_keeps_room_for_its_own() -> None:
    shape = replace(SHAPE, pp_size=1, max_total_tokens=130, max_running_requests=4)
    pipeline = Pipeline(CPU, shape, seed=1)
    for name in ("a", "b", "c", "d"):
        pipeline.submit(PipelineRequest(name, 10, 40), 0.0)
    ran = run(pipeline)
    assert pipeline.retractions == 0
    assert max(batch.running for batch in ran.batches) == 2


def test_the_request_with_the_fewest_tokens_is_retracted() -> None:
    pipeline = crowded()
    last_seen: dict[str, int] = {}
    while pipeline.retractions == 0:
        for token in pipeline.step().tokens:
            last_seen[token.request_id] = token.completion_tokens
    waiting = set(last_seen) - {t.request_id for _ in range(4) for t in pipeline.step().tokens}
    assert waiting
    assert all(last_seen[name] == min(last_seen.values()) for name in waiting)


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(30, 140), st.sampled_from((4, 16, 1000)))
def test_aborts_and_retractions_leave_nothing_behind(
    draws: random.Random, kv_tokens: int, chunk: int
) -> None:
    shape = replace(
        SHAPE, max_total_tokens=kv_tokens, max_running_requests=4, chunked_prefill_size=chunk
    )
    pipeline = Pipeline(CPU, shape, seed=1)
    scheduler = pipeline._scheduler  # noqa: SLF001 - what nobody outside sees
    names = [f"r{number}" for number in range(7)]
    for name in names:
        tokens = draws.randint(1, kv_tokens // 2 - 2)
        request = PipelineRequest(name, tokens, draws.randint(1, kv_tokens // 2 - 1))
        pipeline.submit(request, draws.random() * 2)
    gone: set[str] = set()
    for _ in range(20_000):
        if pipeline.next_step_s() is None:
            break
        assert not gone & {token.request_id for token in pipeline.step().tokens}
        assert scheduler.kv_used <= kv_tokens
        if draws.random() < 0.02:
            name = draws.choice(names)
            if pipeline.abort(name):
                assert name not in gone
                gone.add(name)
    assert pipeline.is_idle
    left = (scheduler.rows, scheduler.kv_used, scheduler._kv_coming, scheduler._aborted)  # noqa: SLF001
    assert left == (0, 0, 0, 0)


def test_abort_takes_out_waiting_and_running_requests() -> None:
    pipeline = Pipeline(CPU, replace(SHAPE, max_running_requests=2), seed=1)
    for name in ("one", "two", "waits"):
        pipeline.submit(PipelineRequest(name, 16, 20), 0.0)
    pipeline.submit(PipelineRequest("future", 16, 20), 1000.0)
    for _ in range(8):
        pipeline.step()
    assert [pipeline.abort(name) for name in ("one", "waits", "future")] == [True] * 3
    assert pipeline.abort("one") is False
    assert pipeline.abort("never heard of") is False
    assert {token.request_id for token in run(pipeline).tokens} == {"two"}
    assert pipeline.running == 0


def test_an_aborted_chunk_frees_its_row() -> None:
    pipeline = Pipeline(CPU, replace(SHAPE, chunked_prefill_size=16), seed=1)
    pipeline.submit(PipelineRequest("long", 200, 5), 0.0)
    pipeline.step()
    assert pipeline.abort("long")
    assert run(pipeline).tokens == ()
    assert pipeline.running == 0


def test_abort_all_empties_the_server() -> None:
    pipeline = Pipeline(CPU, replace(SHAPE, chunked_prefill_size=24), seed=1)
    submit(pipeline, 20)
    for _ in range(5):
        pipeline.step()
    pipeline.abort_all()
    assert run(pipeline).tokens == ()


def test_an_idle_server_sleeps_until_the_next_arrival() -> None:
    pipeline = Pipeline(CPU, SHAPE, seed=1, start_s=5.0)
    assert pipeline.next_step_s() is None
    assert pipeline.step() == ((), ())
    submit(pipeline, 1, now_s=80.0)
    assert pipeline.next_step_s() == 80.0


def test_requests_are_taken_in_the_order_of_their_arrival() -> None:
    pipeline = Pipeline(CPU, replace(SHAPE, max_running_requests=2), seed=1)
    for name, now_s in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        pipeline.submit(PipelineRequest(name, 16, 2), now_s)
    firsts = [t.request_id for t in run(pipeline).tokens if t.completion_tokens == 1]
    assert firsts == ["a", "b", "c"]


# A machine whose numbers are round: 8 stages of one layer, nothing but the terms of the closed
# form. CPU time per iteration is split evenly between scheduling, launch and result.
def plain(
    fixed_s: float, expert_s: float, cpu_s: float = 0.6e-3, hop_s: float = 0.05e-3
) -> Profile:
    gpu = replace(RTX.gpu, memory_bytes=10**14, bandwidth_bytes_per_s=1e12)
    model = replace(
        RTX.model,
        layers=8,
        shared_bytes=fixed_s * 1e12,
        expert_bytes=expert_s * 1e12,
        experts=384 if expert_s else 0,
        head_bytes=0.0,
        routing_overlap=0.0,
        flop_per_token=0.0,
        kv_bytes_per_token_layer=1e-6,
    )
    third_s = cpu_s / 3
    host = replace(
        RTX.host,
        schedule_s=third_s,
        graph_launch_s=third_s,
        result_s=third_s,
        result_request_s=0.0,
        empty_slot_s=0.1e-3,
        message_s=0.02e-3,
    )
    return replace(
        RTX,
        gpu=gpu,
        model=model,
        host=host,
        link=replace(RTX.link, hop_s=hop_s),
        kernels=replace(RTX.kernels, layer_s=0.0, batch_s=0.0),
        noise=replace(RTX.noise, stage=0.0, run=0.0),
    )


def pp8(cap: int, depth: int = 0, running: int = 512) -> ServerShape:
    return ServerShape(
        pp_size=8,
        pp_async_batch_depth=depth,
        pp_max_micro_batch_size=cap,
        max_running_requests=running,
    )


def test_one_request_takes_one_round_per_token() -> None:
    pipeline = Pipeline(plain(3e-3, 0.0), pp8(8), seed=1)
    pipeline.submit(PipelineRequest("only", 1, 50), 0.0)
    ran = run(pipeline)
    rounds_s = [b.time_s - a.time_s for a, b in zip(ran.tokens[1:-1], ran.tokens[2:], strict=True)]
    # 8 stages and 8 hops (the last one back to rank 0), and rank 0's own CPU work.
    assert rounds_s == pytest.approx([8 * 3.05e-3 + 0.6e-3] * len(rounds_s))


@pytest.mark.parametrize(
    ("cap", "expected", "expected_deep"),
    [(64, 120, 120), (8, 329, 329), (4, 536, 536), (2, 406, 417), (1, 276, 286)],
)
def test_a_burst_is_as_fast_as_another_simulator_has_it(
    cap: int, expected: float, expected_deep: float
) -> None:
    """32 equal requests, 8 stages of 2.14 ms and 0.1655 ms per distinct expert."""
    profile = plain(2.14e-3, 0.1655e-3)
    speed = burst_throughput(profile, pp8(cap), 32, output_tokens=200)
    deep = burst_throughput(profile, pp8(cap, depth=8), 32, output_tokens=200)
    assert (speed, deep) == pytest.approx((expected, expected_deep), rel=0.02)


def test_depth_pays_when_more_slots_than_stages_are_filled_and_hops_are_slow() -> None:
    profile = plain(3.5e-3, 0.0, hop_s=2e-3)
    assert burst_throughput(profile, pp8(2, depth=8), 32) > 1.3 * burst_throughput(
        profile, pp8(2), 32
    )


def test_depth_costs_when_every_launch_is_slow_on_the_cpu() -> None:
    profile = plain(3.5e-3, 0.0, cpu_s=8e-3)
    assert burst_throughput(profile, pp8(4, depth=8), 32) < 0.8 * burst_throughput(
        profile, pp8(4), 32
    )


@pytest.mark.parametrize(("stages", "exchanges"), [(2, 3.34), (3, 4), (8, 4)])
def test_handing_tensors_over_costs_the_cpu_in_and_out(stages: int, exchanges: float) -> None:
    """Stages of no GPU time: a rank in the middle hands over four times a visit.

    An end does so thrice, but the first waits for the last.
    """
    profile = plain(0.01e-3, 0.0)
    busy = replace(profile, host=replace(profile.host, exchange_s=0.5e-3))
    depth = 16
    partition = (1,) * (stages - 1) + (9 - stages,)
    shape = replace(pp8(1, depth=depth), pp_size=stages, pp_layer_partition=partition)
    before, after = (burst_throughput(each, shape, stages + depth) for each in (profile, busy))
    assert 1 / after - 1 / before == pytest.approx(exchanges * 0.5e-3, rel=0.03)


@pytest.mark.parametrize(("stage_s", "exchanges"), [(3e-3, 1), (0.01e-3, 3 * 7 + 2)])
def test_one_request_waits_for_the_hand_overs_that_no_gpu_hides(
    stage_s: float, exchanges: int
) -> None:
    """They go on while GPUs work; else hidden states out and in, and the result, all around."""
    profile = plain(stage_s, 0.0)
    busy = replace(profile, host=replace(profile.host, exchange_s=0.5e-3))
    before, after = (1 / burst_throughput(each, pp8(8), 1) for each in (profile, busy))
    assert after - before == pytest.approx(exchanges * 0.5e-3, rel=0.02)


def test_without_stages_a_step_takes_as_long_as_gpu_or_cpu() -> None:
    gpu_bound, cpu_bound = plain(3e-3, 0.0), plain(3e-3, 0.0, cpu_s=60e-3)
    shape = ServerShape(max_running_requests=64)
    assert burst_throughput(gpu_bound, shape, 1) == pytest.approx(1 / (8 * 3e-3))
    # The prefill of one token has no graph: all is as before but its launch.
    prefill_s = 40e-3 + 8 * cpu_bound.host.eager_layer_s
    assert burst_throughput(cpu_bound, shape, 1) == pytest.approx(100 / (99 * 60e-3 + prefill_s))


@pytest.mark.parametrize(
    ("backend", "cuda_graph", "expected"),
    [
        ("triton", True, (206, 1568, 4999, 10876)),
        ("flashinfer", True, (207, 1512, 4945, 11193)),
        ("triton", False, (55, 439, None, 5413)),
        ("fa3", False, (76, 502, 1902, 6528)),
        ("torch_native", True, (14, 77, None, None)),
    ],
)
def test_the_h200_is_about_as_fast_as_measured(
    backend: str, cuda_graph: bool, expected: tuple[float | None, ...]
) -> None:
    profile = load_profile("h200-llama-3.1-8b")
    shape = ServerShape(attention_backend=backend, cuda_graph=cuda_graph)
    for count, measured in zip((1, 8, 32, 128), expected, strict=True):
        if measured is None:
            continue
        pipeline = Pipeline(profile, shape, seed=1)
        submit(pipeline, count, prompt_tokens=256, output_tokens=256)
        ran = run(pipeline)
        assert len(ran.tokens) / ran.end_s == pytest.approx(measured, rel=0.15)


def mean_watts(shape: ServerShape, count: int) -> float:
    pipeline = Pipeline(RTX, shape, seed=1)
    submit(pipeline, count, prompt_tokens=1, output_tokens=50)
    ran = run(pipeline)
    activity = pipeline.gpu_activity(ran.end_s)
    return sum(gpu.energy_j for gpu in activity) / ran.end_s / len(activity)


@pytest.mark.parametrize(("is_overlapped", "waited"), [(True, 2), (False, 1)])
def test_a_request_waits_for_every_batch_that_is_formed_already(
    is_overlapped: bool, waited: int
) -> None:
    """The batch that runs when it comes; overlapped, the one after that is launched already."""
    profile = load_profile("h200-qwen3-30b-a3b")
    host = replace(profile.host, is_overlapped=is_overlapped, http_s=0.0, accept_s=0.0)
    pipeline = Pipeline(replace(profile, host=host), ServerShape(), seed=1)
    submit(pipeline, 32, prompt_tokens=256, output_tokens=200)
    (batch,) = pipeline.step().batches
    while batch.is_prefill:
        (batch,) = pipeline.step().batches
    pipeline.submit(PipelineRequest("late", 256, 2), batch.time_s + 0.5 * STEP_S)
    after = [step.batches[0] for step in (pipeline.step() for _ in range(6))]
    kinds = [each.is_prefill for each in after]
    assert kinds.index(True) == waited
    assert after[0].time_s - batch.time_s > 0.5 * STEP_S  # it came while the first of them ran


def test_power_follows_how_busy_the_stages_are() -> None:
    single, half = mean_watts(pp8(8, depth=8), 1), mean_watts(pp8(8, depth=8), 32)
    tensor = mean_watts(ServerShape(tp_size=8), 32)
    assert RTX.gpu.idle_w < single < half < tensor < RTX.gpu.power_limit_w
    assert 200 < half < 310


def test_an_idle_server_draws_its_idle_power() -> None:
    pipeline = Pipeline(RTX, ServerShape(tp_size=2, pp_size=4), seed=1, start_s=100.0)
    activity = pipeline.gpu_activity(110.0)
    assert len(activity) == 8
    assert {gpu.busy_s for gpu in activity} == {0.0}
    assert {gpu.energy_j for gpu in activity} == {10 * RTX.gpu.server_idle_w}


def test_activity_counts_no_more_than_has_passed() -> None:
    pipeline = Pipeline(RTX, pp8(4), seed=1)
    submit(pipeline, 32, prompt_tokens=1, output_tokens=30)
    before = pipeline.gpu_activity(0.0)
    while (now_s := pipeline.next_step_s()) is not None:
        after = pipeline.gpu_activity(now_s)
        for old, new in zip(before, after, strict=True):
            assert old.busy_s <= new.busy_s + 1e-9
            assert new.busy_s <= now_s + 1e-9
            assert new.energy_j <= now_s * RTX.gpu.power_limit_w + 1e-9
        before = after
        pipeline.step()


@st.composite
def servers(draw: st.DrawFn) -> ServerShape:
    return ServerShape(
        pp_size=draw(st.sampled_from((1, 2))),
        pp_async_batch_depth=draw(st.integers(0, 4)),
        pp_max_micro_batch_size=draw(st.none() | st.integers(1, 6)),
        max_running_requests=draw(st.integers(1, 12)),
        chunked_prefill_size=draw(st.sampled_from((8, 32, 1000))),
        max_total_tokens=draw(st.sampled_from((64, 200, 8192))),
    )


Loads = list[tuple[float, int, int]]
loads = st.lists(
    st.tuples(st.floats(0.0, 0.05), st.integers(1, 60), st.integers(1, 12)),
    min_size=1,
    max_size=20,
)


def serve(shape: ServerShape, load: Loads, seed: int) -> tuple[Ran, int]:
    """Everything that came out, and the most rows that were ever taken."""
    pipeline = Pipeline(CPU, shape, seed)
    for index, (now_s, prompt_tokens, output_tokens) in enumerate(load):
        pipeline.submit(PipelineRequest(f"r{index}", prompt_tokens, output_tokens), now_s)
    most = 0
    tokens: list[Token] = []
    batches: list[BatchReport] = []
    slot_of: dict[str, set[int]] = {}
    last_s = 0.0
    while (start_s := pipeline.next_step_s()) is not None:
        assert start_s >= last_s
        step = pipeline.step()
        for token in step.tokens:
            assert start_s <= token.time_s
            slot_of.setdefault(token.request_id, set()).add(step.batches[0].slot)
        last_s = max((start_s, *(token.time_s for token in step.tokens)))
        tokens += step.tokens
        batches += step.batches
        most = max(most, pipeline.running)
    assert pipeline.is_idle
    return Ran(tuple(tokens), tuple(batches), slot_of), most


@settings(max_examples=60, deadline=None)
@given(servers(), loads, st.integers(0, 3))
def test_every_token_is_delivered_once_and_in_order(
    shape: ServerShape, load: Loads, seed: int
) -> None:
    ran, most = serve(shape, load, seed)
    limit = Pipeline(CPU, shape, seed).resolved.max_running_requests
    assert most <= limit
    for index, (now_s, _, output_tokens) in enumerate(load):
        mine = [token for token in ran.tokens if token.request_id == f"r{index}"]
        assert [token.completion_tokens for token in mine] == list(range(1, output_tokens + 1))
        assert [token.is_last for token in mine] == [False] * (output_tokens - 1) + [True]
        times_s = [now_s, *(token.time_s for token in mine)]
        assert all(a < b for a, b in pairwise(times_s))
    assert ran.batches[-1].tokens_used <= sum(prompt + output for _, prompt, output in load)


@settings(max_examples=60, deadline=None)
@given(servers(), loads)
def test_requests_stay_in_their_slots(shape: ServerShape, load: Loads) -> None:
    shape = replace(shape, max_total_tokens=8192)  # where nothing is retracted
    ran, _ = serve(shape, load, seed=0)
    assert all(len(homes) == 1 for homes in ran.slot_of.values())
    assert {batch.slot for batch in ran.batches} <= set(range(slots(shape)))


@settings(max_examples=60, deadline=None)
@given(servers(), loads)
def test_no_slot_holds_more_than_the_cap(shape: ServerShape, load: Loads) -> None:
    shape = replace(shape, chunked_prefill_size=100_000)
    ran, _ = serve(shape, load, seed=0)
    cap = Pipeline(CPU, shape, seed=0).resolved.pp_max_micro_batch_size
    assert max(batch.running for batch in ran.batches) <= cap


def test_the_last_chunk_of_a_prompt_enters_even_a_full_slot() -> None:
    shape = replace(SHAPE, pp_async_batch_depth=0, chunked_prefill_size=32)
    pipeline = Pipeline(CPU, replace(shape, pp_max_micro_batch_size=1), seed=1)
    pipeline.submit(PipelineRequest("long", 64, 5), 0.0)
    pipeline.submit(PipelineRequest("second", 4, 40), 0.0)
    pipeline.submit(PipelineRequest("longer", 64, 5), 0.02)
    ran = run(pipeline)
    assert max(batch.running for batch in ran.batches if not batch.is_prefill) == 2


@settings(max_examples=30, deadline=None)
@given(servers(), loads, st.integers(0, 1000))
def test_the_same_seed_gives_the_same_run(shape: ServerShape, load: Loads, seed: int) -> None:
    assert serve(shape, load, seed) == serve(shape, load, seed)


def test_another_seed_gives_another_run() -> None:
    load: Loads = [(0.0, 16, 10)]
    assert serve(SHAPE, load, 1)[0].end_s != serve(SHAPE, load, 2)[0].end_s
