"""How a setting is written in a table, a run name or a log line: `pp8 d8 cap4 graph triton`."""

from __future__ import annotations

from runner.trial import Params, ParamValue

SIZES = {"pp_size": "pp", "tp_size": "tp", "dp_size": "dp", "ep_size": "ep"}
NUMBERS = {
    "pp_async_batch_depth": "d",
    "pp_max_micro_batch_size": "cap",
    "max_running_requests": "run",
    "chunked_prefill_size": "chunk",
    "cuda_graph_max_bs": "bs",
    "mem_fraction_static": "mem",
}
WORDS = frozenset({"attention_backend"})
SHORT = {"cuda_graph_backend_decode": "graph", "cuda_graph_backend_prefill": "prefill-graph"}
ORDER = (*SIZES, *NUMBERS, "cuda_graph", *SHORT, *WORDS)


def setting_label(params: Params) -> str:
    """A setting in short; unknown parameters stay `name=value`, sizes of 1 are left out.

    Where nothing else is left, one size is named: `tp1`, or `pp1` without a tp_size.
    """
    ordered = [name for name in ORDER if name in params]
    ordered += [name for name in params if name not in ordered]
    words = [word for name in ordered if (word := _word(name, params[name]))]
    if words:
        return " ".join(words)
    lone = next((SIZES[name] for name in ("tp_size", *SIZES) if name in params), None)
    return f"{lone}1" if lone else "defaults"


def _word(name: str, value: ParamValue) -> str:
    if name in SIZES:
        return "" if value == 1 else f"{SIZES[name]}{value}"
    if name == "cuda_graph":
        return "graph" if value else "eager"
    if name in WORDS:
        return str(value)
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    if name in NUMBERS:
        return f"{NUMBERS[name]}{text}"
    return f"{SHORT.get(name, name)}={text.lower()}"
