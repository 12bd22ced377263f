"""What a command line comes to on a profile, and what /server_info's arguments say of it."""

from __future__ import annotations

import pytest

from runner.engines.emulator.flags import parse_flags
from runner.engines.emulator.setup import ServerSetup, cuda_graph_config, set_up
from runner.machine.profile import load_profile
from runner.machine.shape import ServerShape


def resolve(words: str, profile: str = "cpu-blocking-pp2") -> ServerSetup:
    return set_up(parse_flags(words.split()), load_profile(profile))


def test_flags_become_a_shape() -> None:
    setup = resolve(
        "--tp 2 --pp-size 4 --ep 2 --pp-async-batch-depth 8 --pp-max-micro-batch-size 4 "
        "--max-running-requests 64 --chunked-prefill-size 512 --cuda-graph-max-bs-decode 16 "
        "--attention-backend triton --mem-fraction-static 0.4 --max-total-tokens 4096"
    )
    assert setup.shape == ServerShape(
        tp_size=2,
        pp_size=4,
        ep_size=2,
        pp_async_batch_depth=8,
        pp_max_micro_batch_size=4,
        max_running_requests=64,
        chunked_prefill_size=512,
        cuda_graph=True,
        cuda_graph_max_bs=16,
        attention_backend="triton",
        mem_fraction_static=0.4,
        max_total_tokens=4096,
    )
    assert setup.highest_cap == 16


@pytest.mark.parametrize(
    "words",
    [
        "--cuda-graph-backend-decode disabled",
        "--disable-cuda-graph",
        "--disable-decode-cuda-graph",
        "--attention-backend torch_native",
    ],
)
def test_ways_to_decode_without_graphs(words: str) -> None:
    setup = resolve(f"--attention-backend triton {words}")
    assert setup.graph_sizes == ()
    assert setup.args["cuda_graph_backend_decode"] == "disabled"
    assert cuda_graph_config(setup)["decode"]["backend"] == "disabled"


@pytest.mark.parametrize(
    ("words", "backend", "most"),
    [
        ("", "breakable", 2048),
        ("--chunked-prefill-size 64", "breakable", 64),
        ("--cuda-graph-backend-decode disabled", "breakable", 2048),
        ("--cuda-graph-backend-prefill full", "full", 2048),
        ("--cuda-graph-backend-prefill disabled", "disabled", 0),
        ("--disable-prefill-cuda-graph", "disabled", 0),
        ("--disable-cuda-graph", "disabled", 0),
        ("--pp-size 2", "disabled", 0),
    ],
)
def test_prefill_has_graphs_of_its_own(words: str, backend: str, most: int) -> None:
    setup = resolve(f"--attention-backend triton {words}")
    assert cuda_graph_config(setup)["prefill"]["backend"] == backend
    assert max(setup.prefill_graph_sizes, default=0) == most


def test_captured_sizes_end_at_the_largest_asked_for() -> None:
    setup = resolve("--attention-backend triton --cuda-graph-bs-decode 1 2 12")
    assert setup.graph_sizes == (1, 2, 4, 8, 12)
    assert cuda_graph_config(setup)["decode"]["max_bs"] == 12


def test_the_top_shows_what_argument_resolution_fills_in_and_no_more() -> None:
    setup = resolve("--pp-size 2")
    assert setup.args["attention_backend"] == "torch_native"
    assert setup.args["mem_fraction_static"] == 0.5
    assert setup.args["chunked_prefill_size"] == setup.resolved.chunked_prefill_size
    assert setup.args["disable_overlap_schedule"] is True
    assert isinstance(setup.args["random_seed"], int)
    # The scheduler decides these; SGLang's main process does not know them.
    assert setup.args["pp_max_micro_batch_size"] is None
    assert setup.args["max_running_requests"] is None
    assert setup.resolved.pp_max_micro_batch_size == setup.resolved.max_running_requests // 2


def test_a_given_seed_is_kept() -> None:
    assert resolve("--random-seed 7").random_seed == 7


def test_no_chunks_means_the_prefill_limit() -> None:
    setup = resolve("--chunked-prefill-size -1")
    assert setup.args["chunked_prefill_size"] == -1
    assert setup.shape.chunked_prefill_size == setup.args["max_prefill_tokens"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pp-max-micro-batch-size 0", "pp_max_micro_batch_size must be at least 1, got 0"),
        ("--pp-async-batch-depth -1", "pp_async_batch_depth must be non-negative, got -1"),
        ("--dp 2 --enable-dp-attention", "enable_dp_attention is not supported"),
        ("--chunked-prefill-size 100 --page-size 64", "must be divisible by page_size 64"),
    ],
)
def test_what_sglang_refuses_before_it_starts(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(words)
