"""What a command line comes to on a profile: the server's settings, resolved as SGLang does."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from runner.engines.emulator.answers import GenerateOptions
from runner.engines.emulator.faults.active import ActiveFaults
from runner.engines.emulator.flag_table import ArgValue
from runner.engines.emulator.flags import Flags, setting_values
from runner.machine.graphs import NO_GRAPHS, graph_backend, graph_sizes
from runner.machine.hardware import Profile
from runner.machine.shape import (
    PARTITION_VARIABLE,
    ResolvedShape,
    ServerShape,
    highest_live_cap,
    partition_of,
    prefill_sizes,
    resolve,
    uses_graph,
)
from runner.machine.start import StartPhases, start_phases

SIZES = (
    *("tp_size", "pp_size", "dp_size", "ep_size", "pp_max_micro_batch_size"),
    *("max_running_requests", "max_total_tokens", "stream_interval", "decode_log_interval"),
)


@dataclass(frozen=True, slots=True)
class ServerSetup:
    """Everything about one server that is decided before it runs.

    `args` are what /server_info shows at its top: as asked, or as SGLang's argument resolution
    fills them in. What SGLang's scheduler decides later is in `resolved`.
    """

    profile: Profile
    args: Mapping[str, ArgValue]
    command_line: str
    shape: ServerShape
    resolved: ResolvedShape
    phases: StartPhases
    graph_sizes: tuple[int, ...]
    model_name: str
    context_len: int
    random_seed: int
    faults: ActiveFaults
    attempt: int

    @property
    def token_capacity(self) -> int:
        """Tokens that the KV cache holds."""
        return self.resolved.max_total_tokens

    @property
    def dp_size(self) -> int:
        """Replicas behind the one port, each of `shape`."""
        return self.whole("dp_size")

    @property
    def highest_cap(self) -> int:
        """Up to where the micro-batch cap can be set live."""
        return highest_live_cap(self.resolved, self.shape)

    @property
    def prefill_graph_sizes(self) -> tuple[int, ...]:
        """The numbers of prompt tokens whose prefills are captured; empty: none."""
        return prefill_sizes(self.profile, self.shape, self.resolved.chunked_prefill_size)

    @property
    def prefill_backend(self) -> str:
        """What runs the graphs of prefills."""
        asked = self.shape.cuda_graph_backend_prefill or "breakable"
        return asked if self.prefill_graph_sizes else NO_GRAPHS

    @property
    def graph_label(self) -> str:
        """The device, as batch lines name it."""
        return "cpu" if self.args["device"] == "cpu" else "cuda"

    @property
    def has_prefix_cache(self) -> bool:
        return not self.args["disable_radix_cache"]

    @property
    def has_tokenizer(self) -> bool:
        return not self.args["skip_tokenizer_init"]

    @property
    def generate_options(self) -> GenerateOptions:
        """How /generate answers."""
        return GenerateOptions(
            has_text=self.has_tokenizer,
            is_incremental=bool(self.args["incremental_streaming_output"]),
            has_times=bool(self.args["enable_metrics"]),
        )

    def number(self, name: str) -> int | None:
        """A whole-number argument."""
        value = self.args[name]
        return value if isinstance(value, int) else None

    def whole(self, name: str) -> int:
        """A whole-number argument that has a default."""
        value = self.number(name)
        if value is None:
            raise KeyError(name)
        return value

    def text(self, name: str) -> str | None:
        """A text argument."""
        value = self.args[name]
        return value if isinstance(value, str) else None


def set_up(flags: Flags, profile: Profile) -> ServerSetup:
    """Resolve a command line; raises ValueError for what SGLang refuses at once."""
    args = flags.server_args
    _check(args)
    shape = _shape(args)
    resolved = resolve(profile, shape)
    seed = args["random_seed"]
    random_seed = seed if isinstance(seed, int) else random.SystemRandom().randrange(2**30)
    model_name = str(args["served_model_name"] or args["model_path"] or profile.model.name)
    context_len = args["context_length"]
    sizes = graph_sizes(resolved.cuda_graph_max_bs) if uses_graph(profile, shape) else ()
    shown: dict[str, ArgValue] = {
        **args,
        **_resolved_args(shape, resolved, sizes),
        "random_seed": random_seed,
        "model_path": args["model_path"] or profile.model.name,
        "tokenizer_path": args["tokenizer_path"] or args["model_path"] or profile.model.name,
        "served_model_name": model_name,
        "device": args["device"] or "cuda",
        "chunked_prefill_size": args["chunked_prefill_size"] or resolved.chunked_prefill_size,
    }
    return ServerSetup(
        profile=profile,
        args=shown,
        command_line=flags.command_line,
        shape=shape,
        resolved=resolved,
        phases=start_phases(profile, shape),
        graph_sizes=sizes,
        model_name=model_name,
        context_len=context_len if isinstance(context_len, int) else profile.model.context_length,
        random_seed=random_seed,
        faults=_faults(flags, shown, resolved, sizes),
        attempt=flags.identity.attempt,
    )


def _faults(
    flags: Flags, args: Mapping[str, ArgValue], resolved: ResolvedShape, sizes: tuple[int, ...]
) -> ActiveFaults:
    """Which faults this launch gets; conditions see what the settings were resolved to."""
    values = setting_values(
        args,
        cuda_graph=bool(sizes),
        cuda_graph_max_bs=resolved.cuda_graph_max_bs,
        pp_max_micro_batch_size=resolved.pp_max_micro_batch_size,
        max_running_requests=resolved.max_running_requests,
        max_total_tokens=resolved.max_total_tokens,
    )
    return ActiveFaults.choose(flags.faults, flags.fault_seed, flags.identity.words, values)


def cuda_graph_config(setup: ServerSetup) -> dict[str, dict[str, object]]:
    """The resolved graph settings, in SGLang's shape."""
    decode: dict[str, object] = {
        "backend": "full" if setup.graph_sizes else NO_GRAPHS,
        "max_bs": setup.resolved.cuda_graph_max_bs,
        "bs": list(setup.graph_sizes),
        "tc_compiler": "eager",
    }
    prefill: dict[str, object] = {
        "backend": setup.prefill_backend,
        "max_bs": setup.resolved.chunked_prefill_size,
        "tc_compiler": "eager",
    }
    return {"decode": decode, "prefill": prefill}


