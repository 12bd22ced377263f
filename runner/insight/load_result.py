"""What one load of a running server showed: the totals, the steady window, and the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from runner.load.client import Target
from runner.measure.counted import (
    Span,
    drift_reason,
    requests_wanted,
    steady_span,
    whole_span,
)
from runner.measure.metrics import (
    LATENCIES,
    TokenCounts,
    attainment,
    judge_rung,
    metric_value,
    token_counts,
)
from runner.settings import SloLimit
from runner.trial import (
    Lengths,
    LoadPlan,
    LoadProtocol,
    LoadRun,
    RequestStatus,
    RungRecord,
    RungResult,
)

MOST_LEFT_OVER = 0.2
FEWEST_SENT = 50  # fewer requests leave many unfinished by chance
RATES = ("output_throughput", "total_throughput", "request_throughput", "goodput")


@dataclass(frozen=True, slots=True)
class Part:
    """All metrics over one span of the load, which is the window of `load`."""

    result: RungResult
    load: LoadRun
    tokens: TokenCounts


@dataclass(frozen=True, slots=True)
class LimitCheck:
    """A latency limit against what was measured; None: there was nothing to measure.

    `attainment` is the share of requests that keep the limit themselves.
    """

    limit: SloLimit
    measured_s: float | None
    attainment: float | None

    @property
    def metric(self) -> str:
        """For example ttft_s.p99."""
        return f"{self.limit.metric}.{self.limit.percentile}"

    @property
    def is_met(self) -> bool:
        """A latency that was not measured is not within its limit."""
        return self.measured_s is not None and self.measured_s <= self.limit.limit_s


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A judged load. Limits are checked over the steady window, over all if there is none."""

    plan: LoadPlan
    load: LoadRun
    totals: Part
    window: Part | None
    reasons: tuple[str, ...]
    slo: tuple[LimitCheck, ...]

    @property
    def ended(self) -> int:
        """How many requests ended, well or not."""
        return sum(record.status is not RequestStatus.CUT for record in self.load.records)

    @property
    def is_slo_missed(self) -> bool:
        """Whether any limit was missed."""
        return not all(check.is_met for check in self.slo)


def judge_load(load: LoadRun, plan: LoadPlan, slo: Sequence[SloLimit]) -> LoadResult:
    """All metrics of a counted load, and whether it was measured fairly."""
    whole, steady = whole_span(load), steady_span(load, plan)
    # The ramp-up and the tail belong to the totals, so they are judged as those of a burst.
    totals = _part(load, replace(plan, protocol=LoadProtocol.BURST), whole, slo)
    window = None if steady is None else _part(load, plan, steady, slo)
    part = window or totals
    reasons = [load.cut_short and f"the load ended early: {load.cut_short}"]
    reasons += [_shortness(load, plan) if steady is None else drift_reason(load, plan, steady)]
    reasons += part.result.reasons
    return LoadResult(
        plan=plan,
        load=load,
        totals=totals,
        window=window,
        reasons=tuple(reason for reason in reasons if reason),
        slo=tuple(
            LimitCheck(
                limit,
                metric_value(part.result, f"{limit.metric}.{limit.percentile}"),
                attainment(part.load, limit),
            )
            for limit in slo
        ),
    )


def load_document(
    result: LoadResult, target: Target, server: Mapping[str, object]
) -> dict[str, object]:
    """The JSON answer of `runner load`; times of spans are seconds since the first send."""
    plan = result.plan
    is_open = plan.protocol is LoadProtocol.OPEN_LOOP
    first_s = result.totals.result.window_start_s
    return {
        "url": target.url,
        "api": target.api.value,
        "model": target.model,
        "protocol": plan.protocol.value,
        "concurrency": None if is_open else plan.concurrency,
        "rate": plan.rate,
        "arrivals": plan.arrivals.value if is_open else None,
        "requests": plan.requests,
        "input_tokens": _law(plan.prompt_tokens),
        "output_tokens": _law(plan.output_tokens),
        "shared_prefix": plan.shared_prefix,
        "seed": plan.seed,
        "valid": not result.reasons,
        "reasons": list(result.reasons),
        "cut_short": result.load.cut_short,
        "slo": [_limit(check, is_steady=result.window is not None) for check in result.slo],
        "totals": _part_document(result.totals, first_s),
        "window": None if result.window is None else _part_document(result.window, first_s),
        "client": asdict(result.load.client),
        "server": dict(server),
    }


def _part(load: LoadRun, plan: LoadPlan, span: Span, slo: Sequence[SloLimit]) -> Part:
    start_s, end_s = span
    seen = replace(load, window_start_s=start_s, window_end_s=end_s, is_steady=True)
    rung = RungRecord(position=0, concurrency=plan.concurrency, loads=(seen,), power=())
    return Part(judge_rung(rung, slo, plan), seen, token_counts(seen))


def _shortness(load: LoadRun, plan: LoadPlan) -> str | None:
    if load.cut_short or plan.protocol is LoadProtocol.BURST:
        return None
    if plan.protocol is LoadProtocol.OPEN_LOOP and (waiting := _left_over(load)):
        return f"the server did not keep up: {waiting} requests were unfinished at the last arrival"
    wanted = requests_wanted(load, plan)
    if wanted <= (plan.requests or 0):
        return "no steady window: too many requests failed"
    return (
        f"no steady window: {plan.requests} requests are too few for one; "
        f"about {wanted} would do (--requests {wanted})"
    )


def _left_over(load: LoadRun) -> int:
    """Requests in flight when the last one was sent, if that is more than a fifth of all."""
    last_s = max((record.send_s for record in load.records), default=0.0)
    waiting = sum(record.end_s > last_s for record in load.records)
    return waiting if waiting > MOST_LEFT_OVER * max(len(load.records), FEWEST_SENT) else 0


def _limit(check: LimitCheck, *, is_steady: bool) -> dict[str, object]:
    return {
        "metric": check.metric,
        "limit_s": check.limit.limit_s,
        "measured_s": check.measured_s,
        "met": check.is_met,
        "attainment": check.attainment,
        "over": "window" if is_steady else "totals",
    }


def _part_document(part: Part, first_s: float) -> dict[str, object]:
    result, tokens = part.result, part.tokens
    latencies = {name: getattr(result, name) for name in LATENCIES}
    return {
        "start_s": result.window_start_s - first_s,
        "duration_s": result.window_s,
        "requests": result.requests,
        "errors": result.errors,
        "prompt_tokens": tokens.prompt,
        "cached_tokens": tokens.cached,
        "output_tokens": tokens.output,
        **{name: getattr(result, name) for name in RATES},
        "achieved_concurrency": result.achieved_concurrency,
        **{name: None if value is None else asdict(value) for name, value in latencies.items()},
    }


def _law(lengths: Lengths) -> object:
    """A law of lengths as a study file has it; recorded ones as their number."""
    match lengths.kind:
        case "fixed":
            return int(lengths.a)
        case "uniform":
            return {"uniform": [int(lengths.a), int(lengths.b)]}
        case _:
            return {"recorded": len(lengths.values)}
