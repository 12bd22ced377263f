"""CUDA graphs: what runs them, and the sizes that SGLang captures.

Decode and prefill have graphs of their own: `cuda_graph` stands for those of decode alone. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

NO_GRAPHS = "disabled"
GRAPH_BACKENDS = ("breakable", "full", NO_GRAPHS)
FEWEST_GRAPH_TOKENS, MOST_GRAPH_TOKENS = 2, 8192
"""Prefills of fewer or of more tokens replay no graph: SGLang 0.5.16 does for 3, never for 1."""


class Launching(Enum):
    """How the CPU sets a batch off: `PIECES` is a graph that stops at each layer's attention."""

    GRAPH = auto()
    PIECES = auto()
    EAGER = auto()


def graph_backend(args: Mapping[str, object], phase: str) -> str | None:
    """What runs the graphs of "decode" or "prefill", `NO_GRAPHS` or None: SGLang's default.

    A phase's own flag goes before the switches (resolution of cuda_graph_config in SGLang 0.5.23).
    """
    asked = args.get(f"cuda_graph_backend_{phase}")
    if asked is not None:
        return str(asked)
    is_off = args.get("disable_cuda_graph") or args.get(f"disable_{phase}_cuda_graph")
    return NO_GRAPHS if is_off else None


def graph_sizes(max_bs: int) -> tuple[int, ...]:
    """The batch sizes SGLang captures."""
    sizes = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max_bs + 1, 32))
    return tuple(size for size in sizes if size <= max_bs)


def prefill_graph_sizes(most_tokens: int) -> tuple[int, ...]:
    """The prompt tokens of a batch for which SGLang captures prefills; larger ones run eager."""
    sizes = (*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64))
    sizes += (*range(1280, 4097, 256), *range(4608, MOST_GRAPH_TOKENS + 1, 512))
    return tuple(size for size in sizes if size <= most_tokens)
