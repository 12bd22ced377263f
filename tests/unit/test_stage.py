"""Stage times: physics in the right direction, and where it can be computed by hand, exactly."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.machine.graphs import Launching
from runner.machine.profile import load_profile
from runner.machine.shape import ServerShape
from runner.machine.stage import StageModel, distinct_experts, expert_imbalance

DATA = Path(__file__).parents[1] / "data"
RTX = load_profile("rtx-pro-6000-x8-kimi-k2.6")
H200 = load_profile("h200-llama-3.1-8b")
CPU = load_profile("cpu-blocking-pp2")


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, 8.0), (2, 15.8), (4, 30.9), (8, 59.6), (32, 189.0), (48, 244.0)]
)
def test_distinct_experts_of_independent_tokens(tokens: int, expected: float) -> None:
    assert distinct_experts(384, 8, tokens, overlap=0.0) == pytest.approx(expected, rel=0.01)


@given(st.integers(1, 5000), st.floats(0.0, 0.9))
def test_more_tokens_hit_more_experts_up_to_all(tokens: int, overlap: float) -> None:
    few = distinct_experts(384, 8, tokens, overlap)
    many = distinct_experts(384, 8, tokens + 1, overlap)
    assert 8.0 - 1e-9 <= few <= many <= 384.0


def test_experts_dealt_whole_are_uneven_until_all_are_hit() -> None:
    assert expert_imbalance(8.0, 384, groups=1) == 1.0
    assert expert_imbalance(384.0, 384, groups=8) == 1.0
    assert expert_imbalance(8.0, 384, 8) > expert_imbalance(100.0, 384, 8) > 1.0


def decode_s(shape: ServerShape, batch_size: int) -> list[float]:
    model = StageModel(RTX, shape)
    return list(model.cost(batch_size, batch_size, Launching.GRAPH).gpu_s)


def test_one_stage_reads_its_weights_once_per_step() -> None:
    model, gpu = RTX.model, RTX.gpu
    read = 7 * (model.shared_bytes + 8 * model.expert_bytes) / gpu.bandwidth_bytes_per_s
    tails = 7 * RTX.kernels.layer_s
    first = decode_s(ServerShape(pp_size=8), 1)[0]
    assert first == pytest.approx(read + tails, rel=0.01)


def test_padding_grows_to_its_limit_and_is_shared() -> None:
    bare = replace(RTX, kernels=replace(RTX.kernels, batch_s=0.0))
    padded = replace(RTX, kernels=replace(RTX.kernels, batch_s=1e-3, batch_half_tokens=2.0))

    def padding_s(shape: ServerShape, tokens: int) -> float:
        costs = [StageModel(p, shape).cost(tokens, 1, Launching.GRAPH) for p in (bare, padded)]
        return sum(costs[1].gpu_s) - sum(costs[0].gpu_s)

    alone = [padding_s(ServerShape(pp_size=8), tokens) for tokens in (1, 3, 10**6)]
    assert alone == pytest.approx([0.0, 61 * 0.5e-3, 61 * 1e-3], rel=1e-4)
    assert padding_s(ServerShape(tp_size=8), 3) == pytest.approx(alone[1] / 8)


def test_the_last_stage_is_the_slowest() -> None:
    times_s = decode_s(ServerShape(pp_size=8), 8)
    assert times_s[-1] == max(times_s)
    assert times_s[0] == times_s[2] < times_s[3] == times_s[6] < times_s[7]


def test_a_collective_costs_more_the_more_gpus_take_part() -> None:
    model = StageModel(RTX, ServerShape(tp_size=8))
    alone = sum(decode_s(ServerShape(pp_size=8), 1))
    (together,) = model.cost(1, 1, Launching.GRAPH).gpu_s
    assert together > alone
    (pair, _, _, _) = decode_s(ServerShape(tp_size=2, pp_size=4), 1)
    (quad, _) = decode_s(ServerShape(tp_size=4, pp_size=2), 1)
    assert 4 * pair < alone
    assert quad < together


def test_eager_launches_cost_cpu_time_per_layer() -> None:
    model = StageModel(RTX, ServerShape(pp_size=8))
    eager = model.cost(1, 1, Launching.EAGER).launch_s
    assert eager[0] == pytest.approx(7 * RTX.host.eager_layer_s)
    assert model.cost(1, 1, Launching.GRAPH).launch_s == (RTX.host.graph_launch_s,) * 8


def test_graphs_are_replayed_up_to_the_largest_captured_size() -> None:
    model = StageModel(RTX, ServerShape(pp_size=8, cuda_graph_max_bs=4))
    assert model.launching(4, is_prefill=False) is Launching.GRAPH
    assert model.launching(5, is_prefill=False) is Launching.EAGER
    assert model.launching(1, is_prefill=True) is Launching.EAGER
    native = StageModel(CPU, ServerShape(pp_size=2, attention_backend="torch_native"))
    assert native.launching(1, is_prefill=False) is Launching.EAGER


def test_graphs_are_used_where_a_real_server_used_them() -> None:
    """An H200 without decode graphs: SGLang's own words about each batch."""
    model = StageModel(H200, ServerShape(cuda_graph=False, chunked_prefill_size=2048))
    log = (DATA / "server_logs" / "decode-eager-h200.log").read_text(encoding="utf-8")
    prefills = re.findall(r"Prefill batch, .*#new-token: (\d+),.*cuda graph: (True|False),", log)
    decodes = re.findall(r"Decode batch, #running-req: (\d+),.*cuda graph: (True|False),", log)
    assert {used for _, used in prefills} == {"True", "False"}
    for found, is_prefill in ((prefills, True), (decodes, False)):
        for tokens, used in found:
            launching = model.launching(int(tokens), is_prefill=is_prefill)
            assert (launching is not Launching.EAGER) == (used == "True"), tokens


