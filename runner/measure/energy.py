"""The energy of a window from the readings of a GPU, and what else they say of it. Pure."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

from runner.trial import GpuEnergy, PowerSample

LONGEST_GAP_S = 2.0
USUAL_GAPS = 10.0
FEWEST_SPACINGS = 5
USUAL_UPDATES = 2.0  # how far beyond its last change a counter is believed to go on, in updates

Point: TypeAlias = tuple[float, float]


def energy_over(
    samples: Sequence[PowerSample], start_s: float, end_s: float
) -> tuple[GpuEnergy, ...]:
    """The energy and mean power of each GPU over [start_s, end_s], in order of first appearance.

    The energy counter, interpolated at both borders, comes first; where it is missing, was reset
    or stands still, the integral of the sampled power. A GPU whose samples do not cover the
    window, or leave a hole (see `longest_gap_s`) where a value is needed, has no energy: None,
    never 0.
    """
    return tuple(_energy_of(taken, start_s, end_s) for taken in by_gpu(samples).values())


def energy_over_all(
    samples: Sequence[PowerSample], windows: Sequence[tuple[float, float]]
) -> tuple[GpuEnergy, ...]:
    """The energy and mean power of each GPU over several windows together (see energy_over)."""
    parts_of: dict[str, list[tuple[GpuEnergy, float]]] = {}
    for start_s, end_s in windows:
        for gpu in energy_over(samples, start_s, end_s):
            parts_of.setdefault(gpu.gpu_uuid, []).append((gpu, end_s - start_s))
    return tuple(_joined(parts) for parts in parts_of.values())


def _joined(parts: Sequence[tuple[GpuEnergy, float]]) -> GpuEnergy:
    """One GPU over several windows; an energy that is missing in one is missing in all."""
    gpus, length_s = [gpu for gpu, _ in parts], sum(length_s for _, length_s in parts)
    energies = [gpu.energy_j for gpu in gpus if gpu.energy_j is not None]
    energy_j = math.fsum(energies) if len(energies) == len(gpus) else None
    busy = [(gpu.utilization, part_s) for gpu, part_s in parts if gpu.utilization is not None]
    used = [gpu.memory_used_bytes for gpu in gpus if gpu.memory_used_bytes is not None]
    slowed = [gpu.throttled for gpu in gpus if gpu.throttled is not None]
    busy_s = sum(part_s for _, part_s in busy)
    return GpuEnergy(
        gpu_uuid=gpus[0].gpu_uuid,
        energy_j=energy_j,
        power_w=energy_j / length_s if energy_j is not None and length_s > 0 else None,
        utilization=sum(u * part_s for u, part_s in busy) / busy_s if busy_s > 0 else None,
        memory_used_bytes=max(used) if used else None,
        throttled=any(slowed) if slowed else None,
    )


def by_gpu(samples: Sequence[PowerSample]) -> dict[str, list[PowerSample]]:
    """The samples of each GPU by time, each once, GPUs in order of first appearance."""
    found: dict[str, dict[float, PowerSample]] = {}
    for sample in samples:
        found.setdefault(sample.gpu_uuid, {})[sample.time_s] = sample
    return {uuid: [taken[time_s] for time_s in sorted(taken)] for uuid, taken in found.items()}


def around(taken: Sequence[PowerSample], start_s: float, end_s: float) -> list[PowerSample]:
    """The samples of one GPU in [start_s, end_s] and one beyond each border.

    Where the energy counter is slower than the sampling, more: those up to its next change (at
    most 2 s), which tell when it changed.
    """
    first = max(bisect_right(taken, start_s, key=lambda sample: sample.time_s) - 1, 0)
    last = min(bisect_left(taken, end_s, key=lambda sample: sample.time_s), len(taken) - 1)
    if not any(_is_repeated(taken, place) for place in range(first + 1, last + 1)):
        return list(taken[first : last + 1])
    while first > 0 and _is_repeated(taken, first) and _is_near(taken[first].time_s, start_s):
        first -= 1
    end = len(taken) - 1
    while last < end and _is_repeated(taken, last) and _is_near(end_s, taken[last].time_s):
        last += 1
    return list(taken[max(first - 1, 0) : last + 1])


def spans(
    taken: Sequence[PowerSample], start_s: float, end_s: float
) -> Iterator[tuple[PowerSample, float]]:
    """Each sample of one GPU with the seconds of the window in which it was the latest."""
    ends_s = [*(sample.time_s for sample in taken[1:]), end_s]
    for sample, until_s in zip(taken, ends_s, strict=True):
        held_s = min(until_s, end_s) - max(sample.time_s, start_s)
        if held_s > 0:
            yield sample, held_s


def longest_gap_s(samples: Sequence[PowerSample], start_s: float, end_s: float) -> float:
    """The longest part of the window that a hole between samples of one GPU touches, else 0.

    A hole is longer than 2 s and than ten times the usual (median) spacing. Time before the first
    and after the last sample counts as a hole of any length.
    """
    times_s = sorted(sample.time_s for sample in samples)
    if not times_s:
        return end_s - start_s
    limit_s = _gap_limit_s(times_s)
    missing_s = max(times_s[0] - start_s, end_s - times_s[-1], 0.0)
    holes_s = (
        min(right_s, end_s) - max(left_s, start_s)
        for left_s, right_s in pairwise(times_s)
        if right_s - left_s > limit_s
    )
    return max(missing_s, *holes_s, 0.0)


def _energy_of(taken: list[PowerSample], start_s: float, end_s: float) -> GpuEnergy:
    near = around(taken, start_s, end_s)
    inside = [sample for sample in near if start_s <= sample.time_s <= end_s] or near
    energy_j = _counted_j(near, start_s, end_s)
    if energy_j is None:
        energy_j = _integrated_j(near, start_s, end_s)
    used = [s.memory_used_bytes for s in inside if s.memory_used_bytes is not None]
    slowed = [s.throttled for s in inside if s.throttled is not None]
    return GpuEnergy(
        gpu_uuid=taken[0].gpu_uuid,
        energy_j=energy_j,
        power_w=None if energy_j is None else energy_j / (end_s - start_s),
        utilization=_mean_utilization(near, start_s, end_s),
        memory_used_bytes=max(used) if used else None,
        throttled=any(slowed) if slowed else None,
    )


def _mean_utilization(near: Sequence[PowerSample], start_s: float, end_s: float) -> float | None:
    known = [
        (sample.utilization, held_s)
        for sample, held_s in spans(near, start_s, end_s)
        if sample.utilization is not None
    ]
    total_s = sum(held_s for _, held_s in known)
    return sum(share * held_s for share, held_s in known) / total_s if known else None


def _counted_j(near: Sequence[PowerSample], start_s: float, end_s: float) -> float | None:
    """The difference of the energy counter; the samples between the borders are not needed."""
    counts = [(s.time_s, s.energy_j) for s in near if s.energy_j is not None]
    if any(later[1] < earlier[1] for earlier, later in pairwise(counts)):
        return None
    limit_s = _gap_limit_s([sample.time_s for sample in near])
    points = _changes(counts, limit_s)
    # A counter that never changed is dead, or its GPU has drawn nothing: power decides which.
    if len(points) < 2 or end_s <= start_s:  # noqa: PLR2004
        return None
    beyond_s = 0.0
    if len(points) < len(counts):
        beyond_s = USUAL_UPDATES * statistics.median(b[0] - a[0] for a, b in pairwise(points))
    at_start = _value_at(points, start_s, limit_s, beyond_s)
    at_end = _value_at(points, end_s, limit_s, beyond_s)
    return None if at_start is None or at_end is None else at_end - at_start


def _changes(counts: Sequence[Point], limit_s: float) -> list[Point]:
    """The points between which a counter is interpolated.

    A counter that is finer than the sampling: its readings. One that is slower repeats itself,
    and between two equal readings nothing is known; it changed halfway between the last reading
    of the old value and the first of the new, give or take half a sampling period.
    """
    steps = [(a, b) for a, b in pairwise(counts) if a[1] != b[1]]
    if len(steps) == len(counts) - 1:
        return list(counts)
    return [((a[0] + b[0]) / 2, b[1]) for a, b in steps if b[0] - a[0] <= limit_s]


def _integrated_j(near: Sequence[PowerSample], start_s: float, end_s: float) -> float | None:
    """The trapezoid integral of the sampled power."""
    powers = [(s.time_s, s.power_w) for s in near if s.power_w is not None]
    limit_s = _gap_limit_s([sample.time_s for sample in near])
    at_start = _value_at(powers, start_s, limit_s)
    at_end = _value_at(powers, end_s, limit_s)
    if at_start is None or at_end is None or end_s <= start_s:
        return None
    between = [(time_s, power_w) for time_s, power_w in powers if start_s < time_s < end_s]
    pairs = list(pairwise([(start_s, at_start), *between, (end_s, at_end)]))
    if any(right[0] - left[0] > limit_s for left, right in pairs):
        return None
    return sum((left[1] + right[1]) / 2 * (right[0] - left[0]) for left, right in pairs)


def _value_at(
    points: Sequence[Point], time_s: float, limit_s: float, beyond_s: float = 0.0
) -> float | None:
    """Linear between the two points around a time; None in a hole and outside the points.

    Up to `beyond_s` outside them, the outermost two points' line goes on.
    """
    if not points:
        return None
    after = bisect_left(points, time_s, key=lambda point: point[0])
    if after < len(points) and points[after][0] == time_s:
        return points[after][1]
    outside_s = max(points[0][0] - time_s, time_s - points[-1][0])
    if outside_s > beyond_s or len(points) == 1:
        return None
    after = min(max(after, 1), len(points) - 1)
    (left_s, left), (right_s, right) = points[after - 1], points[after]
    if right_s - left_s > limit_s:
        return None
    return left + (right - left) * (time_s - left_s) / (right_s - left_s)


def _gap_limit_s(times_s: Sequence[float]) -> float:
    """How far apart two samples may be. In scaled time the usual spacing itself can be long."""
    spacings_s = [right_s - left_s for left_s, right_s in pairwise(times_s)]
    if len(spacings_s) < FEWEST_SPACINGS:
        return LONGEST_GAP_S
    return max(LONGEST_GAP_S, USUAL_GAPS * statistics.median(spacings_s))


def _is_repeated(taken: Sequence[PowerSample], place: int) -> bool:
    """Whether this reading of the energy counter is that of the sample before."""
    energy_j = taken[place].energy_j
    return place > 0 and energy_j is not None and energy_j == taken[place - 1].energy_j


def _is_near(earlier_s: float, later_s: float) -> bool:
    return later_s - earlier_s <= LONGEST_GAP_S
