"""One setting on the study's profile: the launch it needs, and whether that can start. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from runner.errors import ConfigError
from runner.launch import CAP, LaunchPlan, as_int, live_cap, plan_launch, world_size
from runner.machine.graphs import GRAPH_BACKENDS
from runner.machine.hardware import Profile
from runner.machine.profile import load_profile, profile_names
from runner.machine.shape import (
    Refusal,
    RefusalKind,
    ResolvedShape,
    ServerShape,
    highest_live_cap,
    refused,
    resolve,
    shape_of,
    slots,
)
from runner.settings import StudySettings
from runner.trial import Params, ParamValue

PP_SPECULATIVE = "SGLANG_ENABLE_PP_SPEC"
EXCHANGE = "moe_a2a_backend"  # with one, SGLang sets ep_size itself
GRAPH_PARAMETERS = frozenset({"cuda_graph_backend_decode", "cuda_graph_backend_prefill"})
"""Modelled as far as they turn graphs on or off: other values are kept apart all the same."""

MODELLED = frozenset(
    {
        *(field.name for field in fields(ServerShape)),
        *("dp_size", "disable_prefill_cuda_graph", *GRAPH_PARAMETERS),
    }
)
# What changes no throughput, latency or watt, and so need not be modelled.
UNTIMED = frozenset(
    {
        *("trust_remote_code", "model_path", "tokenizer_path", "served_model_name", "load_format"),
        *("random_seed", "log_level", "enable_metrics", "grammar_backend", "skip_tokenizer_init"),
        *("disable_cuda_graph", "watchdog_timeout", "fault", "fault_seed", "device"),
    }
)


def kept_apart(args: Params) -> tuple[tuple[str, ParamValue], ...]:
    """What may set two servers apart although the model has the same for both."""
    names = (n for n in args if n not in MODELLED or n in GRAPH_PARAMETERS)
    return tuple(sorted((name, args[name]) for name in names))


def not_modelled(names: Iterable[str]) -> tuple[str, ...]:
    """The parameters that the model does not know, though they may matter, each once."""
    return tuple(dict.fromkeys(n for n in names if n not in MODELLED and n not in UNTIMED))


@dataclass(frozen=True, slots=True)
class PlannedSetting:
    """A setting that can start: its launch, the shape of each server, and the cap set live."""

    params: Params
    launch: LaunchPlan
    shape: ServerShape
    resolved: ResolvedShape
    dp_size: int

    @property
    def cap(self) -> int:
        """The cap that holds under load."""
        return live_cap(self.launch.live, self.resolved.pp_max_micro_batch_size)

    @property
    def most_running(self) -> int:
        """Requests that one server runs at once, at most."""
        return min(slots(self.shape) * self.cap, self.resolved.max_running_requests)

    @property
    def engines(self) -> int:
        """Servers of the launch, each data-parallel copy counted."""
        return self.launch.replicas * self.dp_size


def study_profile(settings: StudySettings) -> Profile:
    """The profile a prediction is made from; raises ConfigError when the study names none."""
    if settings.engine.profile is None:
        raise ConfigError(
            "engine.profile: missing; a prediction needs a hardware profile. Choose one of "
            f"{', '.join(profile_names())}, or give the path of a .yaml file: "
            "--set engine.profile=NAME"
        )
    return load_profile(settings.engine.profile)


def plan_setting(
    settings: StudySettings, profile: Profile, params: Params
) -> PlannedSetting | Refusal:
    """The launch that the study would start for a setting, or why it cannot start.

    As in a trial, a launch whose cap is searched gets room for every cap of the space.
    """
    args: Params = {**settings.engine.args, **params}
    reason = (
        _refused_gpus(settings, profile, args)
        or refused_rules(settings.engine.env, args)
        or _refused_graphs(args)
    )
    if reason is not None:
        return reason
    launch = plan_launch(settings, params)
    shape = shape_of(launch.server_args)
    reason = refused(profile, shape)
    if reason is not None:
        return reason
    resolved = resolve(profile, shape)
    limit = highest_live_cap(resolved, shape)
    cap = launch.live.get(CAP)
    if cap is not None and as_int(cap) > limit:
        return Refusal(
            RefusalKind.MEMORY,
            f"{CAP} {cap} is out of the valid range [1, {limit}]: the KV cache of "
            f"{resolved.max_total_tokens} tokens allows {resolved.max_running_requests} requests",
        )
    dp_size = as_int(launch.server_args.get("dp_size", 1))
    return PlannedSetting(params, launch, shape, resolved, dp_size)


def _refused_gpus(settings: StudySettings, profile: Profile, args: Params) -> Refusal | None:
    hardware, world = settings.hardware, world_size(args)
    if world > hardware.gpus:
        return Refusal(
            RefusalKind.GPUS,
            f"a server of {world} GPUs does not fit on the {hardware.gpus} of hardware.gpus",
        )
    if hardware.gpus // world * world > profile.gpus:
        return Refusal(
            RefusalKind.GPUS,
            f"hardware.gpus is {hardware.gpus}, {profile.name} has {profile.gpus}",
        )
    return None


def _refused_graphs(args: Params) -> Refusal | None:
    """What the --help of a real server says of graphs; versions differ in it."""
    if "cuda_graph" in args and "cuda_graph_backend_decode" in args:
        return _rule("cuda_graph and cuda_graph_backend_decode are the same flag: give one of them")
    for name in sorted(GRAPH_PARAMETERS):
        value = args.get(name)
        if value is not None and value not in GRAPH_BACKENDS:
            return _rule(f"{name} {value}: expected one of {', '.join(GRAPH_BACKENDS)}")
    return None


def refused_rules(env: Mapping[str, str], args: Params) -> Refusal | None:
    """What SGLang itself refuses whatever the machine."""
    pp_size, tp_size = as_int(args.get("pp_size", 1)), as_int(args.get("tp_size", 1))
    attn_dp = as_int(args.get("attn_dp_size", 1))
    if pp_size > 1 and args.get("speculative_algorithm") and env.get(PP_SPECULATIVE) != "1":
        return _rule(f"speculative decoding does not run with pp_size {pp_size}")
    if pp_size > 1 and as_int(args.get("moe_dp_size", 1)) > 1:
        return _rule(f"moe_dp_size does not go with pp_size {pp_size}")
    if attn_dp > 1 and as_int(args.get("dp_size", 1)) > 1:
        return _rule("dp_size and attn_dp_size cannot both be above 1")
    if tp_size % attn_dp:
        return _rule(f"attn_dp_size {attn_dp} does not divide tp_size {tp_size}")
    if args.get("enable_torch_compile") and args.get("disable_cuda_graph_padding"):
        return _rule("enable_torch_compile and disable_cuda_graph_padding exclude each other")
    chunk, page = as_int(args.get("chunked_prefill_size", -1)), as_int(args.get("page_size", 1))
    if chunk > 0 and chunk % page:
        return _rule(f"chunked_prefill_size {chunk} is no multiple of page_size {page}")
    ep_size = as_int(args.get("ep_size", 1))
    if ep_size > 1 and tp_size % ep_size and not args.get(EXCHANGE):
        text = f"tp_size {tp_size} must be a multiple of ep_size {ep_size}"
        return Refusal(RefusalKind.EXPERTS, text)
    return None


def _rule(text: str) -> Refusal:
    return Refusal(RefusalKind.VERSION, text)
