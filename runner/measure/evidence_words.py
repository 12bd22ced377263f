"""What the evidence of a rung means for a user: few graphs, a queue, retractions, stops. Pure.

The client's count of requests in flight tells whether the servers could hold them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from runner.launch import CAP, MAX_RUNNING
from runner.trial import Params, RungResult, TrialResult

FULL_SHARE = 0.9
"""Below this share of decode passes in a graph, graphs that are on are not much used."""
LEAST_QUEUE, LEAST_QUEUE_SHARE = 1.0, 0.05
"""A queue this long and this large a share of the requests in flight is more than new arrivals."""

LEAST_PAUSED_SHARE = 0.01
"""Stops that take less of the windows change no throughput."""


class FindingKind(StrEnum):
    """What is found, in the words that begin its sentence."""

    GRAPHS = "CUDA graphs are on, but many decode passes ran without"
    QUEUE = "Requests waited in the servers' queue"
    RETRACTIONS = "The KV cache was full, so that requests lost their place and waited again"
    LATE = "The emulation was too slow for its schedule (lower engine.time_scale, or free the CPU)"
    PAUSES = "Servers stopped to collect garbage; POST /freeze_gc once they have warmed up ends it"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding at one rung; `weight` orders findings of a kind, the worst has the most."""

    kind: FindingKind
    concurrency: int
    weight: float
    words: str

    @property
    def sentence(self) -> str:
        """The finding by itself."""
        return f"{self.kind}: {self.words} at C={self.concurrency}"


def findings(result: TrialResult) -> Iterator[Finding]:
    """What the evidence of each rung of a trial shows, by concurrency."""
    for rung in sorted(result.rungs, key=lambda rung: rung.concurrency):
        yield from _graph_finding(result.resolved, rung)
        yield from _queue_finding(result.resolved, rung)
        yield from _retraction_finding(rung)
        yield from _pause_finding(rung)
        yield from _late_finding(rung)


def evidence_words(rung: RungResult) -> str:
    """`100 % of decode passes in a CUDA graph, 8.0 requests a micro-batch (at most 8), 0 waiting`.

    Only what is known; empty when nothing is.
    """
    told, parts = rung.evidence, []
    if told.graph_share is not None:
        parts.append(f"{_percent(told.graph_share)} of decode passes in a CUDA graph")
    if told.batch_mean is not None:
        parts.append(f"{told.batch_mean:.1f} requests a micro-batch (at most {told.batch_max})")
    if told.queue_mean is not None:
        parts.append(f"{_count(told.queue_mean)} waiting on average")
    return ", ".join(parts)


def _graph_finding(resolved: Params, rung: RungResult) -> Iterator[Finding]:
    share = rung.evidence.graph_share
    if share is None or share >= FULL_SHARE or resolved.get("cuda_graph") is not True:
        return
    words = f"only {_percent(share)} in one"
    largest, most = resolved.get("cuda_graph_max_bs"), rung.evidence.batch_max
    if largest is not None and most is not None:
        words += f" (batches up to {most}, graphs up to {largest})"
    yield Finding(FindingKind.GRAPHS, rung.concurrency, 1.0 - share, words)


def _queue_finding(resolved: Params, rung: RungResult) -> Iterator[Finding]:
    queue = rung.evidence.queue_mean
    least = max(LEAST_QUEUE, LEAST_QUEUE_SHARE * rung.achieved_concurrency)
    if queue is None or queue < least:
        return
    words = f"{_count(queue)} on average{_room_words(resolved, rung)}"
    yield Finding(FindingKind.QUEUE, rung.concurrency, queue, words)


def _retraction_finding(rung: RungResult) -> Iterator[Finding]:
    count = rung.evidence.retractions
    if count:
        words = f"{count} of them" if count > 1 else "one of them"
        yield Finding(FindingKind.RETRACTIONS, rung.concurrency, count, words)


def _pause_finding(rung: RungResult) -> Iterator[Finding]:
    told, window_s = rung.evidence, rung.window_s
    if not told.pauses or not told.paused_s or told.paused_s < LEAST_PAUSED_SHARE * window_s:
        return
    times = "once" if told.pauses == 1 else f"{told.pauses} times"
    words = f"{times}, {told.paused_s:.2g} s of {window_s:.3g} s"
    yield Finding(FindingKind.PAUSES, rung.concurrency, told.paused_s / window_s, words)


def _late_finding(rung: RungResult) -> Iterator[Finding]:
    share = rung.evidence.late_share
    if share:
        words = f"tokens late by {_percent(share)} of their time"
        yield Finding(FindingKind.LATE, rung.concurrency, share, words)


def _room_words(resolved: Params, rung: RungResult) -> str:
    """Why they wait, where the servers hold fewer requests than were in flight."""
    servers = rung.evidence.schedulers
    rooms: list[tuple[int, str]] = []
    rows, cap, stages = (_size(resolved, name) for name in (MAX_RUNNING, CAP, "pp_size"))
    if rows is not None:
        rooms.append((rows, f"{MAX_RUNNING} {rows}"))
    if cap is not None and stages is not None and stages > 1:
        slots = stages + (_size(resolved, "pp_async_batch_depth") or 0)
        rooms.append((cap * slots, f"{slots} slots of at most {cap}"))
    room, what = min(rooms, default=(0, ""))
    if not rooms or room * servers >= rung.achieved_concurrency:
        return ""
    each = "" if servers == 1 else f" on each of {servers} servers"
    return (
        f" ({_count(rung.achieved_concurrency)} in flight, room for {room * servers}: {what}{each})"
    )


def _size(resolved: Params, name: str) -> int | None:
    value = resolved.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _percent(share: float) -> str:
    return f"{100.0 * share:.0f} %"


def _count(value: float) -> str:
    return f"{value:.0f}" if value >= 10 or value == round(value) else f"{value:.1f}"  # noqa: PLR2004