def test_prefills_are_replayed_in_pieces_up_to_the_largest_captured_size() -> None:
    model = StageModel(H200, ServerShape(cuda_graph=False))
    assert model.launching(1, is_prefill=False) is Launching.EAGER
    assert model.launching(2, is_prefill=True) is Launching.PIECES
    assert model.launching(8192, is_prefill=True) is Launching.PIECES
    assert model.launching(8193, is_prefill=True) is Launching.EAGER
    pieces = model.cost(256, 1, Launching.PIECES)
    assert pieces.launch_s == pytest.approx((32 * H200.host.piece_s,))
    assert pieces.lead == model.cost(256, 1, Launching.EAGER).lead < 1.0
    unknown = replace(H200, host=replace(H200.host, piece_s=0.0))
    whole = StageModel(unknown, ServerShape()).cost(256, 1, Launching.PIECES)
    assert whole.launch_s == (H200.host.graph_launch_s,)


def test_backends_differ_by_a_few_percent() -> None:
    triton = sum(decode_s(ServerShape(pp_size=8), 1))
    flashinfer = sum(decode_s(ServerShape(pp_size=8, attention_backend="flashinfer"), 1))
    assert 0.93 < flashinfer / triton < 0.99


def test_the_power_limit_is_kept() -> None:
    model = StageModel(RTX, ServerShape(pp_size=8))
    decode, prefill = model.cost(8, 8, Launching.GRAPH), model.cost(8192, 8, Launching.EAGER)
    assert decode.busy_w < prefill.busy_w <= RTX.gpu.power_limit_w


def test_layers_taken_from_the_stage_with_the_head_make_the_slowest_stage_faster() -> None:
    partition = (8, 8, 8, 8, 8, 7, 7, 7)
    even = decode_s(ServerShape(pp_size=8), 8)
    better = decode_s(ServerShape(pp_size=8, pp_layer_partition=partition), 8)
    assert max(better) < max(even)
    assert sum(better) == pytest.approx(sum(even))


def test_eager_launches_take_longer_on_several_ranks_and_with_all_reduces() -> None:
    host = replace(H200.host, eager_layer_s=1e-3, eager_ranks_factor=1.5, collective_s=0.1e-3)
    profile = replace(H200, host=host)

    def launch_s(shape: ServerShape, launching: Launching = Launching.EAGER) -> list[float]:
        return list(StageModel(profile, shape).cost(4, 4, launching).launch_s)

    alone = ServerShape(attention_backend="triton")
    pair, staged = replace(alone, tp_size=2), replace(alone, pp_size=2)
    assert launch_s(alone) == pytest.approx([32 * 1e-3])
    assert launch_s(staged) == pytest.approx([16 * 1.5e-3] * 2)
    assert launch_s(pair) == pytest.approx([32 * (1.5e-3 + 2 * 0.1e-3)])
    for shape in (alone, pair, staged):
        assert set(launch_s(shape, Launching.GRAPH)) == {H200.host.graph_launch_s}
