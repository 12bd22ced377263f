"""Start costs from the phase times of the study's own launches. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from runner.cluster.executor import LaunchReport
from runner.machine.hardware import Profile, StartCosts
from runner.machine.shape import shape_of
from runner.machine.start import start_phases
from runner.measure.idle import IdleGpu
from runner.trial import LaunchSpec

LEAST_S = 1e-3  # a shorter phase says nothing
FIELDS = {
    "import": ("import_s",),
    "init": ("init_s",),
    "load_weights": ("load_bytes_per_s",),
    "kv_cache": ("kv_cache_s",),
    "cuda_graph": ("graph_size_s", "prefill_graphs_s"),
    "warmup": ("warmup_s",),
}


@dataclass(frozen=True, slots=True)
class StartChange:
    """One start cost: what it was and is, and the launches it comes from."""

    name: str
    start: float
    value: float
    launches: int


def fit_starts(
    profile: Profile, launches: Sequence[tuple[LaunchSpec, LaunchReport]]
) -> tuple[StartCosts, tuple[StartChange, ...]]:
    """Each phase scaled by the median of measured over modelled, which one slow start leaves be."""
    costs, changes = profile.start, []
    for phase, fields in FIELDS.items():
        ratios = [
            ratio for spec, report in launches if (ratio := _ratio(profile, spec, report, phase))
        ]
        if not ratios:
            continue
        factor = statistics.median(ratios)
        for field in fields:
            start = getattr(costs, field)
            value = start / factor if field.endswith("per_s") else start * factor
            if start > 0.0 and value != start:
                changes.append(StartChange(f"start.{field}", start, value, len(ratios)))
                costs = replace(costs, **{field: value})
    return costs, tuple(changes)


def with_idle(profile: Profile, idle: Sequence[IdleGpu]) -> Profile:
    """The profile with the measured idle watts; an idle server draws as much more as before.

    GPUs on which others had memory do not count.
    """
    watts = [gpu.power_w for gpu in idle if gpu.power_w is not None and not gpu.pids]
    if not watts:
        return profile
    gpu = profile.gpu
    idle_w = min(statistics.median(watts), gpu.power_limit_w)
    server_w = min(gpu.server_idle_w + idle_w - gpu.idle_w, gpu.power_limit_w)
    return replace(profile, gpu=replace(gpu, idle_w=idle_w, server_idle_w=server_w))


def _ratio(profile: Profile, spec: LaunchSpec, report: LaunchReport, phase: str) -> float | None:
    measured_s = report.phase_s.get(phase, 0.0)
    modelled_s = start_phases(profile, shape_of(spec.server_args)).by_name[phase]
    if measured_s < LEAST_S or modelled_s < LEAST_S:
        return None
    return measured_s / modelled_s
