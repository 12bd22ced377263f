"""Neutral names to SGLang's flags, and real answers of /server_info back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from runner.engines.emulator.flags import emulated_environment, parse_flags
from runner.engines.sglang.flags import render, resolved_params, variables
from runner.trial import ParamValue
from tests.server_flags import real_environment

DATA = Path(__file__).parents[1] / "data" / "server_info"
NEWEST = real_environment("0.5.23")


def server_info(name: str) -> dict[str, object]:
    document: dict[str, object] = json.loads((DATA / name).read_text(encoding="utf-8"))
    return document


@pytest.mark.parametrize(
    ("name", "value", "flags"),
    [
        ("tp_size", 8, ["--tp-size", "8"]),
        ("pp_async_batch_depth", 0, ["--pp-async-batch-depth", "0"]),
        ("cuda_graph", True, ["--cuda-graph-backend-decode", "full"]),
        ("cuda_graph", False, ["--cuda-graph-backend-decode", "disabled"]),
        ("cuda_graph_max_bs", 64, ["--cuda-graph-max-bs-decode", "64"]),
        ("chunked_prefill_size", -1, ["--chunked-prefill-size", "-1"]),
        ("mem_fraction_static", 0.85, ["--mem-fraction-static", "0.85"]),
        ("enable_mixed_chunk", True, ["--enable-mixed-chunk"]),
        ("enable_mixed_chunk", False, []),
        ("load_format", "dummy", ["--load-format", "dummy"]),
        ("served_model_name", "-odd-", ["--served-model-name=-odd-"]),
    ],
)
def test_one_parameter_becomes_its_flag(name: str, value: ParamValue, flags: list[str]) -> None:
    assert render({name: value}, NEWEST) == flags


def test_flags_keep_the_order_of_the_parameters() -> None:
    assert render({"pp_size": 8, "tp_size": 1}, NEWEST) == ["--pp-size", "8", "--tp-size", "1"]


def test_the_emulated_server_understands_every_rendered_flag() -> None:
    asked: Mapping[str, ParamValue] = {
        "tp_size": 2,
        "pp_size": 4,
        "dp_size": 1,
        "ep_size": 2,
        "pp_async_batch_depth": 3,
        "pp_max_micro_batch_size": 5,
        "max_running_requests": 64,
        "chunked_prefill_size": -1,
        "mem_fraction_static": 0.85,
        "attention_backend": "flashinfer",
        "disable_radix_cache": True,
    }
    neutral: Mapping[str, ParamValue] = {"cuda_graph": False, "cuda_graph_max_bs": 16}
    words = render({**asked, **neutral}, emulated_environment())
    parsed = parse_flags(words).server_args
    assert {name: parsed[name] for name in asked} == asked
    assert parsed["cuda_graph_backend_decode"] == "disabled"
    assert parsed["cuda_graph_max_bs_decode"] == 16


def test_resolved_params_of_a_real_pipeline() -> None:
    assert resolved_params(server_info("0.5.23-cpu-pp2.json")) == {
        "tp_size": 1,
        "pp_size": 2,
        "dp_size": 1,
        "ep_size": 1,
        "pp_async_batch_depth": 2,
        "pp_max_micro_batch_size": 4,
        "max_running_requests": 16,
        "max_total_tokens": 8192,
        "chunked_prefill_size": 4096,
        "mem_fraction_static": 0.05,
        "attention_backend": "torch_native",
        "cuda_graph": False,
        "cuda_graph_max_bs": 32,
    }


def test_resolved_params_fill_in_what_was_left_to_the_server() -> None:
    resolved = resolved_params(server_info("0.5.16-h200-graphs.json"))
    assert resolved["max_running_requests"] == 3539
    assert resolved["pp_max_micro_batch_size"] == 3539
    assert resolved["max_total_tokens"] == 906051
    assert resolved["cuda_graph"] is True
    assert resolved["cuda_graph_max_bs"] == 256


def test_a_server_without_graphs_says_so() -> None:
    assert resolved_params(server_info("0.5.16-h200-eager.json"))["cuda_graph"] is False


def test_the_live_cap_wins_over_the_one_at_start() -> None:
    info = server_info("0.5.23-cpu-pp2.json")
    states = info["internal_states"]
    assert isinstance(states, list)
    states[0]["pp_max_micro_batch_size"] = 2
    assert resolved_params(info)["pp_max_micro_batch_size"] == 2


def test_further_parameters_are_reported_when_asked_for() -> None:
    info = server_info("0.5.23-cpu-pp2.json")
    assert "schedule_policy" not in resolved_params(info)
    assert resolved_params(info, ["schedule_policy"])["schedule_policy"] == "fcfs"


def test_an_answer_that_tells_nothing_resolves_to_nothing_but_the_default_graphs() -> None:
    assert resolved_params({}) == {"cuda_graph": True}


def test_a_partition_of_layers_travels_in_the_environment() -> None:
    args: dict[str, ParamValue] = {"pp_size": 8, "pp_layer_partition": "8,8,8,8,8,7,7,7"}
    assert render(args, NEWEST) == ["--pp-size", "8"]
    assert variables(args) == {"SGLANG_PP_LAYER_PARTITION": "8,8,8,8,8,7,7,7"}
