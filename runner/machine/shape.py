"""A server's shape: its flags, what SGLang makes of them on a machine, and why it may refuse.

Pure. Rules are those of SGLang 0.5.23 as far as they decide what runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from runner.machine.graphs import NO_GRAPHS, graph_backend, graph_sizes, prefill_graph_sizes
from runner.machine.hardware import Profile
from runner.machine.memory import prefill_graphs_mib, static_fraction
from runner.trial import Params, ParamValue

GIGA = 1e9
BYTES_PER_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class ServerShape:
    """What the model needs to know of one server's flags; None: SGLang's default rule."""

    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    pp_async_batch_depth: int = 0
    pp_max_micro_batch_size: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    cuda_graph: bool = True
    cuda_graph_max_bs: int | None = None
    cuda_graph_backend_prefill: str | None = None
    attention_backend: str | None = None
    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    pp_layer_partition: tuple[int, ...] | None = None

    @property
    def gpus(self) -> int:
        """GPUs of this server."""
        return self.tp_size * self.pp_size


@dataclass(frozen=True, slots=True)
class ResolvedShape:
    """The same with every default filled in (what /server_info shows after start)."""

    pp_max_micro_batch_size: int
    max_running_requests: int
    chunked_prefill_size: int
    cuda_graph_max_bs: int
    attention_backend: str
    mem_fraction_static: float
    max_total_tokens: int

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens that one batch prefills at most; a size below 1 sets no limit."""
        return chunk_tokens(self.chunked_prefill_size)


class RefusalKind(StrEnum):
    """Why a server cannot start, as a kind."""

    SIZES = "sizes out of range"
    GPUS = "not enough GPUs"
    HEADS = "attention heads not divisible"
    LAYERS = "layers do not fit the stages"
    EXPERTS = "expert parallelism"
    BACKEND = "attention backend refused"
    MEMORY = "out of memory"
    VERSION = "refused by SGLang"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one server cannot start: the kind, and the whole reason for a person."""

    kind: RefusalKind
    text: str


@dataclass(frozen=True, slots=True)
class MemoryTier:
    """SGLang's defaults by GPU memory (below `below_gib`)."""

    below_gib: float
    chunked_prefill_size: int
    graph_max_bs: int
    graph_max_bs_tp4: int


MEMORY_TIERS = (
    MemoryTier(20, 2048, 8, 8),
    MemoryTier(35, 4096, 48, 160),
    MemoryTier(60, 4096, 32, 160),
    MemoryTier(90, 8192, 256, 512),
    MemoryTier(160, 8192, 256, 512),
    MemoryTier(float("inf"), 16384, 512, 512),
)
WIDE_TP = 4
NO_CHUNKS = 1 << 30
PARTITION = "pp_layer_partition"
PARTITION_VARIABLE = "SGLANG_PP_LAYER_PARTITION"


def shape_of(args: Params) -> ServerShape:
    """The shape of a server started with these neutral arguments; others do not matter here."""
    return ServerShape(
        tp_size=_whole(args.get("tp_size"), 1),
        pp_size=_whole(args.get("pp_size"), 1),
        ep_size=_whole(args.get("ep_size"), 1),
        pp_async_batch_depth=_whole(args.get("pp_async_batch_depth"), 0),
        pp_max_micro_batch_size=_optional(args.get("pp_max_micro_batch_size")),
        max_running_requests=_optional(args.get("max_running_requests")),
        chunked_prefill_size=_optional(args.get("chunked_prefill_size")),
        cuda_graph=bool(args.get("cuda_graph", graph_backend(args, "decode") != NO_GRAPHS)),
        cuda_graph_max_bs=_optional(args.get("cuda_graph_max_bs")),
        cuda_graph_backend_prefill=graph_backend(args, "prefill"),
        attention_backend=_text(args.get("attention_backend")),
        mem_fraction_static=_fraction(args.get("mem_fraction_static")),
        max_total_tokens=_optional(args.get("max_total_tokens")),
        pp_layer_partition=partition_of(args.get(PARTITION)),
    )


