"""The share of a GPU's memory that SGLang gives to weights and KV cache by itself. Pure."""

from __future__ import annotations

BYTES_PER_MIB = 1024**2
FEWEST_TOKENS = 2048
MAX_PREFILL_TOKENS = 16384  # of a batch where prompts are not cut into chunks
LARGE_GPU_MIB = 60 * 1024
LEAST_OF_LARGE_MIB = 10 * 1024
MLA_GRAPHS_MIB = 1536.0


def static_fraction(
    memory_bytes: int, chunk_tokens: int, ranks: int, graph_bs: int, prefill_graphs_mib: float
) -> float:
    """`mem_fraction_static` where the user sets none (SGLang 0.5.23; 0.5.16 gave the same).

    Args:
        memory_bytes: of each GPU.
        chunk_tokens: chunked_prefill_size; below 1: none.
        ranks: GPUs of the server.
        graph_bs: the largest batch whose decode is captured; 0: none.
        prefill_graphs_mib: what the graphs of prefills take (see `prefill_graphs_mib`).
    """
    tokens = max(chunk_tokens if chunk_tokens > 0 else MAX_PREFILL_TOKENS, FEWEST_TOKENS)
    reserved_mib = 512 + 1.5 * tokens + ranks / 8 * 1024 + 2 * graph_bs + prefill_graphs_mib
    memory_mib = memory_bytes / BYTES_PER_MIB
    if memory_mib > LARGE_GPU_MIB:
        reserved_mib = max(reserved_mib, LEAST_OF_LARGE_MIB)
    return round(1.0 - reserved_mib / memory_mib, 3)


def prefill_graphs_mib(sizes: int, *, is_mla: bool) -> float:
    """MiB that SGLang keeps for the graphs of prefills of so many sizes."""
    if not sizes:
        return 0.0
    return MLA_GRAPHS_MIB if is_mla else 8.0 * sizes
