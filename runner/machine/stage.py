"""How long one pipeline stage works on one batch, and what its GPU draws meanwhile.

A stage reads its share of the weights (of the experts only those its tokens hit), reads the KV
cache, computes, and with tensor parallelism joins its partial sums twice per layer. Memory and
compute overlap but for `OVERLAP_LOSS` of the shorter one. Work that would draw more than the
power limit runs at a lower clock. Pure.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from runner.machine.graphs import FEWEST_GRAPH_TOKENS, Launching
from runner.machine.hardware import Backend, GpuHardware, Profile
from runner.machine.shape import (
    ServerShape,
    prefill_sizes,
    resolve,
    stage_layers,
    uses_graph,
)

OVERLAP_LOSS = 0.4
BYTES_PER_ACTIVATION = 2
REDUCES_PER_LAYER = 2


class BatchCost(NamedTuple):
    """One batch on every rank: GPU seconds without KV reads, CPU seconds of the launch, watts.

    `clock` is the share of the full clock that it runs at, the mean over the ranks. `lead`: the
    share of the launch that its first kernel waits for, and of the work that comes after the last
    launch: all of it with a graph, a layer's in pieces and without.
    """

    gpu_s: tuple[float, ...]
    launch_s: tuple[float, ...]
    busy_w: float
    clock: float
    lead: float
    launching: Launching


class _StageCost(NamedTuple):
    """One GPU of one stage."""

    seconds: float
    joules: float
    clock: float


class StageModel:
    """The costs of one server's stages, remembered per batch size."""

    def __init__(self, profile: Profile, shape: ServerShape) -> None:
        self._profile = profile
        self._tp_size = shape.tp_size
        self._ep_size = shape.ep_size
        self._layers = stage_layers(profile.model.layers, shape)
        resolved = resolve(profile, shape)
        self._backend = profile.backends.get(resolved.attention_backend, Backend())
        self._graph_max_bs = resolved.cuda_graph_max_bs if uses_graph(profile, shape) else 0
        self._graph_max_tokens = max(
            prefill_sizes(profile, shape, resolved.chunked_prefill_size), default=0
        )
        self._known: dict[tuple[int, int, Launching], BatchCost] = {}
        self.kv_s = self._kv_s()

    def launching(self, tokens: int, *, is_prefill: bool) -> Launching:
        """How a batch of so many new tokens is launched."""
        if is_prefill:
            has_graph = FEWEST_GRAPH_TOKENS <= tokens <= self._graph_max_tokens
            return Launching.PIECES if has_graph else Launching.EAGER
        return Launching.GRAPH if tokens <= self._graph_max_bs else Launching.EAGER

    def cost(self, tokens: int, requests: int, launching: Launching) -> BatchCost:
        """What a batch of `tokens` new tokens of `requests` requests costs."""
        key = (tokens, requests, launching)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._compute(tokens, requests, launching)
        return known

    def _compute(self, tokens: int, requests: int, launching: Launching) -> BatchCost:
        costs: list[_StageCost] = []
        for rank, layers in enumerate(self._layers):
            head_bytes = self._profile.model.head_bytes if rank == len(self._layers) - 1 else 0.0
            costs.append(self._stage(layers, head_bytes, tokens, requests))
        gpu_s = tuple(cost.seconds for cost in costs)
        busy_s = sum(gpu_s)
        watts = min(sum(cost.joules for cost in costs) / busy_s, self._profile.gpu.power_limit_w)
        clock = sum(cost.seconds * cost.clock for cost in costs) / busy_s
        is_whole = launching is Launching.GRAPH
        lead = 1.0 if is_whole else len(self._layers) / sum(self._layers)
        return BatchCost(gpu_s, self._launch_s(requests, launching), watts, clock, lead, launching)

    def _stage(self, layers: int, head_bytes: float, tokens: int, requests: int) -> _StageCost:
        """What `tokens` new tokens cost one GPU of a stage."""
        gpu, model = self._profile.gpu, self._profile.model
        layer_bytes = model.shared_bytes + self._expert_bytes(tokens)
        read_bytes = (layers * layer_bytes + head_bytes) / self._tp_size
        memory_s = read_bytes / gpu.bandwidth_bytes_per_s
        flop = tokens * model.flop_per_token * layers / model.layers / self._tp_size
        compute_s = flop / gpu.flop_per_s
        tails_s = layers * self._profile.kernels.layer_s * self._backend.layer_factor
        rest_s = tails_s + requests * self._backend.sequence_s * layers / model.layers
        rest_s += layers * self._padding_s(tokens) / self._tp_size
        local_s = overlapped_s(memory_s, compute_s) + rest_s
        local_w = local_watts(gpu, min(compute_s / local_s, 1.0), tails_s / local_s)
        clock = clock_share(gpu, local_w)
        if clock < 1.0:
            local_s = overlapped_s(memory_s, compute_s / clock) + rest_s
            local_w = gpu.power_limit_w
        reduce_s = layers * REDUCES_PER_LAYER * self._reduce_s(tokens)
        joules = local_s * local_w + reduce_s * gpu.communication_w
        return _StageCost(local_s + reduce_s, joules, clock)

    def _expert_bytes(self, tokens: int) -> float:
        """Bytes of distinct experts per layer, as slow as the fullest GPU reads them."""
        model = self._profile.model
        if not model.experts:
            return 0.0
        experts, overlap = model.experts, model.routing_overlap
        hit = distinct_experts(experts, model.experts_per_token, tokens, overlap)
        pieces = self._tp_size / self._ep_size
        slowdown = 1.0 + self._profile.kernels.split_cost * math.log2(pieces)
        slowdown *= expert_imbalance(hit, experts, self._ep_size)
        return hit * model.expert_bytes * slowdown

    def _padding_s(self, tokens: int) -> float:
        """What one layer of the whole model loses to kernels that pad small batches."""
        if tokens <= 1:
            return 0.0
        kernels, more = self._profile.kernels, tokens - 1
        return kernels.batch_s * more / (more + kernels.batch_half_tokens)

    def _reduce_s(self, tokens: int) -> float:
        """One ring all-reduce of the hidden states of `tokens` tokens."""
        if self._tp_size == 1:
            return 0.0
        link = self._profile.link
        steps = 2 * (self._tp_size - 1)
        sent_bytes = tokens * self._profile.model.hidden_size * BYTES_PER_ACTIVATION
        return steps * (link.ring_step_s + sent_bytes / self._tp_size / link.bandwidth_bytes_per_s)

    def _launch_s(self, requests: int, launching: Launching) -> tuple[float, ...]:
        host = self._profile.host
        if launching is Launching.GRAPH:
            return (host.graph_launch_s,) * len(self._layers)
        if launching is Launching.PIECES:
            return tuple(max(host.graph_launch_s, n * host.piece_s) for n in self._layers)
        layer_s = host.eager_layer_s * self._backend.eager_factor
        layer_s += requests * self._backend.request_s / self._profile.model.layers
        if self._tp_size * len(self._layers) > 1:
            layer_s *= host.eager_ranks_factor
        if self._tp_size > 1:
            layer_s += REDUCES_PER_LAYER * host.collective_s
        return tuple(layers * layer_s for layers in self._layers)

    def _kv_s(self) -> tuple[float, ...]:
        """Seconds per token of context that a stage reads."""
        model = self._profile.model
        share = 1 if model.kv_is_replicated else self._tp_size
        token_s = model.kv_bytes_per_token_layer / share / self._profile.gpu.bandwidth_bytes_per_s
        return tuple(layers * token_s * self._backend.kv_factor for layers in self._layers)


