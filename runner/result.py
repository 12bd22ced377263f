"""What a trial came to: judged rungs and the result of a trial. Standard library only; frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from runner.canary import CanaryResult
from runner.kinds import LoadStart, Outcome, Params, ParamValue, Stage, TrialLengths


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of one latency over a rung, in seconds; None when no request counts."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class GpuEnergy:
    """One GPU over one window. None: unavailable, never 0."""

    gpu_uuid: str
    energy_j: float | None
    power_w: float | None
    utilization: float | None
    memory_used_bytes: int | None
    throttled: bool | None


@dataclass(frozen=True, slots=True)
class RestartResult:
    """One restart of a rung's load; `counts` is False for a probe."""

    start: LoadStart
    counts: bool
    window_start_s: float
    window_s: float
    output_throughput: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """What happened inside the servers in a rung's windows (measure/evidence.py). None: unknown.

    `schedulers` is how many of them told something.
    """

    graph_share: float | None = None
    batch_mean: float | None = None
    batch_max: int | None = None
    queue_mean: float | None = None
    queue_max: int | None = None
    kv_usage_max: float | None = None
    retractions: int | None = None
    schedulers: int = 0
    pauses: int | None = None
    paused_s: float | None = None
    late_share: float | None = None


@dataclass(frozen=True, slots=True)
class RungResult:
    """One judged rung. Definitions: measure/metrics.py.

    `reasons` say why it is not valid, `notes` what else a user should know of it. `cut_below` is
    the rate (tokens/s) that its load was hopelessly below when it was cut short; None: it was not.
    """

    position: int
    concurrency: int
    valid: bool
    reasons: tuple[str, ...]
    window_start_s: float
    window_s: float
    output_throughput: float
    output_throughput_halfwidth: float | None
    total_throughput: float
    request_throughput: float
    goodput: float | None
    achieved_concurrency: float
    requests: int
    errors: int
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    itl_s: Distribution | None
    e2e_s: Distribution | None
    power_w: float | None
    energy_j: float | None
    tokens_per_joule: float | None
    joules_per_request: float | None
    gpus: tuple[GpuEnergy, ...] = ()
    restarts: tuple[RestartResult, ...] = ()
    metastable: bool = False
    slo_attainment: float | None = None
    slo_attainment_low: float | None = None
    slo_attainment_high: float | None = None
    notes: tuple[str, ...] = ()
    evidence: Evidence = Evidence()
    cut_below: float | None = None

    @property
    def end_s(self) -> float:
        """When its last window closed."""
        if not self.restarts:
            return self.window_start_s + self.window_s
        return max(each.window_start_s + each.window_s for each in self.restarts)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What result.json holds; `values` in the order of the study's objectives.

    `canary` compares what its servers say with the study's first good launch; None: nothing was
    asked. `differences` are parameters that run with another value than asked for: (asked, runs).
    `identity` is equal for trials whose servers resolved to the same; None: not known. `shares` is
    the trial whose measurement this one shows, because their identities are equal.
    """

    number: int
    name: str | None
    params: Params
    resolved: Params
    outcome: Outcome
    reason: str | None
    retry_of: int | None
    repeat_of: int | None
    spec_hash: str
    launch: int | None
    stage: Stage | None
    values: tuple[float, ...]
    constraints: tuple[float, ...]
    rungs: tuple[RungResult, ...] = ()
    log_path: str | None = None
    timing_s: Mapping[str, float] = field(default_factory=dict)
    schema_version: int = 1
    lengths: TrialLengths = TrialLengths.SEARCH
    canary: CanaryResult | None = None
    differences: Mapping[str, tuple[ParamValue, ParamValue]] = field(default_factory=dict)
    identity: str | None = None
    shares: int | None = None
