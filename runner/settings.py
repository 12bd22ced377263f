"""A study's resolved settings: frozen values, everything filled in. config.py makes them.

Parameters are ordered: a condition refers only to parameters before its own, and otherwise the
order does not depend on how the study file was written (so a stored study suggests the same).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from runner.expression import Expression
from runner.lengths import is_narrow
from runner.trial import Arrivals, EngineKind, Lengths, LoadProtocol, Params, ParamValue


class Direction(StrEnum):
    """Which way an objective is better."""

    MAXIMIZE = "maximize"
    MINIMIZE = "minimize"


LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
STATISTICS = ("mean", "p50", "p90", "p99")
METRIC_DIRECTIONS: Mapping[str, Direction] = {
    "output_throughput": Direction.MAXIMIZE,
    "total_throughput": Direction.MAXIMIZE,
    "request_throughput": Direction.MAXIMIZE,
    "goodput": Direction.MAXIMIZE,
    "tokens_per_joule": Direction.MAXIMIZE,
    "joules_per_request": Direction.MINIMIZE,
    "power_w": Direction.MINIMIZE,
    "energy_j": Direction.MINIMIZE,
    "achieved_concurrency": Direction.MAXIMIZE,
    **{f"{name}.{part}": Direction.MINIMIZE for name in LATENCIES for part in STATISTICS},
}
"""The metrics an objective may name, and which way each is better when the file does not say."""

METRIC_NAMES = tuple(METRIC_DIRECTIONS)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Which servers, and how they are started. `python` None: this interpreter.

    `time_scale` is 1 for every kind but emulated, so it can be given to any clock.
    """

    kind: EngineKind
    profile: str | None
    time_scale: float
    model: str | None
    python: str | None
    args: Params
    env: Mapping[str, str]

    @property
    def has_own_devices(self) -> bool:
        """Whether its devices are the study's own: emulated GPUs, or real servers on a CPU."""
        return self.kind is not EngineKind.SGLANG or self.args.get("device") == "cpu"


@dataclass(frozen=True, slots=True)
class HardwareSettings:
    """The GPUs a study may use: `gpus` per node."""

    gpus: int
    nodes: int
    isolation: str


@dataclass(frozen=True, slots=True)
class Choices:
    """A parameter with listed values."""

    name: str
    values: tuple[ParamValue, ...]
    when: Expression | None = None


@dataclass(frozen=True, slots=True)
class IntRange:
    """An integer parameter, both ends included. `log` and `step` > 1 exclude each other."""

    name: str
    low: int
    high: int
    step: int = 1
    log: bool = False
    when: Expression | None = None


@dataclass(frozen=True, slots=True)
class FloatRange:
    """A real parameter, both ends included."""

    name: str
    low: float
    high: float
    log: bool = False
    when: Expression | None = None


Parameter: TypeAlias = Choices | IntRange | FloatRange


@dataclass(frozen=True, slots=True)
class Baseline:
    """A named setting that is measured first, as the user wrote it.

    Absent parameters keep SGLang's default; values may lie outside the search space.
    """

    name: str
    params: Params


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent. `rate` (requests/s) is the ladder of open_loop, `concurrency` of the others.

    `arrivals` matters to open_loop only.
    """

    protocol: LoadProtocol
    prompt_tokens: Lengths
    output_tokens: Lengths
    concurrency: tuple[int, ...]
    rate: tuple[float, ...]
    shared_prefix: float
    arrivals: Arrivals = Arrivals.POISSON

    @property
    def ladder(self) -> tuple[float, ...]:
        """The rungs: rates for open_loop, else concurrencies; the other one is empty."""
        return self.rate or self.concurrency

    @property
    def remembers_start(self) -> bool:
        """Whether streams that begin together stay so: those of a closed loop of like replies."""
        is_loop = self.protocol is LoadProtocol.CLOSED_LOOP and max(self.ladder) > 1
        return is_loop and is_narrow(self.output_tokens)


@dataclass(frozen=True, slots=True)
class Objective:
    """What is optimised: a metric of RungResult at one rung (a concurrency or rate)."""

    metric: str
    concurrency: float
    direction: Direction


@dataclass(frozen=True, slots=True)
class SloLimit:
    """One latency limit, e.g. metric ttft_s, percentile p99, limit_s 2.0."""

    metric: str
    percentile: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """Sampler and budgets; None: no limit, for `parallel`: as many as fit.

    `output_tokens` is the law that the search measures with when it is another than that of the
    workload, else None: then every trial has the workload's.
    """

    sampler: str
    trials: int
    seed: int
    minutes: float | None
    launches: int | None
    energy_j: float | None
    parallel: int | None
    output_tokens: Lengths | None = None


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """How long and how often is measured. `precision` is a relative half-width."""

    precision: float
    min_window_s: float
    max_window_s: float
    repeats: int
    finalists: int


@dataclass(frozen=True, slots=True)
class StudySettings:
    """Everything a study file says, resolved."""

    name: str
    engine: EngineSettings
    hardware: HardwareSettings
    parameters: tuple[Parameter, ...]
    constraints: tuple[Expression, ...]
    baselines: tuple[Baseline, ...]
    workload: Workload
    objectives: tuple[Objective, ...]
    slo: tuple[SloLimit, ...]
    search: SearchSettings
    measure: MeasureSettings
    storage: str | None
    tracking_uri: str | None
