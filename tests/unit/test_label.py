from __future__ import annotations

import pytest

from runner.label import setting_label
from runner.trial import ParamValue
from tests.samples import PARAMS


@pytest.mark.parametrize(
    ("params", "label"),
    [
        (PARAMS, "pp8 d8 cap4 graph triton"),
        ({"pp_size": 1, "tp_size": 8}, "tp8"),
        ({"attention_backend": "flashinfer", "tp_size": 4, "pp_size": 2}, "pp2 tp4 flashinfer"),
        ({"cuda_graph": False, "pp_async_batch_depth": 0, "pp_size": 8}, "pp8 d0 eager"),
        ({"tp_size": 8, "ep_size": 8}, "tp8 ep8"),
        ({"mem_fraction_static": 0.88, "chunked_prefill_size": 4096}, "chunk4096 mem0.88"),
        ({"schedule_policy": "lpm", "enable_x": True}, "schedule_policy=lpm enable_x=true"),
        ({"tp_size": 1, "pp_size": 1}, "tp1"),
        ({"pp_size": 1}, "pp1"),
        ({"attention_backend": "fa3", "x": 2, "cuda_graph": True}, "graph fa3 x=2"),
        ({"cuda_graph_backend_prefill": "disabled"}, "prefill-graph=disabled"),
        ({}, "defaults"),
    ],
)
def test_a_setting_is_written_in_short(params: dict[str, ParamValue], label: str) -> None:
    assert setting_label(params) == label
