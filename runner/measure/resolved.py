"""What was asked of a server against what it says that it runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from runner.launch import CAP, MAX_RUNNING
from runner.trial import Params, ParamValue

GRAPH, GRAPH_MAX_BS = "cuda_graph", "cuda_graph_max_bs"
AUTO = "auto"
CPU = "cpu"


def differences(asked: Params, resolved: Params) -> Mapping[str, tuple[ParamValue, ParamValue]]:
    """Parameters that run with another value than asked for: name to (asked, resolved).

    `resolved` is what /server_info tells after the start and after the live parameters were set.
    Decode graphs are on where nothing else is asked, but for servers on a CPU. What has no meaning
    is left out: the largest graph without graphs; so is `auto`, which asks for nothing. Without a
    pipeline a cap may stand for max_running_requests (launch.py).
    """
    has_graphs = CPU not in (asked.get("device"), resolved.get("device"))
    wanted: dict[str, ParamValue] = {**({GRAPH: True} if has_graphs else {}), **asked}
    if "disable_cuda_graph" in asked:
        wanted[GRAPH] = not asked["disable_cuda_graph"]
    if resolved.get("pp_size", 1) == 1 and wanted.get(MAX_RUNNING) == resolved.get(CAP):
        wanted.pop(MAX_RUNNING, None)
    if not resolved.get(GRAPH, True):
        wanted.pop(GRAPH_MAX_BS, None)
    return {
        name: (value, resolved[name])
        for name, value in wanted.items()
        if name in resolved and value not in (resolved[name], AUTO)
    }


def difference_words(found: Mapping[str, tuple[ParamValue, ParamValue]]) -> list[str]:
    """`attention_backend flashinfer was asked for, triton runs`, one for each."""
    return [_words(name, *values) for name, values in found.items()]


def _words(name: str, asked: ParamValue, runs: ParamValue) -> str:
    if name == GRAPH and asked:
        return "decode CUDA graphs are off, though nobody switched them off"
    return f"{name} {_text(asked)} was asked for, {_text(runs)} runs"


def _text(value: ParamValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
