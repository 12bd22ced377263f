"""Power, utilisation and memory of each GPU over time, thin enough for a chart. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

from runner.trial import PowerSample

MOST_POINTS = 1000  # per series: what MLflow's charts bear
FEWEST_POINTS = 50
POINTS_PER_TRIAL = 3600  # over all series: what is logged in about half a second

Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True)
class GpuSeries:
    """One quantity of one GPU: (time_s, value) by time, under MLflow's system metric name."""

    name: str
    points: tuple[Point, ...]


def gpu_series(samples: Sequence[PowerSample], gpu_uuids: Sequence[str]) -> tuple[GpuSeries, ...]:
    """The series of every GPU; GPU n is the n-th of `gpu_uuids`, others follow as they appear."""
    seen = dict.fromkeys([*gpu_uuids, *(sample.gpu_uuid for sample in samples)])
    numbers = {uuid: number for number, uuid in enumerate(seen)}
    points: defaultdict[str, list[Point]] = defaultdict(list)
    for sample in sorted(samples, key=lambda sample: (numbers[sample.gpu_uuid], sample.time_s)):
        for quantity, read in QUANTITIES.items():
            value = read(sample)
            if value is not None:
                name = f"system/gpu_{numbers[sample.gpu_uuid]}_{quantity}"
                points[name].append((sample.time_s, value))
    limit = points_per_series(len(points))
    return tuple(GpuSeries(name, thin(found, limit)) for name, found in points.items())


def points_per_series(series: int) -> int:
    """How many points each of `series` series may have."""
    return min(MOST_POINTS, max(FEWEST_POINTS, POINTS_PER_TRIAL // max(1, series)))


def thin(points: Sequence[Point], limit: int) -> tuple[Point, ...]:
    """At most `limit` points: the mean of each of `limit` equal spans of time, at its mean time."""
    if len(points) <= limit:
        return tuple(points)
    start_s, end_s = points[0][0], points[-1][0]
    spans: defaultdict[int, list[Point]] = defaultdict(list)
    for time_s, value in points:
        share = (time_s - start_s) / (end_s - start_s) if end_s > start_s else 0.0
        spans[min(limit - 1, int(share * limit))].append((time_s, value))
    return tuple(
        (fmean(time_s for time_s, _ in span), fmean(value for _, value in span))
        for _, span in sorted(spans.items())
    )


def _percent(sample: PowerSample) -> float | None:
    return None if sample.utilization is None else 100 * sample.utilization


def _megabytes(sample: PowerSample) -> float | None:
    return None if sample.memory_used_bytes is None else sample.memory_used_bytes / 1e6


QUANTITIES: dict[str, Callable[[PowerSample], float | None]] = {
    "power_usage_watts": lambda sample: sample.power_w,
    "utilization_percentage": _percent,
    "memory_usage_megabytes": _megabytes,
}
