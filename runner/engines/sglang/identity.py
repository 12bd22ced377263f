"""What a server resolved to, without what differs from start to start. Pure.

Two starts with equal states run the same: their flags may differ, as a default and the same value
written out do. Everything /server_info has counts, but for what is named here.
"""

from __future__ import annotations

from collections.abc import Mapping

from runner.engines.sglang.flags import resolved_params
from runner.launch import CAP
from runner.trial import Params

OF_ONE_START = frozenset(
    (
        *("host", "port", "nccl_port", "grpc_port", "dist_init_addr", "base_gpu_id", "random_seed"),
        *("engine_info_bootstrap_port", "kv_events", "kv_event_sources"),
        *("launch_command", "status", "startup_time", "internal_states"),
        *("max_total_num_tokens", "max_req_input_len", "api_key", "admin_api_key", "ssl_keyfile"),
        *("log_level", "log_level_http", "log_requests", "log_requests_level", "show_time_cost"),
        *("log_requests_format", "log_requests_target", "crash_dump_folder", "file_storage_path"),
        *("decode_log_interval", "gc_warning_threshold_secs"),
        "uvicorn_access_log_exclude_prefixes",
    )
)
"""Addresses, pids, keys, seeds, times, readings of memory, and what is only logged."""

SETTLED_LATER = frozenset((CAP, "max_running_requests"))
"""Shown as asked; what the scheduler made of them is in the live state."""

IN_GRAPH_CONFIG = frozenset(("cuda_graph_max_bs_decode", "cuda_graph_backend_decode"))
"""Shown as asked; what became of them is in `cuda_graph_config`."""


def lasting_state(info: Mapping[str, object], server_args: Params) -> dict[str, object]:
    """The resolved arguments of one server, but for the cap, which is set live.

    Args:
        info: The body of /server_info.
        server_args: What the server was started with: what it does not show counts as asked.
    """
    asked_only = SETTLED_LATER | (IN_GRAPH_CONFIG if "cuda_graph_config" in info else frozenset())
    left_out = OF_ONE_START | asked_only
    resolved = resolved_params(info, server_args)
    told = resolved.keys() | info.keys()
    return {
        "args": {name: value for name, value in info.items() if name not in left_out},
        "max_running_requests": resolved.get("max_running_requests"),
        "untold": {name: value for name, value in server_args.items() if name not in told},
    }


def cap_of(info: Mapping[str, object]) -> object:
    """The micro-batch cap that a server has until another one is set."""
    return resolved_params(info).get(CAP)
