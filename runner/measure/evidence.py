"""What the servers say of their own work in the windows of a rung. Pure.

The client's numbers stay the truth for throughput and concurrency: under pipeline parallelism a
server's own count of running requests is that of one micro-batch. None: the servers do not tell.

graph_share   decode passes that ran in a CUDA graph / all decode passes. The counters decide,
              interpolated at the borders of each window; where they were read too seldom for that
              (more than half a window apart), the log's lines do, each a sample of the passes
batch_mean    requests of a micro-batch, averaged over the log's lines of decode passes
batch_max     the most of them in one line
queue_mean    requests that waited: the mean over the lines of a scheduler, summed over schedulers
queue_max     the most in one line of each scheduler, summed over schedulers
kv_usage_max  the largest share of the KV cache in use that a line tells
retractions   requests that lost their place because the KV cache was full
pauses        how often a process of a server stopped to collect its garbage (Python's full
              collections; SGLang tells of them on demand), and paused_s for how long in all
late_share    by how much an emulated server gave tokens late on average, in shares of a token's
              time: the most that it told
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import TypeAlias

from runner.trial import BatchSample, Evidence

FINE_SHARE = 0.5
"""How far apart the counters around a border may be, as a share of the window."""

Span: TypeAlias = tuple[float, float]
Scheduler: TypeAlias = tuple[int, int]
Passes: TypeAlias = tuple[float, float]


def evidence_of(samples: Sequence[BatchSample], windows: Sequence[Span]) -> Evidence:
    """What the samples tell of the windows (start_s, end_s] together."""
    inside = [sample for sample in samples if any(a < sample.time_s <= b for a, b in windows)]
    lines = [sample for sample in inside if sample.running is not None]
    running = [sample.running for sample in lines if sample.running is not None]
    usages = [sample.kv_usage for sample in lines if sample.kv_usage is not None]
    retracted = [sample.retracted for sample in inside if sample.retracted is not None]
    pauses_s = [sample.paused_s for sample in inside if sample.paused_s is not None]
    queues = [
        [sample.waiting for sample in taken if sample.waiting is not None]
        for taken in by_scheduler(lines).values()
    ]
    known = [waiting for waiting in queues if waiting]
    return Evidence(
        graph_share=_graph_share(samples, lines, windows),
        batch_mean=fmean(running) if running else None,
        batch_max=max(running, default=None),
        queue_mean=math.fsum(map(fmean, known)) if known else None,
        queue_max=sum(map(max, known)) if known else None,
        kv_usage_max=max(usages, default=None),
        retractions=sum(retracted) if lines or retracted else None,
        schedulers=len(by_scheduler(inside)),
        pauses=len(pauses_s) if lines or pauses_s else None,
        paused_s=math.fsum(pauses_s) if lines or pauses_s else None,
        late_share=max(_late_shares(samples, windows), default=None),
    )


def by_scheduler(samples: Iterable[BatchSample]) -> dict[Scheduler, list[BatchSample]]:
    """The samples of each scheduler, schedulers in order of first appearance."""
    found: dict[Scheduler, list[BatchSample]] = {}
    for sample in samples:
        found.setdefault((sample.replica, sample.dp_rank), []).append(sample)
    return found


def near(samples: Sequence[BatchSample], start_s: float, end_s: float) -> tuple[BatchSample, ...]:
    """Samples by time: those in [start_s, end_s] and the counters next to it on either side.

    Also how late an emulated server was by then.
    """
    first = bisect_left(samples, start_s, key=_time_s)
    last = bisect_right(samples, end_s, key=_time_s)
    before, after = samples[:first][::-1], samples[last:]
    earlier = [*_next(before, _has_counters), *_next(before, _is_of_lateness)]
    return (
        *sorted(earlier, key=_time_s),
        *samples[first:last],
        *_next(after, _has_counters),
    )


def _next(
    samples: Iterable[BatchSample], is_wanted: Callable[[BatchSample], bool]
) -> list[BatchSample]:
    """The first sample of each scheduler that is wanted."""
    found: dict[Scheduler, BatchSample] = {}
    for sample in filter(is_wanted, samples):
        found.setdefault((sample.replica, sample.dp_rank), sample)
    return list(found.values())


def _has_counters(sample: BatchSample) -> bool:
    return sample.graph_passes is not None


def _is_of_lateness(sample: BatchSample) -> bool:
    return sample.late_share is not None


def _late_shares(samples: Sequence[BatchSample], windows: Sequence[Span]) -> Iterator[float]:
    """What was told in the windows, and what held when they began."""
    for told in by_scheduler(filter(_is_of_lateness, samples)).values():
        for start_s, end_s in windows:
            yield from (s.late_share or 0.0 for s in told if start_s < s.time_s <= end_s)
            earlier = [s.late_share or 0.0 for s in told if s.time_s <= start_s]
            yield from earlier[-1:]


def _graph_share(
    samples: Sequence[BatchSample], lines: Sequence[BatchSample], windows: Sequence[Span]
) -> float | None:
    counted = [sample for sample in samples if sample.graph_passes is not None]
    fine = _counted_share(counted, windows, FINE_SHARE)
    if fine is not None:
        return fine
    said = [sample.in_graph for sample in lines if sample.in_graph is not None]
    return fmean(said) if said else _counted_share(counted, windows, math.inf)


def _counted_share(
    counted: Sequence[BatchSample], windows: Sequence[Span], finest: float
) -> float | None:
    """The share of the counters; None where one is missing, was reset or counted nothing."""
    schedulers = by_scheduler(counted).values()
    parts = [_passes_in(taken, window, finest) for taken in schedulers for window in windows]
    known = [part for part in parts if part is not None]
    total = math.fsum(graph + eager for graph, eager in known)
    if len(known) < len(parts) or total <= 0:
        return None
    return math.fsum(graph for graph, _ in known) / total


def _passes_in(taken: Sequence[BatchSample], window: Span, finest: float) -> Passes | None:
    """Decode passes of one scheduler in a window: (in a graph, outside)."""
    start_s, end_s = window
    gap_s = finest * (end_s - start_s)
    counts: list[float] = []
    for read in (_graph_passes, _eager_passes):
        first, last = (_count_at(taken, read, time_s, gap_s) for time_s in window)
        if first is None or last is None or last < first:
            return None
        counts.append(last - first)
    return counts[0], counts[1]


def _count_at(
    taken: Sequence[BatchSample],
    read: Callable[[BatchSample], int],
    time_s: float,
    gap_s: float,
) -> float | None:
    """A counter at a time, linear between its readings; None outside them and in a wider gap."""
    after = bisect_left(taken, time_s, key=_time_s)
    if after < len(taken) and taken[after].time_s == time_s:
        return read(taken[after])
    if not 0 < after < len(taken) or taken[after].time_s - taken[after - 1].time_s > gap_s:
        return None
    left, right = taken[after - 1], taken[after]
    share = (time_s - left.time_s) / (right.time_s - left.time_s)
    return read(left) + share * (read(right) - read(left))


def _time_s(sample: BatchSample) -> float:
    return sample.time_s


def _graph_passes(sample: BatchSample) -> int:
    return sample.graph_passes or 0


def _eager_passes(sample: BatchSample) -> int:
    return sample.eager_passes or 0
