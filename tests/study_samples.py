"""One small valid study document, and what is said when something in it is changed."""

from __future__ import annotations

from typing import Any

import pytest

from runner.config import parse_study
from runner.errors import ConfigError

CAP, DEPTH = "pp_max_micro_batch_size", "pp_async_batch_depth"
DOCUMENT: dict[str, Any] = {
    "name": "demo",
    "engine": {"kind": "emulated", "profile": "some-machine", "args": {"page_size": 16}},
    "parameters": {
        "tp_size": {"choices": [1, 2, 4, 8]},
        "pp_size": {"choices": [1, 2, 4, 8]},
        DEPTH: {"int": [0, 8], "when": "pp_size > 1"},
        CAP: {"int": [1, 64], "log": True, "when": "pp_size > 1"},
        "cuda_graph": {"choices": [True, False]},
        "attention_backend": {"choices": ["triton", "flashinfer"]},
    },
    "constraints": ["tp_size * pp_size == 8"],
    "baselines": [{"name": "pp8", "tp_size": 1, "pp_size": 8}, {"name": "tp8", "tp_size": 8}],
    "workload": {"output_tokens": 128, "concurrency": [1, 8, 32]},
    "search": {"trials": 20, "seed": 0},
}


def refused(*options: str) -> str:
    """The message for the document with these options, without the option's own name."""
    with pytest.raises(ConfigError) as caught:
        parse_study(DOCUMENT, options)
    message = str(caught.value)
    path = options[-1].partition("=")[0]
    return message.removeprefix(f"--set {path}: ")
