"""What the server says of itself: the JSON of /server_info, /model_info, /v1/models."""

from __future__ import annotations

from collections.abc import Sequence

from runner.engines.emulator.flag_table import VERSION
from runner.engines.emulator.server import EmulatedServer
from runner.engines.emulator.setup import ServerSetup, cuda_graph_config
from runner.machine.shape import memory_used_bytes, stage_weight_bytes

GB = 1024**3
# What a scheduler needs beside the prompt of the longest request.
RESERVED_TOKENS = 6
OTHER_GRAPHS = ("prefill", "target_verify", "draft_prefill", "draft_decode", "draft_extend")


def server_info(servers: Sequence[EmulatedServer]) -> dict[str, object]:
    """The resolved arguments, and the live state of the scheduler.

    As in SGLang, the arguments at the top do not know what the scheduler decided: an automatic
    cap or max_running_requests is null there and has its value in `internal_states`.
    """
    setup = servers[0].setup
    args: dict[str, object] = {**setup.args, "cuda_graph_config": cuda_graph_config(setup)}
    return {
        **args,
        "launch_command": setup.command_line,
        "status": "ready",
        "max_total_num_tokens": setup.token_capacity,
        "max_req_input_len": max_input_tokens(setup),
        "startup_time": startup_time(setup, has_tokenizer=True),
        "internal_states": [_internal_state(server, args) for server in servers],
        "version": VERSION,
        "frontend": "python",
    }


def model_info(server: EmulatedServer) -> dict[str, object]:
    """What is served."""
    setup = server.setup
    return {
        "model_path": setup.args["model_path"],
        "served_model_name": setup.model_name,
        "tokenizer_path": setup.args["tokenizer_path"],
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": setup.args["weight_version"],
        "load_format": setup.args["load_format"],
        "reasoning_parser": setup.args["reasoning_parser"],
        "tool_call_parser": setup.args["tool_call_parser"],
        "disaggregation_mode": setup.args["disaggregation_mode"],
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "emulated",
        "architectures": ["EmulatedForCausalLM"],
    }


def models(server: EmulatedServer) -> dict[str, object]:
    """The one model, as OpenAI lists it."""
    return {"object": "list", "data": [model_card(server)]}


def model_card(server: EmulatedServer) -> dict[str, object]:
    """The one model."""
    setup = server.setup
    return {
        "id": setup.model_name,
        "object": "model",
        "created": int(server.date()),
        "owned_by": "sglang",
        "root": setup.model_name,
        "parent": None,
        "max_model_len": setup.context_len,
    }


def max_input_tokens(setup: ServerSetup) -> int:
    """The longest prompt that is taken."""
    return max(1, min(setup.context_len, setup.token_capacity) - RESERVED_TOKENS)


def startup_time(setup: ServerSetup, *, has_tokenizer: bool = False) -> dict[str, object]:
    """Seconds of the start; only the main process knows the whole."""
    phases = setup.phases
    scheduler_s = phases.total_s - phases.import_s - phases.warmup_s
    times: dict[str, object] = {
        "load_weight": phases.load_weights_s,
        "kv_cache_allocation": phases.kv_cache_s,
        "scheduler_e2e": scheduler_s,
        "cuda_graph": {
            "decode": phases.decode_graphs_s,
            **dict.fromkeys(OTHER_GRAPHS, 0.0),
            "prefill": phases.prefill_graphs_s,
        },
    }
    if has_tokenizer:
        times["tokenizer_e2e"] = phases.import_s + scheduler_s
    return times


def _internal_state(server: EmulatedServer, args: dict[str, object]) -> dict[str, object]:
    setup = server.setup
    memory = memory_gb(setup)
    return {
        **args,
        "pp_max_micro_batch_size": server.cap,
        "world_size": setup.shape.gpus,
        "startup_time": startup_time(setup),
        "effective_max_running_requests_per_dp": setup.resolved.max_running_requests,
        "last_gen_throughput": server.batches.gen_throughput,
        "memory_usage": {
            "weight": memory["weight"],
            "kvcache": memory["kvcache"],
            "token_capacity": setup.token_capacity,
            "token_capacity_swa": None,
            "graph": {"decode": memory["graph"], **dict.fromkeys(OTHER_GRAPHS, 0.0)},
        },
        "decode_cuda_graph_bs": list(setup.graph_sizes),
        "decode_cuda_graph_memory_gb": memory["graph"],
    }


def memory_gb(setup: ServerSetup) -> dict[str, float]:
    """What one GPU holds, in GiB, by what it is for."""
    profile = setup.profile
    weights = stage_weight_bytes(profile, setup.shape)
    graphs = profile.memory.graph_size_bytes * len(setup.graph_sizes)
    total = memory_used_bytes(profile, setup.shape)
    kv_cache = total - weights - graphs - profile.memory.context_bytes
    return {
        "weight": round(weights / GB, 3),
        "kvcache": round(kv_cache / GB, 3),
        "graph": round(graphs / GB, 3),
    }