def overlapped_s(memory_s: float, compute_s: float) -> float:
    """Seconds of reading and computing that run at once, but for a part of the shorter one."""
    return max(memory_s, compute_s) + OVERLAP_LOSS * min(memory_s, compute_s)


def local_watts(gpu: GpuHardware, compute_share: float, tail_share: float) -> float:
    """What a GPU draws at its full clock, by the shares of its time that compute and tails take.

    Linear in both: every joule belongs to a byte moved, an operation, or the time that passes.
    """
    watts = gpu.memory_bound_w + compute_share * (gpu.compute_bound_w - gpu.memory_bound_w)
    if gpu.tail_w is not None:
        watts -= tail_share * (gpu.memory_bound_w - gpu.tail_w)
    return watts


def clock_share(gpu: GpuHardware, watts: float) -> float:
    """The share of its full clock at which work of `watts` keeps the power limit."""
    if gpu.clock_exponent == 0.0 or watts <= gpu.power_limit_w:
        return 1.0
    allowed = (gpu.power_limit_w - gpu.server_idle_w) / (watts - gpu.server_idle_w)
    share: float = allowed ** (1.0 / gpu.clock_exponent)
    return share


def distinct_experts(experts: int, per_token: int, tokens: int, overlap: float) -> float:
    """Distinct experts of one layer that `tokens` tokens hit: E (1 - (1 - k/E) ** n)."""
    independent: float = tokens ** (1.0 - overlap)
    hit: float = experts * (1.0 - (1.0 - per_token / experts) ** independent)
    return hit


def expert_imbalance(hit: float, experts: int, groups: int) -> float:
    """How much fuller than the mean the fullest of `groups` GPUs is, when experts are dealt whole.

    The mean plus the expected maximum of `groups` standard normals times the hypergeometric
    standard deviation.
    """
    if groups == 1:
        return 1.0
    mean = hit / groups
    deviation = math.sqrt(mean * (1.0 - 1.0 / groups) * (1.0 - hit / experts))
    highest: float = 0.564 * math.log2(groups) ** 0.85
    return 1.0 + highest * deviation / mean
