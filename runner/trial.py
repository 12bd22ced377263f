"""The words everyone shares: launches, trials, rungs, records and outcomes.

Standard library only; frozen; no I/O. Any module may import this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runner.canary import CanaryResult, GreedyOutput
from runner.errors import (
    ClusterLost,
    Infeasible,
    Invalid,
    LoadFailed,
    RunnerError,
    ServerFailed,
)
from runner.kinds import (
    Arrivals,
    EngineKind,
    LoadProtocol,
    LoadStart,
    Outcome,
    Params,
    ParamValue,
    RequestStatus,
    Stage,
    TrialLengths,
)
from runner.lengths import Lengths
from runner.result import (
    Distribution,
    Evidence,
    GpuEnergy,
    RestartResult,
    RungResult,
    TrialResult,
)

__all__ = [  # words of other files that belong to these: everyone finds them here
    "Arrivals",
    "CanaryResult",
    "Distribution",
    "EngineKind",
    "Evidence",
    "GpuEnergy",
    "GreedyOutput",
    "Lengths",
    "LoadProtocol",
    "LoadStart",
    "Outcome",
    "ParamValue",
    "Params",
    "RequestStatus",
    "RestartResult",
    "RungResult",
    "Stage",
    "TrialLengths",
    "TrialResult",
]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One phase of load on running servers.

    `concurrency` is the trial's total over all replicas, dealt round-robin. `rate` (requests/s)
    is used by open_loop only. The load ends by the rule of measure/window.py: not before
    `min_window_s` of steady state, not after `max_window_s` of it; a warm-up (`is_warmup`) ends
    when every stream has finished one request. Prompts derive from `seed` and `phase` alone, so no
    two phases share a prompt (but for the `shared_prefix` share of each prompt).

    The plan of a rung stands for all its restarts (measure/restarts.py): `restarts` of them at
    least count, and more follow while `precision` (relative 95 % half-width) can still be reached.
    `start` is how the streams of one restart begin; its window holds `min_periods` mean request
    durations unless that takes longer than `max_window_s`. `max_ramp_s` cuts the time
    before the window off, which then is not steady; None: the rule has its own limit.
    `worth` is the rate (output tokens/s of the whole load) from which on it may matter: a closed
    loop far below it ends early (measure/hopeless.py); None: unknown, it never does.

    With `requests` the load is a counted one (measure/counted.py): it ends when that many have
    ended, keeps what it has when it is cut short, and tells the servers to drop its own requests
    only. `silence_s`: a request fails when no byte of it came for so long; None: never.
    """

    phase: str
    protocol: LoadProtocol
    concurrency: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    seed: int
    rate: float | None = None
    shared_prefix: float = 0.0
    precision: float = 0.01
    min_window_s: float = 10.0
    max_window_s: float = 120.0
    is_warmup: bool = False
    start: LoadStart = LoadStart.GRADUAL
    restarts: int = 1
    min_periods: int = 3
    max_ramp_s: float | None = None
    worth: float | None = None
    requests: int | None = None
    silence_s: float | None = None
    arrivals: Arrivals = Arrivals.POISSON


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the client saw it; times are readings of the study's clock.

    `token_s` has one entry per output token counted by the server's usage field, the time the
    bytes that carried it were read from the socket. `output_tokens` is len(token_s). `due_s` is
    when an open loop was to send it, None for the other protocols.
    """

    request_id: str
    replica: int
    send_s: float
    first_token_s: float | None
    end_s: float
    token_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    wanted_tokens: int
    cached_tokens: int
    status: RequestStatus
    error: str | None = None
    due_s: float | None = None


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """What the load generator says of itself: CPU share of its process, worst loop lag.

    `clock_jump_s`: how far the machine's clocks jumped, or its time stood still, at once.
    """

    cpu_share: float
    max_lag_s: float
    clock_jump_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Everything one phase of load produced; the window is (window_start_s, window_end_s].

    `cut_short` says why a counted load ended before all of its requests had. `cut_below`: the load
    ended early, since it was hopelessly below this rate (LoadPlan.worth); None: it did not.
    """

    records: tuple[RequestRecord, ...]
    started_s: float
    window_start_s: float
    window_end_s: float
    is_steady: bool
    client: ClientHealth
    start: LoadStart = LoadStart.GRADUAL
    cut_short: str | None = None
    cut_below: float | None = None

    @property
    def window(self) -> tuple[float, float]:
        """The span (start_s, end_s] that counts."""
        return self.window_start_s, self.window_end_s


@dataclass(frozen=True, slots=True)
class PowerSample:
    """One reading of one GPU. None: the sensor does not offer that value.

    `foreign_pid`: a process that is none of ours held memory there; None: none was seen.
    """

    time_s: float
    gpu_uuid: str
    power_w: float | None
    energy_j: float | None
    utilization: float | None
    memory_used_bytes: int | None
    sm_clock_mhz: float | None
    throttled: bool | None
    foreign_pid: int | None = None