def _resolved_args(
    shape: ServerShape, resolved: ResolvedShape, sizes: tuple[int, ...]
) -> dict[str, ArgValue]:
    """What SGLang's argument resolution rewrites."""
    rewritten: dict[str, ArgValue] = {
        "attention_backend": resolved.attention_backend,
        "mem_fraction_static": resolved.mem_fraction_static,
        "disable_overlap_schedule": shape.pp_size > 1,
    }
    if not sizes:
        rewritten["cuda_graph_backend_decode"] = NO_GRAPHS
    return rewritten


def _shape(args: Mapping[str, ArgValue]) -> ServerShape:
    numbers = {name: value for name, value in args.items() if isinstance(value, int)}
    sizes = args["cuda_graph_bs_decode"]
    max_bs = max(sizes) if isinstance(sizes, list) else numbers.get("cuda_graph_max_bs_decode")
    backend, fraction = args["attention_backend"], args["mem_fraction_static"]
    shape = ServerShape(
        tp_size=numbers["tp_size"],
        pp_size=numbers["pp_size"],
        ep_size=numbers["ep_size"],
        pp_async_batch_depth=numbers["pp_async_batch_depth"],
        pp_max_micro_batch_size=numbers.get("pp_max_micro_batch_size"),
        max_running_requests=numbers.get("max_running_requests"),
        chunked_prefill_size=numbers.get("chunked_prefill_size"),
        cuda_graph=graph_backend(args, "decode") != NO_GRAPHS,
        cuda_graph_max_bs=max_bs,
        cuda_graph_backend_prefill=graph_backend(args, "prefill"),
        attention_backend=backend if isinstance(backend, str) else None,
        mem_fraction_static=fraction if isinstance(fraction, float) else None,
        max_total_tokens=numbers.get("max_total_tokens"),
        pp_layer_partition=partition_of(os.environ.get(PARTITION_VARIABLE)),
    )
    if shape.chunked_prefill_size == -1:  # no chunks: a prefill is bounded by this alone
        return replace(shape, chunked_prefill_size=numbers["max_prefill_tokens"])
    return shape


def _check(args: Mapping[str, ArgValue]) -> None:
    for name in SIZES:
        value = args[name]
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    depth = args["pp_async_batch_depth"]
    if isinstance(depth, int) and depth < 0:
        raise ValueError(f"pp_async_batch_depth must be non-negative, got {depth}")
    if args["enable_dp_attention"] and args["dp_size"] != 1:
        raise ValueError("enable_dp_attention is not supported by the emulated server")
    chunk, page = args["chunked_prefill_size"], args["page_size"]
    if isinstance(chunk, int) and isinstance(page, int) and chunk > 0 and chunk % page:
        raise ValueError(f"chunked_prefill_size {chunk} must be divisible by page_size {page}")