def slots(shape: ServerShape) -> int:
    """Micro-batch slots: pp_size + depth; without stages the normal loop has one."""
    if shape.pp_size == 1:
        return 1
    return shape.pp_size + shape.pp_async_batch_depth


def highest_live_cap(resolved: ResolvedShape, shape: ServerShape) -> int:
    """Up to where SGLang lets the micro-batch cap be set on a running server."""
    return resolved.max_running_requests // shape.pp_size


def stage_layers(layers: int, shape: ServerShape) -> tuple[int, ...]:
    """Layers of each stage: as the partition says, else even, the last stages with the rest.

    A partition of another length is what `refusal` names.
    """
    partition = shape.pp_layer_partition
    if partition is not None and len(partition) == shape.pp_size:
        return partition
    base, remainder = divmod(layers, shape.pp_size)
    first_longer = shape.pp_size - remainder
    return tuple(base + (rank >= first_longer) for rank in range(shape.pp_size))


def partition_of(value: ParamValue | None) -> tuple[int, ...] | None:
    """The layers of each stage from text such as `8,8,8,8,8,7,7,7`; empty when it is not that."""
    if value is None:
        return None
    numbers = [number.strip() for number in str(value).split(",")]
    return tuple(int(number) for number in numbers) if all(map(str.isdecimal, numbers)) else ()


