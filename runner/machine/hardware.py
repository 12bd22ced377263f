"""A machine with a model on it, as data: what a hardware profile (YAML) says.

Standard library only. The numbers are physical where physics decides (bytes, bandwidth, FLOP/s)
and measured where software decides (CPU time per launch, latency of a collective).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

REQUEST_S = 1e-3  # from the client to the scheduler: HTTP and tokenization


@dataclass(frozen=True, slots=True)
class GpuHardware:
    """One GPU, and what it draws.

    `bandwidth_bytes_per_s` and `flop_per_s` are what kernels reach, not what the vendor prints.
    A GPU that waits for memory draws `memory_bound_w`, one that only computes
    `compute_bound_w`, one that waits for its peers in a collective `communication_w`; `idle_w`
    is without a server, `server_idle_w` with an idle one. In kernel tails (KernelCosts.layer_s)
    it draws `tail_w`; None: as much as when it waits for memory.

    `compute_bound_w` may lie above `power_limit_w`: then what would draw more than the limit runs
    at a lower clock, at which it draws the limit. Power beyond idle goes with
    clock ** clock_exponent (2 to 3 by dynamic power f V^2), and `flop_per_s` is what the full
    clock `sm_clock_mhz` reaches. 0: the clock stays, power is cut at the limit.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    flop_per_s: float
    idle_w: float
    server_idle_w: float
    memory_bound_w: float
    compute_bound_w: float
    communication_w: float
    power_limit_w: float
    sm_clock_mhz: float
    tail_w: float | None = None
    clock_exponent: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkHardware:
    """Between GPUs. A ring all-reduce over n GPUs takes 2 (n - 1) steps of `ring_step_s`."""

    ring_step_s: float
    bandwidth_bytes_per_s: float
    hop_s: float


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model as bytes and operations.

    `shared_bytes` (attention, norms, dense or shared MLP) and `expert_bytes` (one expert) are
    per layer; `experts` 0 is a dense model. Tokens of a batch agree in part on their experts:
    n tokens hit as many distinct ones as n ** (1 - routing_overlap) independent tokens.
    `kv_is_replicated`: every tensor-parallel GPU holds the whole KV cache (MLA).
    """

    name: str
    layers: int
    hidden_size: int
    attention_heads: int
    context_length: int
    shared_bytes: float
    head_bytes: float
    experts: int
    experts_per_token: int
    expert_bytes: float
    routing_overlap: float
    flop_per_token: float
    kv_bytes_per_token_layer: float
    kv_is_replicated: bool

    @property
    def weight_bytes(self) -> float:
        """All weights; embedding and head count as `head_bytes` each."""
        layer_bytes = self.shared_bytes + self.experts * self.expert_bytes
        return self.layers * layer_bytes + 2 * self.head_bytes


@dataclass(frozen=True, slots=True)
class HostCosts:
    """CPU seconds of a scheduler process.

    Per event-loop iteration with a batch: `schedule_s`, then the launch (`graph_launch_s`;
    `eager_layer_s` for each layer without a graph; `piece_s` for each layer of a prefill's
    graph, which stops at its attention, but at least `graph_launch_s`), then `result_s` and
    `result_request_s` per request when a result is processed. `empty_slot_s`: an iteration
    whose slot is empty. `message_s`: until a message is at the next rank. `exchange_s`: what
    each hand-over of tensors between two ranks costs the CPU of either (pickled words about
    them go ahead, through gloo): a rank in the middle of a pipeline has four an iteration,
    hidden states and results, in and out. On servers of several ranks `eager_layer_s` is
    `eager_ranks_factor` times as long (why is not known), and each all-reduce of tensor
    parallelism launched outside a graph takes `collective_s` more. `is_blocking`: the forward
    runs in the scheduler's own thread. `is_overlapped`: a result is handled once the next batch
    is launched (SGLang's overlap schedule, without stages only); this shows in the time to
    first token. A request takes `http_s` through HTTP and the tokenizer process and back, which
    take in one request after another, `accept_s` each: a burst trickles in. That process stops
    for `pause_s` each time that `pause_tokens` output tokens have passed it, while the
    scheduler goes on (machine/front.py); 0: never.
    """

    schedule_s: float
    graph_launch_s: float
    eager_layer_s: float
    result_s: float
    result_request_s: float
    empty_slot_s: float
    message_s: float
    is_blocking: bool
    is_overlapped: bool = False
    http_s: float = 0.0
    accept_s: float = 0.0
    piece_s: float = 0.0
    exchange_s: float = 0.0
    eager_ranks_factor: float = 1.0
    collective_s: float = 0.0
    pause_s: float = 0.0
    pause_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class KernelCosts:
    """GPU seconds that are neither bytes nor operations.

    `layer_s`: kernel tails of one layer. `split_cost`: experts cut over n GPUs are read
    1 + split_cost * log2(n) times slower than whole ones (which expert parallelism keeps).
    `batch_s`: what one layer loses to padding when its kernels get many tokens instead of one;
    half of it is lost with `batch_half_tokens` tokens beyond the first. GPUs that share the layer
    share it.
    """

    layer_s: float
    split_cost: float
    batch_s: float = 0.0
    batch_half_tokens: float = 1.0


@dataclass(frozen=True, slots=True)
class Backend:
    """An attention backend: factors on eager CPU time, on reading KV, on a layer's kernel tails.

    `request_s`: CPU seconds per request and step when eager. `sequence_s`: GPU seconds per request
    and step, what attention costs for every sequence however short. `has_graph`: it can run in a
    CUDA graph.
    """

    eager_factor: float = 1.0
    kv_factor: float = 1.0
    layer_factor: float = 1.0
    request_s: float = 0.0
    sequence_s: float = 0.0
    has_graph: bool = True


@dataclass(frozen=True, slots=True)
class StartCosts:
    """Seconds of a start; `prefill_graphs_s`: prefills of all sizes, up to 8,192 tokens."""

    import_s: float
    init_s: float
    load_bytes_per_s: float
    kv_cache_s: float
    graph_size_s: float
    prefill_graphs_s: float
    warmup_s: float


@dataclass(frozen=True, slots=True)
class MemoryCosts:
    """GPU memory that is neither weights nor KV cache.

    `context_bytes`: CUDA context and communicators. `activation_bytes`: what a forward needs
    outside the static fraction. `graph_size_bytes`: one captured batch size.
    """

    context_bytes: int
    activation_bytes: int
    graph_size_bytes: int


@dataclass(frozen=True, slots=True)
class ServerDefaults:
    """What this deployment sets where the user sets nothing; None: SGLang's own rule."""

    attention_backend: str
    mem_fraction_static: float | None = None
    max_running_requests: int | None = None
    max_total_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Noise:
    """Seeded relative standard deviations: of one stage's time, and of a whole run."""

    stage: float
    run: float


@dataclass(frozen=True, slots=True)
class Profile:
    """A hardware profile.

    `refused_backends` says why a backend cannot run here; `fit` how the numbers were found and how
    far they are off, for people. `measured_gpus`: the most GPUs of one server when they were
    measured; None: all of `gpus`. `counts_ended`: its SGLang is 0.5.20 or older (Scheduler).
    """

    name: str
    gpus: int
    gpu: GpuHardware
    link: LinkHardware
    model: ModelFacts
    host: HostCosts
    kernels: KernelCosts
    start: StartCosts
    memory: MemoryCosts
    defaults: ServerDefaults
    noise: Noise
    backends: Mapping[str, Backend]
    refused_backends: Mapping[str, str]
    fit: str = ""
    measured_gpus: int | None = None
    counts_ended: bool = False
