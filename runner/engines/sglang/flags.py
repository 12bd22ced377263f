"""Neutral parameter names to the command line of the SGLang at hand, and its answers back.

Neutral names are SGLang's own, with underscores, but for what has changed its name between
versions: `cuda_graph` and `cuda_graph_max_bs` mean the decode graphs, `attn_dp_size` the
data-parallel groups of the attention layers. Which spelling a version has, its --help says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

from runner.engines.sglang.environment import Flag, ServerEnvironment, Takes
from runner.errors import Infeasible
from runner.machine.shape import PARTITION, PARTITION_VARIABLE
from runner.study_file.mistake import near_match, show
from runner.study_file.server_args import ALIASES, KNOWN, OWNED
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

DECODE_BACKEND = "--cuda-graph-backend-decode"  # since 0.5.14
NO_GRAPHS = "--disable-cuda-graph"
ATTENTION_DP = "--enable-dp-attention"  # with --dp-size; since 0.5.23 --attn-dp-size alone
SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "cuda_graph": (DECODE_BACKEND, NO_GRAPHS),
    "cuda_graph_max_bs": ("--cuda-graph-max-bs-decode", "--cuda-graph-max-bs"),
    "attn_dp_size": ("--attn-dp-size", ATTENTION_DP),
}
"""The flags of neutral names, newest first: the first that a version has is used."""

OVERRULED = {"cuda_graph_config": ("cuda_graph", "cuda_graph_max_bs")}
"""SGLang's own parameters that overrule neutral ones when both are given."""


def render(server_args: Params, environment: ServerEnvironment) -> list[str]:
    """The words of the command line, in the order of the parameters.

    Raises Infeasible for what this SGLang has no words for.
    """
    if wrong := clash(server_args, environment):
        raise Infeasible(wrong)
    words: list[str] = []
    for name, value in server_args.items():
        if name in VARIABLES:
            continue
        if wrong := mistake(name, value, environment):
            raise Infeasible(f"{name}: {wrong}")
        if not (name == "dp_size" and _is_told_by_attention(server_args, environment)):
            words += _words(name, value, environment)
    return words


def variables(server_args: Params) -> dict[str, str]:
    """The environment variables that stand for parameters without a flag."""
    return {VARIABLES[name]: str(server_args[name]) for name in server_args if name in VARIABLES}


def mistake(name: str, value: ParamValue, environment: ServerEnvironment) -> str | None:
    """Why this server cannot be given this parameter; None when it can."""
    if name in VARIABLES:
        return None
    if name in OWNED:
        return "is set by this program; leave it out"
    flag = flag_of(name, environment)
    if flag is None:
        return _no_flag(name, environment)
    listed = environment.by_name[flag]
    neutral = _neutral_spelling(name, listed)
    if neutral is not None:
        return f"is written {neutral!r} here"
    return None if name in SPELLINGS else _value_mistake(value, listed)


def clash(names: Iterable[str], environment: ServerEnvironment) -> str | None:
    """Why parameters of one setting contradict each other; None when they do not.

    `names` are those of the setting, or the setting itself.
    """
    given = tuple(names)
    for name, others in OVERRULED.items():
        for other in others:
            if name in given and other in given:
                return f"{name} overrules {other}: give one of them"
    flags = {name: flag for name in given if (flag := flag_of(name, environment)) is not None}
    for one, other in combinations(flags, 2):
        listed = environment.by_name[flags[one]]
        if listed == environment.by_name[flags[other]]:
            return f"{one} and {other} are the same flag ({listed.names[0]}): give one of them"
    if isinstance(names, Mapping) and _above_one(names, "dp_size", "attn_dp_size"):
        return "dp_size and attn_dp_size cannot both be above 1 in one server"
    return None


def flag_of(name: str, environment: ServerEnvironment) -> str | None:
    """The flag that a parameter is given by, exactly as this server spells it; None: it has none.

    A parameter of the environment has none either.
    """
    spellings = SPELLINGS.get(name, ("--" + name.replace("_", "-"),))
    return next((each for each in spellings if each in environment.by_name), None)


def _words(name: str, value: ParamValue, environment: ServerEnvironment) -> list[str]:
    flag = flag_of(name, environment)
    if flag is None:
        return []
    if name in SPELLINGS and flag == DECODE_BACKEND:
        return [flag, "full" if value else "disabled"]
    if name in SPELLINGS and flag == NO_GRAPHS:
        return [] if value else [flag]
    if name in SPELLINGS and flag == ATTENTION_DP:
        return [flag, "--dp-size", str(value)] if value != 1 else []
    if value is True:
        return [flag]
    if value is False:
        off = flag.replace("--", "--no-", 1)  # of a switch that is on by default
        return [off] if off in environment.by_name[flag].names else []
    if isinstance(value, str) and value.startswith("-"):
        return [f"{flag}={value}"]  # or argparse takes the value for a flag
    return [flag, str(value)]


def _is_told_by_attention(args: Params, environment: ServerEnvironment) -> bool:
    """Whether --dp-size is taken by attention-DP, in versions before it had a flag of its own."""
    is_old = flag_of("attn_dp_size", environment) == ATTENTION_DP
    return is_old and args.get("attn_dp_size", 1) != 1


def _above_one(args: Mapping[str, object], *names: str) -> bool:
    return all(args.get(name, 1) != 1 for name in names)


def _no_flag(name: str, environment: ServerEnvironment) -> str:
    if name in KNOWN:
        return f"{environment} has no flag for it"
    known = {flag.removeprefix("--").replace("-", "_") for flag in environment.by_name}
    names = sorted(known - OWNED - set(ALIASES) | {n for n in SPELLINGS if flag_of(n, environment)})
    starts = [each for each in names if each.startswith(name)]
    close = near_match(name, starts or names)
    if close is None and starts:
        close = starts[0]
    guess = f"; did you mean {close!r}?" if close else ""
    return f"{environment} has no flag --{name.replace('_', '-')}{guess}"


def _neutral_spelling(name: str, flag: Flag) -> str | None:
    """The neutral name of a flag that was given by another of its spellings."""
    if name in KNOWN:
        return None
    others = (each.removeprefix("--").replace("-", "_") for each in flag.names)
    return next((each for each in others if each in KNOWN and each != name), None)


def _value_mistake(value: ParamValue, flag: Flag) -> str | None:
    if isinstance(value, bool):
        wrong = f"found {show(value)}, expected a value"
        return wrong if flag.takes is Takes.VALUE else None
    if flag.takes is Takes.NOTHING:
        return f"found {show(value)}, expected true or false"
    if flag.choices and str(value) not in flag.choices:
        return f"found {show(value)}, expected one of {', '.join(flag.choices)}"
    return None


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
            bs = _first(_decode_graphs(info).get("max_bs"), info.get("cuda_graph_max_bs_decode"))
            return _first(bs, info.get("cuda_graph_max_bs"))
        case "dp_size":
            return 1 if _has_old_attention_dp(info) else info.get(name)
        case "attn_dp_size":
            return info.get("dp_size") if _has_old_attention_dp(info) else info.get(name)
        case _:
            return info.get(name)


def _live(info: Mapping[str, object], name: str) -> object:
    states = internal_states(info)
    return states[0].get(name) if states else None


def _has_old_attention_dp(info: Mapping[str, object]) -> bool:
    """Whether dp_size means attention-DP, as it did before that had a name of its own."""
    return bool(info.get("enable_dp_attention")) and "attn_dp_size" not in info


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