def resolve(profile: Profile, shape: ServerShape) -> ResolvedShape:
    """Fill in every default, as a server that started would report it."""
    tier = next(
        tier for tier in MEMORY_TIERS if profile.gpu.memory_bytes < tier.below_gib * BYTES_PER_GIB
    )
    chunk = shape.chunked_prefill_size or tier.chunked_prefill_size
    default_bs = tier.graph_max_bs_tp4 if shape.tp_size >= WIDE_TP else tier.graph_max_bs
    graph_bs = shape.cuda_graph_max_bs or default_bs
    fraction = shape.mem_fraction_static or profile.defaults.mem_fraction_static
    fraction = fraction or _fraction_by_itself(profile, shape, chunk, graph_bs)
    tokens = max(1, _capacity_tokens(profile, shape, fraction))
    limit = shape.max_total_tokens or profile.defaults.max_total_tokens
    if limit is not None:
        tokens = min(tokens, limit)
    running = _max_running(profile, shape, tokens)
    return ResolvedShape(
        pp_max_micro_batch_size=shape.pp_max_micro_batch_size or max(running // shape.pp_size, 1),
        max_running_requests=running,
        chunked_prefill_size=chunk,
        cuda_graph_max_bs=min(graph_bs, running),
        attention_backend=shape.attention_backend or profile.defaults.attention_backend,
        mem_fraction_static=fraction,
        max_total_tokens=tokens,
    )


def _fraction_by_itself(profile: Profile, shape: ServerShape, chunk: int, graph_bs: int) -> float:
    sizes = prefill_sizes(profile, shape, chunk)
    return static_fraction(
        profile.gpu.memory_bytes,
        chunk,
        shape.gpus,
        graph_bs if uses_graph(profile, shape) else 0,
        prefill_graphs_mib(len(sizes), is_mla=profile.model.kv_is_replicated),
    )


def refusal(profile: Profile, shape: ServerShape) -> str | None:
    """Why this server cannot start on this machine; None: it can."""
    found = refused(profile, shape)
    return None if found is None else found.text


def refused(profile: Profile, shape: ServerShape) -> Refusal | None:
    """The same, with the kind of reason."""
    return (
        _refused_sizes(profile, shape)
        or _refused_backend(profile, shape)
        or _refused_memory(profile, shape)
    )


def uses_graph(profile: Profile, shape: ServerShape) -> bool:
    """Whether decode graphs are captured: some backends switch them off by themselves."""
    return shape.cuda_graph and _can_capture(profile, shape)


def uses_prefill_graph(profile: Profile, shape: ServerShape) -> bool:
    """Whether prefill graphs are captured, which decode without graphs leaves on.

    A pipeline has them only where a backend is asked for.
    """
    asked = shape.cuda_graph_backend_prefill
    is_on = shape.pp_size == 1 if asked is None else asked != NO_GRAPHS
    return is_on and _can_capture(profile, shape)


def prefill_sizes(profile: Profile, shape: ServerShape, chunk: int) -> tuple[int, ...]:
    """The numbers of prompt tokens whose prefills are captured; empty: none.

    `chunk`: the resolved chunked_prefill_size.
    """
    if not uses_prefill_graph(profile, shape):
        return ()
    return prefill_graph_sizes(chunk_tokens(chunk))


def chunk_tokens(chunk: int) -> int:
    """Prompt tokens that one batch prefills at most; a size below 1 sets no limit."""
    return chunk if chunk > 0 else NO_CHUNKS


def _can_capture(profile: Profile, shape: ServerShape) -> bool:
    name = shape.attention_backend or profile.defaults.attention_backend
    backend = profile.backends.get(name)
    return backend is not None and backend.has_graph


def stage_weight_bytes(profile: Profile, shape: ServerShape) -> float:
    """Weights on each GPU of the heaviest stage; the first has the embedding, the last the head."""
    model = profile.model
    layers = stage_layers(model.layers, shape)
    layer_bytes = model.shared_bytes + model.experts * model.expert_bytes
    stages = [count * layer_bytes for count in layers]
    stages[0] += model.head_bytes  # the embedding
    stages[-1] += model.head_bytes
    return max(stages) / shape.tp_size


def memory_used_bytes(profile: Profile, shape: ServerShape) -> int:
    """Memory of each GPU once the server is ready."""
    resolved = resolve(profile, shape)
    kv_bytes = resolved.max_total_tokens * _kv_token_bytes(profile, shape)
    used = stage_weight_bytes(profile, shape) + kv_bytes + profile.memory.context_bytes
    return int(used + _graph_bytes(profile, shape, resolved))


def _refused_sizes(profile: Profile, shape: ServerShape) -> Refusal | None:
    model = profile.model
    sizes = (shape.tp_size, shape.pp_size, shape.ep_size)
    cap = shape.pp_max_micro_batch_size
    if min(sizes) < 1 or shape.pp_async_batch_depth < 0 or (cap is not None and cap < 1):
        return Refusal(
            RefusalKind.SIZES,
            "tp_size, pp_size, ep_size and the cap must be at least 1, the depth at least 0",
        )
    if shape.gpus > profile.gpus:
        return Refusal(
            RefusalKind.GPUS,
            f"tp_size {shape.tp_size} x pp_size {shape.pp_size} needs {shape.gpus} GPUs, "
            f"{profile.name} has {profile.gpus}",
        )
    if model.attention_heads % shape.tp_size:
        return Refusal(
            RefusalKind.HEADS,
            f"tp_size {shape.tp_size} does not divide the {model.attention_heads} attention heads",
        )
    if shape.pp_size > model.layers:
        return Refusal(
            RefusalKind.LAYERS,
            f"pp_size {shape.pp_size} is more than the model's {model.layers} layers",
        )
    partition = shape.pp_layer_partition
    if partition is not None and not _is_partition(partition, model.layers, shape.pp_size):
        even = stage_layers(model.layers, replace(shape, pp_layer_partition=None))
        return Refusal(
            RefusalKind.LAYERS,
            f"pp_layer_partition must list the layers of {shape.pp_size} stages, each 1 or more, "
            f"together {model.layers}, as in {','.join(map(str, even))}",
        )
    if shape.ep_size > 1 and not model.experts:
        return Refusal(RefusalKind.EXPERTS, f"ep_size {shape.ep_size} needs a model of experts")
    if shape.tp_size % shape.ep_size:
        text = f"tp_size {shape.tp_size} must be a multiple of ep_size {shape.ep_size}"
        return Refusal(RefusalKind.EXPERTS, text)
    return None


def _is_partition(partition: tuple[int, ...], layers: int, pp_size: int) -> bool:
    return len(partition) == pp_size and min(partition) >= 1 and sum(partition) == layers


def _refused_backend(profile: Profile, shape: ServerShape) -> Refusal | None:
    name = shape.attention_backend or profile.defaults.attention_backend
    if name in profile.backends:
        return None
    reason = profile.refused_backends.get(name, "it is not available there")
    return Refusal(
        RefusalKind.BACKEND,
        f"attention backend {name} does not run on {profile.gpu.name}: {reason}; "
        f"choose one of {', '.join(profile.backends)}",
    )


def _refused_memory(profile: Profile, shape: ServerShape) -> Refusal | None:
    total = profile.gpu.memory_bytes
    resolved = resolve(profile, shape)
    fraction = resolved.mem_fraction_static
    weights = stage_weight_bytes(profile, shape)
    if weights + profile.memory.context_bytes > total:
        return Refusal(
            RefusalKind.MEMORY,
            f"out of memory: the weights take {weights / GIGA:.1f} GB of each GPU's "
            f"{total / GIGA:.1f} GB; spread the model over more GPUs",
        )
    if _capacity_tokens(profile, shape, fraction) < 1:
        return Refusal(
            RefusalKind.MEMORY,
            f"out of memory: mem_fraction_static {fraction:g} leaves {fraction * total / GIGA:.1f} "
            f"GB for {weights / GIGA:.1f} GB of weights and no KV cache; raise mem_fraction_static",
        )
    needed = fraction * total + profile.memory.context_bytes + profile.memory.activation_bytes
    needed += _graph_bytes(profile, shape, resolved)
    if needed > total:
        return Refusal(
            RefusalKind.MEMORY,
            f"out of memory: {needed / GIGA:.1f} GB needed with mem_fraction_static {fraction:g} "
            f"and graphs up to {resolved.cuda_graph_max_bs}, each GPU has {total / GIGA:.1f} GB; "
            "lower mem_fraction_static or cuda_graph_max_bs",
        )
    return None


def _capacity_tokens(profile: Profile, shape: ServerShape, fraction: float) -> int:
    taken = stage_weight_bytes(profile, shape) + profile.memory.context_bytes
    left = fraction * profile.gpu.memory_bytes - taken
    return int(left // _kv_token_bytes(profile, shape))


def _kv_token_bytes(profile: Profile, shape: ServerShape) -> float:
    """KV bytes of one token on each GPU of the stage with most layers."""
    model = profile.model
    layers = max(stage_layers(model.layers, shape))
    share = 1 if model.kv_is_replicated else shape.tp_size
    return model.kv_bytes_per_token_layer * layers / share


def _graph_bytes(profile: Profile, shape: ServerShape, resolved: ResolvedShape) -> float:
    if not uses_graph(profile, shape):
        return 0.0
    return profile.memory.graph_size_bytes * len(graph_sizes(resolved.cuda_graph_max_bs))


def _max_running(profile: Profile, shape: ServerShape, tokens: int) -> int:
    limit = shape.max_running_requests or profile.defaults.max_running_requests
    if limit is None:
        per_context = int(tokens / profile.model.context_length * 512)
        limit = max(min(per_context, 4096), 2048)
    return max(1, min(limit, tokens // 2))


def _whole(value: ParamValue | None, default: int) -> int:
    return default if value is None else int(value)


def _optional(value: ParamValue | None) -> int | None:
    return None if value is None else int(value)


def _fraction(value: ParamValue | None) -> float | None:
    return None if value is None else float(value)


def _text(value: ParamValue | None) -> str | None:
    return None if value is None else str(value)