@dataclass(frozen=True, slots=True)
class BatchSample:
    """What one scheduler of a server said of its decode passes, and when. None: not said.

    A line of its log tells of one micro-batch: its requests (`running`), how many wait for any
    (`waiting`), whether it ran in a CUDA graph, and the share of the KV cache in use; or it tells
    how many requests lost their place (`retracted`), or for how long a process of the server
    stopped to collect its garbage (`paused_s`). An emulated one tells how late it gives tokens, in
    shares of a token's time (`late_share`), until it says 0. The counters hold all decode passes
    since the server's start. A server has one scheduler for each `dp_rank`.
    """

    time_s: float
    replica: int
    dp_rank: int = 0
    running: int | None = None
    waiting: int | None = None
    in_graph: bool | None = None
    kv_usage: float | None = None
    retracted: int | None = None
    graph_passes: int | None = None
    eager_passes: int | None = None
    paused_s: float | None = None
    late_share: float | None = None


@dataclass(frozen=True, slots=True)
class RungRecord:
    """The raw record of one rung of one trial. `position` is its place in measured order.

    `loads` are its drained restarts on the same servers, in order of time. `batches` is what the
    servers said meanwhile.
    """

    position: int
    concurrency: int
    loads: tuple[LoadRun, ...]
    power: tuple[PowerSample, ...]
    batches: tuple[BatchSample, ...] = ()

    @property
    def counted(self) -> tuple[LoadRun, ...]:
        """The restarts that the numbers are made of.

        Where some streams began gradually, the ones that began together are probes: they show
        whether the start matters, and count nowhere else.
        """
        gradual = tuple(load for load in self.loads if load.start is LoadStart.GRADUAL)
        return gradual or self.loads


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One start of the servers: what every replica is given.

    `server_args` are neutral parameter names (SGLang's own, underscores); a name that is absent
    is not passed to the server. `key` identifies equal launches: same key, same servers.
    """

    number: int
    key: str
    server_args: Params
    replicas: int
    gpus_per_replica: int


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """What to measure: one setting, on one launch, at each rung of the plan.

    `params` is the point of the search space (or the baseline as the user wrote it); `live` are
    the parameters to set on the running servers. `first_rung` > 0 continues a half-measured trial.
    `lengths` says which law of output tokens the rungs have.
    """

    number: int
    params: Params
    live: Params
    rungs: tuple[LoadPlan, ...]
    warmup: LoadPlan
    spec_hash: str
    name: str | None = None
    first_rung: int = 0
    retry_of: int | None = None
    repeat_of: int | None = None
    lengths: TrialLengths = TrialLengths.SEARCH


@dataclass(frozen=True, slots=True)
class Measurement:
    """A trial that was measured: `stopped_early` when the driver ended it between rungs."""

    resolved: Params
    rungs_measured: int
    stopped_early: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """A trial that was not measured to its end, as a value."""

    stage: Stage
    outcome: Outcome
    message: str
    log_path: str | None = None

    @classmethod
    def of(cls, error: RunnerError, stage: Stage) -> Failure:
        """The one mapping from typed errors to outcomes."""
        return cls(stage, outcome_of(error), str(error), getattr(error, "log_path", None))


def outcome_of(error: RunnerError) -> Outcome:
    """Which outcome a typed error stands for; errors of the study itself are re-raised."""
    match error:
        case Infeasible():
            return Outcome.INFEASIBLE
        case ServerFailed() | LoadFailed():
            return Outcome.FAILED
        case Invalid():
            return Outcome.INVALID
        case ClusterLost():
            return Outcome.LOST
        case _:
            raise error


class RunningServers(Protocol):
    """Running servers of one launch: all that run_trial may ask of them."""

    def set_live(self, live: Params) -> Params:
        """Drain, set each live parameter, read it back, flush caches.

        Returns the resolved arguments of the servers (requested defaults filled in).
        """
        ...

    def greedy_outputs(self) -> tuple[tuple[GreedyOutput, ...], ...]:
        """Have each replica continue the canary's prompts; leaves the servers drained.

        By replica, then by prompt; empty where servers have no tokens to tell (simulated ones).
        """
        ...

    def run_load(self, plan: LoadPlan) -> LoadRun:
        """Drive one phase of load on all replicas, to its end; leaves the servers drained."""
        ...

    def read_power(self, start_s: float, end_s: float) -> tuple[PowerSample, ...]:
        """Samples of every GPU of the launch around [start_s, end_s], one beyond each border."""
        ...

    def read_batches(self, start_s: float, end_s: float) -> tuple[BatchSample, ...]:
        """What the servers said in [start_s, end_s], with the counters beyond each border."""
        ...

    def check_alive(self) -> None:
        """Raise ServerFailed or ClusterLost if any replica is gone."""
        ...


class Judge(Protocol):
    """The driver's side of a trial in progress."""

    def check_outputs(self, replicas: Sequence[Sequence[GreedyOutput]]) -> str | None:
        """Compare what the servers say with what they should; what is wrong, or None."""
        ...

    def next_load(self, position: int, loads: Sequence[LoadRun]) -> LoadPlan | None:
        """The next restart of the load of a rung, given those that were driven; None: enough."""
        ...

    def go_on(self, rung: RungRecord) -> bool:
        """Called with each measured rung: go on (True) or stop this trial."""
        ...
