"""What was asked against what runs."""

from __future__ import annotations

import pytest

from runner.measure.resolved import difference_words, differences
from runner.trial import Params

RUNS: Params = {
    "pp_size": 8,
    "attention_backend": "triton",
    "pp_max_micro_batch_size": 8,
    "max_running_requests": 64,
    "chunked_prefill_size": 8192,
    "page_size": 64,
    "mem_fraction_static": 0.9,
    "cuda_graph": True,
    "cuda_graph_max_bs": 64,
}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, {}),
        ({"attention_backend": "triton", "mem_fraction_static": 0.9}, {}),
        ({"attention_backend": "fa3"}, {"attention_backend": ("fa3", "triton")}),
        ({"page_size": 1}, {"page_size": (1, 64)}),
        ({"cuda_graph_max_bs": 512}, {"cuda_graph_max_bs": (512, 64)}),
        ({"pp_max_micro_batch_size": 4}, {"pp_max_micro_batch_size": (4, 8)}),
        ({"kv_cache_dtype": "auto", "unknown": 3}, {}),
        ({"disable_cuda_graph": True}, {"cuda_graph": (False, True)}),
    ],
)
def test_only_what_runs_otherwise_is_named(asked: Params, found: dict[str, object]) -> None:
    assert dict(differences(asked, RUNS)) == found


def test_graphs_that_are_off_although_nobody_asked() -> None:
    off = {**RUNS, "cuda_graph": False}
    assert differences({"cuda_graph_max_bs": 512}, off) == {"cuda_graph": (True, False)}
    assert differences({"cuda_graph": False, "cuda_graph_max_bs": 512}, off) == {}


def test_a_cpu_has_no_graphs_to_switch_off() -> None:
    assert differences({"device": "cpu"}, {"device": "cpu", "cuda_graph": False}) == {}


def test_without_a_pipeline_a_cap_may_stand_for_the_limit() -> None:
    lone = {**RUNS, "pp_size": 1, "max_running_requests": 128, "pp_max_micro_batch_size": 8}
    assert differences({"max_running_requests": 8}, lone) == {}
    assert differences({"max_running_requests": 16}, lone) == {"max_running_requests": (16, 128)}
    assert differences({"max_running_requests": 8}, {**lone, "pp_size": 2}) != {}
    assert differences({"pp_max_micro_batch_size": 4}, lone) == {"pp_max_micro_batch_size": (4, 8)}


def test_words() -> None:
    found = differences({"attention_backend": "fa3"}, {**RUNS, "cuda_graph": False})
    assert difference_words(found) == [
        "decode CUDA graphs are off, though nobody switched them off",
        "attention_backend fa3 was asked for, triton runs",
    ]
