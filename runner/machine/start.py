"""How long a server takes to start, by phase. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from runner.machine.graphs import MOST_GRAPH_TOKENS, graph_sizes, prefill_graph_sizes
from runner.machine.hardware import Profile
from runner.machine.shape import (
    ServerShape,
    prefill_sizes,
    resolve,
    stage_weight_bytes,
    uses_graph,
)


@dataclass(frozen=True, slots=True)
class StartPhases:
    """Seconds of each phase of a start, in order."""

    import_s: float
    init_s: float
    load_weights_s: float
    kv_cache_s: float
    prefill_graphs_s: float
    decode_graphs_s: float
    warmup_s: float

    @property
    def by_name(self) -> dict[str, float]:
        """Phase name to seconds, in order."""
        return {
            "import": self.import_s,
            "init": self.init_s,
            "load_weights": self.load_weights_s,
            "kv_cache": self.kv_cache_s,
            "cuda_graph": self.prefill_graphs_s + self.decode_graphs_s,
            "warmup": self.warmup_s,
        }

    @property
    def total_s(self) -> float:
        """From exec to ready."""
        return sum(self.by_name.values())


def start_phases(profile: Profile, shape: ServerShape) -> StartPhases:
    """How long each phase of a start takes."""
    start = profile.start
    resolved = resolve(profile, shape)
    decode_s = 0.0
    if uses_graph(profile, shape):
        decode_s = start.graph_size_s * len(graph_sizes(resolved.cuda_graph_max_bs))
    every = len(prefill_graph_sizes(MOST_GRAPH_TOKENS))
    captured = len(prefill_sizes(profile, shape, resolved.chunked_prefill_size))
    prefill_s = start.prefill_graphs_s * captured / every
    return StartPhases(
        import_s=start.import_s,
        init_s=start.init_s,
        load_weights_s=stage_weight_bytes(profile, shape) / start.load_bytes_per_s,
        kv_cache_s=start.kv_cache_s,
        prefill_graphs_s=prefill_s,
        decode_graphs_s=decode_s,
        warmup_s=start.warmup_s,
    )
