"""What SGLang makes of its flags on a machine, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.machine.graphs import graph_sizes, prefill_graph_sizes
from runner.machine.hardware import Profile
from runner.machine.memory import prefill_graphs_mib, static_fraction
from runner.machine.profile import load_profile
from runner.machine.shape import (
    ServerShape,
    memory_used_bytes,
    refusal,
    resolve,
    shape_of,
    slots,
    stage_layers,
    uses_graph,
    uses_prefill_graph,
)
from runner.machine.start import start_phases
from runner.trial import Params

RTX = load_profile("rtx-pro-6000-x8-kimi-k2.6")
EAGER_LOG = Path(__file__).parents[1] / "data" / "server_logs" / "decode-eager-h200.log"
H200 = load_profile("h200-llama-3.1-8b")
MOE = load_profile("h200-qwen3-30b-a3b")
CPU = load_profile("cpu-blocking-pp2")


def test_parameters_become_a_shape() -> None:
    shape = shape_of({"tp_size": 2, "pp_size": 4, "cuda_graph": False, "trust_remote_code": True})
    assert shape == ServerShape(tp_size=2, pp_size=4, cuda_graph=False)
    assert shape.gpus == 8


@pytest.mark.parametrize(
    ("args", "decode", "prefill"),
    [
        ({}, True, True),
        ({"cuda_graph": False}, False, True),  # seen: "Prefill batch, ... cuda graph: True"
        ({"disable_decode_cuda_graph": True}, False, True),
        ({"cuda_graph_backend_decode": "disabled"}, False, True),
        ({"disable_cuda_graph": True}, False, False),
        ({"disable_cuda_graph": True, "cuda_graph_backend_prefill": "full"}, False, True),
        ({"disable_prefill_cuda_graph": True}, True, False),
        ({"cuda_graph_backend_prefill": "disabled"}, True, False),
        ({"pp_size": 2}, True, False),
        ({"pp_size": 2, "cuda_graph_backend_prefill": "breakable"}, True, True),
        ({"attention_backend": "torch_native"}, False, False),
    ],
)
def test_decode_and_prefill_have_graphs_of_their_own(
    args: Params, *, decode: bool, prefill: bool
) -> None:
    shape = shape_of(args)
    assert (uses_graph(H200, shape), uses_prefill_graph(H200, shape)) == (decode, prefill)


def test_slots_are_stages_plus_depth() -> None:
    assert slots(ServerShape(pp_size=8, pp_async_batch_depth=8)) == 16
    assert slots(ServerShape(pp_size=1, pp_async_batch_depth=8)) == 1


def test_the_last_stages_take_the_remaining_layers() -> None:
    assert stage_layers(61, ServerShape(pp_size=8)) == (7, 7, 7, 8, 8, 8, 8, 8)
    assert stage_layers(32, ServerShape()) == (32,)


@given(st.integers(1, 200), st.integers(1, 16))
def test_every_layer_has_a_stage(layers: int, pp_size: int) -> None:
    split = stage_layers(layers, ServerShape(pp_size=pp_size))
    assert (len(split), sum(split)) == (pp_size, layers)
    assert max(split) - min(split) <= 1


def test_graph_sizes_are_those_of_sglang() -> None:
    assert graph_sizes(24) == (1, 2, 4, 8, 12, 16, 24)
    assert len(graph_sizes(256)) == 36
    # Of the log of SGLang 0.5.16: "Capture target prefill CUDA graph begin. ... num_tokens=[...]".
    captured = [4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208]
    captured += [224, 240, 256, 288, 320, 352, 384, 416, 448, 480, 512, 576, 640, 704, 768, 832]
    captured += [896, 960, 1024, 1280, 1536, 1792, 2048, 2304, 2560, 2816, 3072, 3328, 3584, 3840]
    captured += [4096, 4608, 5120, 5632, 6144, 6656, 7168, 7680, 8192]
    assert list(prefill_graph_sizes(1 << 30)) == captured
    assert list(prefill_graph_sizes(2048)) == captured[: captured.index(2048) + 1]
    assert f"num_tokens={list(prefill_graph_sizes(2048))}, avail mem=" in EAGER_LOG.read_text()


def test_the_reference_deployment_resolves_its_auto_cap() -> None:
    resolved = resolve(RTX, ServerShape(pp_size=8, pp_async_batch_depth=8))
    assert resolved.max_running_requests == 64
    assert resolved.pp_max_micro_batch_size == 8
    assert resolved.cuda_graph_max_bs == 64
    assert resolved.attention_backend == "triton"
    assert resolved.mem_fraction_static == 0.88
    assert resolve(RTX, ServerShape(pp_size=8, max_running_requests=4)).pp_max_micro_batch_size == 1


def test_the_h200_resolves_as_a_real_server_there() -> None:
    resolved = resolve(H200, ServerShape())
    assert resolved.max_total_tokens == pytest.approx(906_051, rel=0.02)
    assert resolved.max_running_requests == pytest.approx(3539, rel=0.02)
    assert (resolved.chunked_prefill_size, resolved.cuda_graph_max_bs) == (8192, 256)


def test_start_phases_are_those_measured() -> None:
    with_graphs = start_phases(H200, ServerShape())
    assert 46 < with_graphs.total_s < 55
    no_graphs = shape_of({"disable_cuda_graph": True})
    assert 33 < start_phases(H200, no_graphs).total_s < 39
    assert list(with_graphs.by_name) == [
        "import",
        "init",
        "load_weights",
        "kv_cache",
        "cuda_graph",
        "warmup",
    ]
    assert 100 < start_phases(RTX, ServerShape(pp_size=8)).total_s < 140


@pytest.mark.parametrize(
    ("profile", "args", "fraction", "tokens"),
    [
        (MOE, {}, 0.903, 750_511),
        (MOE, {"cuda_graph": False}, 0.907, 756_593),
        (MOE, {"chunked_prefill_size": 2048}, 0.929, 790_041),
        (MOE, {"chunked_prefill_size": 2048, "cuda_graph": False}, 0.929, 790_041),
        (H200, {"max_running_requests": 32}, 0.903, 906_051),
        (H200, {"cuda_graph": False}, 0.907, 910_612),
        (H200, {"chunked_prefill_size": 2048}, 0.929, 935_699),
        (H200, {"disable_cuda_graph": True}, 0.91, 914_033),
    ],
)
def test_the_kv_cache_is_as_large_as_servers_said(
    profile: Profile, args: Params, fraction: float, tokens: int
) -> None:
    """SGLang 0.5.16 on an H200, which chose its mem_fraction_static itself."""
    resolved = resolve(profile, shape_of(args))
    assert resolved.mem_fraction_static == fraction
    assert resolved.max_total_tokens == pytest.approx(tokens, rel=0.002)


@pytest.mark.parametrize(
    ("memory_gib", "chunk", "expected"), [(80, 8192, 0.826), (80, -1, 0.676), (80, 512, 0.875)]
)
def test_what_sglang_keeps_free_by_itself(memory_gib: int, chunk: int, expected: float) -> None:
    """A large GPU keeps 10 GiB at the least."""
    found = static_fraction(memory_gib * 1024**3, chunk, 8, 0, prefill_graphs_mib(58, is_mla=False))
    assert found == expected
    small = static_fraction(24 * 1024**3, 512, 1, 8, 0.0)
    assert small == round(1 - (512 + 1.5 * 2048 + 128 + 16) / (24 * 1024), 3)


def test_prefills_are_captured_up_to_the_chunk() -> None:
    """Measured with a MoE: 13.4 - 14 s up to 8,192 tokens, 9.7 - 13.2 s up to 2,048."""
    eager = ServerShape(cuda_graph=False)
    whole = start_phases(MOE, eager)
    assert (whole.decode_graphs_s, whole.prefill_graphs_s) == (0.0, MOE.start.prefill_graphs_s)
    small = start_phases(MOE, replace(eager, chunked_prefill_size=2048))
    assert small.prefill_graphs_s / whole.prefill_graphs_s == pytest.approx(42 / 58)
    assert start_phases(MOE, replace(eager, pp_size=2)).by_name["cuda_graph"] == 0.0


@pytest.mark.parametrize(
    "shape",
    [
        ServerShape(tp_size=8),
        ServerShape(tp_size=8, ep_size=8),
        ServerShape(pp_size=8, pp_async_batch_depth=8),
        ServerShape(tp_size=2, pp_size=4, attention_backend="flashinfer"),
        ServerShape(pp_size=8, max_running_requests=512, cuda_graph=False),
    ],
)
def test_what_fits_starts(shape: ServerShape) -> None:
    assert refusal(RTX, shape) is None
    assert memory_used_bytes(RTX, shape) <= RTX.gpu.memory_bytes


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (ServerShape(tp_size=4), "out of memory: the weights take 137.1 GB"),
        (ServerShape(pp_size=4), "out of memory"),
        (ServerShape(tp_size=8, mem_fraction_static=0.5), "raise mem_fraction_static"),
        (ServerShape(tp_size=8, mem_fraction_static=0.99), "lower mem_fraction_static"),
        (ServerShape(tp_size=4, pp_size=4), "needs 16 GPUs, rtx-pro-6000-x8-kimi-k2.6 has 8"),
        (ServerShape(tp_size=3), "does not divide the 64 attention heads"),
        (ServerShape(tp_size=4, pp_size=2, ep_size=3), "ep_size 3"),
        (ServerShape(tp_size=8, pp_max_micro_batch_size=0), "at least 1"),
        (ServerShape(pp_size=8, pp_async_batch_depth=-1), "the depth at least 0"),
        (ServerShape(pp_size=8, attention_backend="fa3"), "SM120; choose one of triton"),
        (ServerShape(pp_size=8, attention_backend="trtllm_mla"), "SM120"),
        (ServerShape(pp_size=8, attention_backend="wave"), "not available"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_reason(shape: ServerShape, reason: str) -> None:
    message = refusal(RTX, shape)
    assert message is not None
    assert reason in message


@pytest.mark.parametrize(
    ("shape", "advice"),
    [
        (ServerShape(mem_fraction_static=0.995, cuda_graph_max_bs=512), "or cuda_graph_max_bs"),
        (ServerShape(mem_fraction_static=0.1), "raise mem_fraction_static"),
    ],
)
def test_the_h200_runs_out_of_memory_where_a_real_one_does(shape: ServerShape, advice: str) -> None:
    message = refusal(H200, shape)
    assert message is not None
    assert message.startswith("out of memory")
    assert advice in message


def test_a_model_without_experts_has_no_expert_parallelism() -> None:
    assert refusal(replace(H200, gpus=8), ServerShape(tp_size=2, ep_size=2)) is not None


def test_more_stages_than_layers_are_refused() -> None:
    message = refusal(replace(CPU, gpus=8), ServerShape(pp_size=8))
    assert message == "pp_size 8 is more than the model's 4 layers"


def test_a_partition_replaces_the_even_split() -> None:
    shape = shape_of({"pp_size": 8, "pp_layer_partition": "8,8,8,8,8,7,7,7"})
    assert stage_layers(61, shape) == (8, 8, 8, 8, 8, 7, 7, 7)
    assert refusal(RTX, shape) is None


@pytest.mark.parametrize(
    "text", ["8,8,8,8,8,7,7", "9,8,8,8,8,7,7,7", "8,8,8,8,8,7,14,0", "even", ""]
)
def test_a_wrong_partition_is_refused(text: str) -> None:
    message = refusal(RTX, shape_of({"pp_size": 8, "pp_layer_partition": text}))
    assert message is not None
    assert "8 stages" in message
    assert "7,7,7,8,8,8,8,8" in message
