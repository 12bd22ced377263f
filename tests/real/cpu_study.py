"""A study that real SGLang serves on a CPU: a tiny model without weights, two places."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("RUNNER_SGLANG_PYTHON", "")  # read before the tests clear it
needs_sglang = pytest.mark.skipif(
    not PYTHON, reason="RUNNER_SGLANG_PYTHON names no Python with sglang: run scripts/test-real"
)

STUBS = Path(__file__).parent / "stubs"
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARGS: dict[str, Any] = {
    "device": "cpu",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "attention_backend": "torch_native",
    "grammar_backend": "none",
    "dtype": "float32",
    "max_total_tokens": 8192,
    "max_running_requests": 16,
    "disable_radix_cache": True,
    "random_seed": 1,
    "decode_log_interval": 1,
}
ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    # Where CUDA's torch finds NCCL, it wants a GPU for it.
    "SGLANG_NCCL_SO_PATH": "/nonexistent.so",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(STUBS),
}


DEEP = {"pp_size": 2, "pp_async_batch_depth": 2}


def cpu_study(folder: Path) -> dict[str, Any]:
    """The study's document; its model is made in `folder`."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    return {
        "name": "tiny-llama-cpu",
        "engine": {
            "kind": "sglang",
            "model": str(model),
            "python": PYTHON,
            "args": dict(ARGS),
            "env": dict(ENV),
        },
        "hardware": {"gpus": 2},
        "parameters": {
            "pp_size": {"choices": [1, 2]},
            "pp_async_batch_depth": {"choices": [0, 2], "when": "pp_size > 1"},
            "pp_max_micro_batch_size": {"choices": [2, 4, 8], "when": "pp_size > 1"},
        },
        "baselines": [
            {"name": "pp1", "pp_size": 1},
            {"name": "cap4", **DEEP, "pp_max_micro_batch_size": 4},
            {"name": "cap2", **DEEP, "pp_max_micro_batch_size": 2},
            {"name": "pp2-auto", "pp_size": 2, "pp_async_batch_depth": 0},
        ],
        "workload": {"prompt_tokens": 16, "output_tokens": 48, "concurrency": [2, 8]},
        # Each start takes minutes: one is left to measure a baseline again.
        "search": {"trials": 5, "seed": 0, "launches": 5},
        "measure": {"precision": 0.4, "min_window_s": 5, "max_window_s": 60, "finalists": 0},
    }
