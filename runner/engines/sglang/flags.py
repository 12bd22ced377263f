"""Neutral parameter names to the command line of SGLang 0.5.23, and its answers back.

Neutral names are SGLang's own, with underscores, but for what has changed its name between
versions: `cuda_graph` and `cuda_graph_max_bs` mean the decode graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from runner.machine.shape import PARTITION, PARTITION_VARIABLE
from runner.trial import Params, ParamValue

RESOLVED_NAMES = (
    "tp_size",
    "pp_size",
    "dp_size",
    "ep_size",
    "pp_async_batch_depth",
    "pp_max_micro_batch_size",
    "max_running_requests",
    "max_total_tokens",
    "chunked_prefill_size",
    "mem_fraction_static",
    "attention_backend",
    "cuda_graph",
    "cuda_graph_max_bs",
)
"""What `resolved_params` always reports, as far as the server tells it."""

VARIABLES = {PARTITION: PARTITION_VARIABLE}
"""Parameters that SGLang reads from its environment."""

_RENAMED = {"cuda_graph_max_bs": "cuda-graph-max-bs-decode"}


def render(server_args: Params) -> list[str]:
    """The flags for SGLang 0.5.23, in the order of the parameters."""
    return [
        word
        for name, value in server_args.items()
        if name not in VARIABLES
        for word in _flag(name, value)
    ]


def environment(server_args: Params) -> dict[str, str]:
    """The environment variables that stand for parameters without a flag."""
    return {VARIABLES[name]: str(server_args[name]) for name in server_args if name in VARIABLES}


def _flag(name: str, value: ParamValue) -> list[str]:
    if name == "cuda_graph":
        return ["--cuda-graph-backend-decode", "full" if value else "disabled"]
    flag = "--" + _RENAMED.get(name, name.replace("_", "-"))
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, str) and value.startswith("-"):
        return [f"{flag}={value}"]  # or argparse takes the value for a flag
    return [flag, str(value)]


def resolved_params(server_info: Mapping[str, object], names: Iterable[str] = ()) -> Params:
    """What runs, as /server_info tells it, under neutral names.

    Args:
        server_info: The body of /server_info.
        names: Further parameters to report, besides RESOLVED_NAMES.
    """
    resolved: dict[str, ParamValue] = {}
    for name in dict.fromkeys((*RESOLVED_NAMES, *names)):
        value = _resolve(server_info, name)
        if isinstance(value, bool | int | float | str):
            resolved[name] = value
    return resolved


def internal_states(server_info: Mapping[str, object]) -> tuple[Mapping[str, object], ...]:
    """The live state of each scheduler (one per data-parallel rank)."""
    states = server_info.get("internal_states")
    if not isinstance(states, list):
        return ()
    return tuple(state for state in states if isinstance(state, Mapping))


def _resolve(info: Mapping[str, object], name: str) -> object:
    match name:
        case "pp_max_micro_batch_size":
            return _first(_live(info, name), info.get(name))
        case "max_running_requests":
            return _first(_live(info, "effective_max_running_requests_per_dp"), info.get(name))
        case "max_total_tokens":
            return _first(info.get("max_total_num_tokens"), info.get(name))
        case "cuda_graph":
            return _has_decode_graphs(info)
        case "cuda_graph_max_bs":
            return _first(_decode_graphs(info).get("max_bs"), info.get("cuda_graph_max_bs_decode"))
        case _:
            return info.get(name)


def _live(info: Mapping[str, object], name: str) -> object:
    states = internal_states(info)
    return states[0].get(name) if states else None


def _has_decode_graphs(info: Mapping[str, object]) -> bool:
    backend = _first(_decode_graphs(info).get("backend"), info.get("cuda_graph_backend_decode"))
    if backend is not None:
        return backend != "disabled"
    return not (info.get("disable_cuda_graph") or info.get("disable_decode_cuda_graph"))


def _decode_graphs(info: Mapping[str, object]) -> Mapping[str, object]:
    config = info.get("cuda_graph_config")
    decode = config.get("decode") if isinstance(config, Mapping) else None
    return decode if isinstance(decode, Mapping) else {}


def _first(*values: object) -> object:
    return next((value for value in values if value is not None), None)
