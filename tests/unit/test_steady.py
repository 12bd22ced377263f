"""The closed form: the rules of slots and stages, and that it agrees with the simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runner.machine.graphs import Launching
from runner.machine.profile import load_profile
from runner.machine.shape import ServerShape
from runner.machine.stage import StageModel
from runner.machine.steady import SteadyLoad, SteadyModel, SteadyState
from runner.trial import LoadProtocol

KIMI = load_profile("rtx-pro-6000-x8-kimi-k2.6")
LLAMA = load_profile("h200-llama-3.1-8b")
DENSE = replace(
    KIMI,
    model=replace(KIMI.model, experts=0, experts_per_token=0, expert_bytes=0.0, shared_bytes=9e9),
    memory=replace(KIMI.memory, activation_bytes=0),
)
CPU = load_profile("cpu-blocking-pp2")
PP8 = ServerShape(pp_size=8, max_running_requests=64)


def load(concurrency: int, **changes: object) -> SteadyLoad:
    given = SteadyLoad(LoadProtocol.BURST, concurrency, prompt_tokens=64, output_tokens=2000)
    return replace(given, **changes)  # type: ignore[arg-type] # any field of SteadyLoad


def state(cap: int | None, concurrency: int = 32, shape: ServerShape = PP8) -> SteadyState:
    return SteadyModel(KIMI, shape).state(cap, load(concurrency))


def test_more_slots_than_the_cap_leaves_filled_keep_stages_idle() -> None:
    found = [state(cap) for cap in (64, 8, 4)]
    assert [round(each.slots) for each in found] == [2, 5, 8]
    rates = [each.output_throughput for each in found]
    assert rates == sorted(rates)
    assert found[0].busy_stages < 0.25 * 8 < 0.75 * 8 < found[2].busy_stages


def test_an_underfilled_pipeline_takes_one_way_through_all_stages() -> None:
    stages = StageModel(KIMI, PP8)
    cost = stages.cost(1, 1, Launching.GRAPH)
    found = state(1, concurrency=1)
    path_s = sum(cost.gpu_s) + 8 * KIMI.link.hop_s
    assert path_s < found.tpot_s < 1.2 * path_s
    assert found.busy_stages == pytest.approx(sum(cost.gpu_s) / found.tpot_s, rel=0.05)


def test_a_full_pipeline_gives_a_batch_every_slowest_stage() -> None:
    shape = replace(PP8, pp_async_batch_depth=8, max_running_requests=512)
    found = SteadyModel(KIMI, shape).state(32, load(512))
    stages = StageModel(KIMI, shape)
    stage_s = max(stages.cost(32, 32, Launching.GRAPH).gpu_s) + 32 * 1064 * max(stages.kv_s)
    assert found.output_throughput == pytest.approx(32 / stage_s, rel=0.1)


def test_requests_beyond_slots_times_cap_wait() -> None:
    found = state(2, concurrency=32)
    assert found.in_flight == 16
    assert found.ttft_s > 10 * state(4, concurrency=32).ttft_s
    deep = replace(PP8, pp_async_batch_depth=8)
    assert state(2, concurrency=32, shape=deep).in_flight == 32


def test_rows_and_kv_cache_limit_what_is_in_flight() -> None:
    assert state(64, shape=replace(PP8, max_running_requests=10)).in_flight == 10
    assert state(64, shape=replace(PP8, max_total_tokens=3 * 2064)).in_flight == 3


def test_small_batches_cost_dense_stages_their_throughput_and_experts_less() -> None:
    """Weights are read once a batch; of experts, only those that its tokens hit."""

    def gain(profile_of: SteadyModel) -> float:
        large, small = (profile_of.state(cap, load(64)) for cap in (8, 1))
        return large.output_throughput / small.output_throughput

    shape = replace(PP8, pp_async_batch_depth=0)
    assert gain(SteadyModel(DENSE, shape)) > 1.5 * gain(SteadyModel(KIMI, shape))


def test_without_stages_a_step_takes_the_slower_of_gpu_and_cpu() -> None:
    graph = SteadyModel(LLAMA, ServerShape()).state(None, load(1))
    shape = ServerShape(cuda_graph=False, attention_backend="triton")
    eager = SteadyModel(LLAMA, shape).state(None, load(1))
    launches_s = LLAMA.host.eager_layer_s * LLAMA.model.layers
    assert graph.tpot_s < launches_s < eager.tpot_s
    assert eager.busy_stages < graph.busy_stages <= 1.0


def test_wider_tensor_parallelism_reads_less_and_joins_more() -> None:
    narrow = SteadyModel(KIMI, ServerShape(tp_size=4, pp_size=2)).state(64, load(1))
    wide = SteadyModel(KIMI, ServerShape(tp_size=8)).state(None, load(1))
    assert wide.tpot_s > narrow.tpot_s, "PCIe: every ring step costs more than it saves"
    assert wide.slots == 1.0


def test_eager_launches_ship_results_late_with_depth() -> None:
    shape = ServerShape(tp_size=4, pp_size=2, cuda_graph=False, max_running_requests=64)
    plain = SteadyModel(KIMI, shape).state(4, load(8))
    deep = SteadyModel(KIMI, replace(shape, pp_async_batch_depth=8)).state(4, load(8))
    assert deep.output_throughput < 0.9 * plain.output_throughput


def test_a_blocking_host_adds_its_time_to_the_gpus() -> None:
    shape = ServerShape(pp_size=2, max_running_requests=16)
    found = SteadyModel(CPU, shape).state(4, load(8))
    free = replace(CPU, host=replace(CPU.host, is_blocking=False))
    assert found.tpot_s > SteadyModel(free, shape).state(4, load(8)).tpot_s


def test_uneven_lengths_prefill_one_by_one_and_lose_throughput() -> None:
    model = SteadyModel(KIMI, PP8)
    even = model.state(4, load(32, protocol=LoadProtocol.CLOSED_LOOP, output_tokens=128))
    uneven = model.state(
        4, load(32, protocol=LoadProtocol.CLOSED_LOOP, output_tokens=128, output_cv=0.3)
    )
    assert uneven.output_throughput < 0.95 * even.output_throughput


def test_the_longest_requests_of_a_burst_end_alone() -> None:
    model = SteadyModel(KIMI, PP8)
    even, uneven = (
        model.state(4, load(32, output_tokens=128, longest_output_tokens=longest))
        for longest in (0, 192)
    )
    assert uneven.output_throughput < even.output_throughput
    assert uneven.busy_stages < even.busy_stages


def test_the_last_wave_of_a_burst_is_smaller() -> None:
    model = SteadyModel(KIMI, PP8)
    waves = model.state(1, load(16))
    more = model.state(1, load(17))
    assert more.output_throughput < waves.output_throughput
    assert more.output_throughput > 17 / 24 * waves.output_throughput, "its requests run alone"


def test_an_open_loop_is_served_at_its_rate_or_saturates() -> None:
    model = SteadyModel(KIMI, ServerShape(tp_size=8))
    given = SteadyLoad(LoadProtocol.OPEN_LOOP, 1, 64, 128, rate=1.0)
    slow, fast = model.state(None, given), model.state(None, replace(given, rate=1000.0))
    assert slow.output_throughput == 128.0
    assert slow.power_w < fast.power_w
    assert fast.output_throughput < 128_000
    assert fast.in_flight == 64
