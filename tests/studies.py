"""Small studies for tests: a document of the study file, with parts replaced."""

from typing import Any

from runner.config import parse_study
from runner.settings import StudySettings

DEMO: dict[str, Any] = {
    "name": "small",
    "engine": {"kind": "simulated", "profile": "rtx-pro-6000-x8-kimi-k2.6"},
    "parameters": {
        "tp_size": {"choices": [1, 2, 4, 8]},
        "pp_size": {"choices": [1, 2, 4, 8]},
        "pp_async_batch_depth": {"int": [0, 8], "when": "pp_size > 1"},
        "pp_max_micro_batch_size": {"int": [1, 64], "log": True, "when": "pp_size > 1"},
        "cuda_graph": {"choices": [True, False]},
    },
    "constraints": ["tp_size * pp_size == 8"],
    "baselines": [
        {"name": "pp8-auto", "tp_size": 1, "pp_size": 8, "max_running_requests": 64},
    ],
    "workload": {"prompt_tokens": 64, "output_tokens": 32, "concurrency": [1, 8, 32]},
    "search": {"trials": 6, "seed": 0},
    "measure": {"precision": 0.05, "min_window_s": 2, "max_window_s": 20, "finalists": 1},
}

CPU: dict[str, Any] = {
    "name": "tiny",
    "engine": {"kind": "emulated", "profile": "cpu-blocking-pp2", "time_scale": 50},
    "hardware": {"gpus": 2},
    "parameters": {
        "pp_size": {"choices": [1, 2]},
        "pp_max_micro_batch_size": {"int": [1, 8], "when": "pp_size > 1"},
    },
    "baselines": [{"name": "pp2-auto", "pp_size": 2, "max_running_requests": 16}],
    # Long requests: what a busy machine adds between two of them must not count.
    "workload": {"prompt_tokens": 16, "output_tokens": 128, "concurrency": [1, 4]},
    "search": {"trials": 3, "seed": 0},
    "measure": {"precision": 0.2, "min_window_s": 20, "max_window_s": 150, "finalists": 1},
}


def study(document: dict[str, Any] = DEMO, /, **sections: object) -> StudySettings:
    """The study of a document with whole sections replaced."""
    return parse_study({**document, **sections})
