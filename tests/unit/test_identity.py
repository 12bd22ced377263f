"""What counts of /server_info when two servers are said to be the same."""

from __future__ import annotations

from typing import Any

import pytest

from runner.engines.sglang.identity import cap_of, lasting_state
from runner.trial import Params

STATE = {"pp_max_micro_batch_size": 8, "effective_max_running_requests_per_dp": 64}
INFO: dict[str, Any] = {
    "port": 1,
    "random_seed": 5,
    "pp_size": 8,
    "attention_backend": "triton",
    "max_running_requests": None,
    "pp_max_micro_batch_size": None,
    "max_total_num_tokens": 1000,
    "cuda_graph_max_bs_decode": None,
    "cuda_graph_config": {"decode": {"backend": "full", "max_bs": 64}},
    "internal_states": [STATE],
}
ASKED: Params = {"pp_size": 8}


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"port": 2, "random_seed": 6, "max_total_num_tokens": 1001}, {}),
        ({"max_running_requests": 64}, {"max_running_requests": 64}),
        ({"cuda_graph_max_bs_decode": 512}, {"cuda_graph_max_bs": 512}),
        ({}, {"attention_backend": "triton"}),
        ({"internal_states": [{**STATE, "pp_max_micro_batch_size": 4}]}, {}),
    ],
)
def test_a_start_is_not_its_ports_nor_how_it_was_asked(
    changes: dict[str, Any], asked: Params
) -> None:
    other = lasting_state({**INFO, **changes}, {**ASKED, **asked})
    assert other == lasting_state(INFO, ASKED)


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"attention_backend": "fa3"}, {}),
        ({"page_size": 64}, {}),
        ({"internal_states": [{**STATE, "effective_max_running_requests_per_dp": 32}]}, {}),
        ({"cuda_graph_config": {"decode": {"backend": "disabled", "max_bs": 64}}}, {}),
        ({}, {"pp_layer_partition": "8,8,8,8,8,7,7,7"}),
        ({}, {"fault": "garbled-output"}),
    ],
)
def test_what_runs_differently_and_what_it_does_not_tell_counts(
    changes: dict[str, Any], asked: Params
) -> None:
    other = lasting_state({**INFO, **changes}, {**ASKED, **asked})
    assert other != lasting_state(INFO, ASKED)


def test_versions_without_a_graph_config_show_graphs_as_asked() -> None:
    old = {name: value for name, value in INFO.items() if name != "cuda_graph_config"}
    asked = {**ASKED, "cuda_graph_max_bs": 512}
    other = lasting_state({**old, "cuda_graph_max_bs_decode": 512}, asked)
    assert other != lasting_state(old, ASKED)


def test_the_cap_is_the_live_one() -> None:
    assert cap_of(INFO) == 8
