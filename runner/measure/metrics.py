"""Every number we answer for, defined once. Times are the client's; counts are the server's.

A rung has one window (start_s, end_s] for each restart of its load that counts
(measure/restarts.py); window_s is their length together. Sums and distributions are over all of
them. A failed request delivers nothing: its tokens and times count nowhere but in the error count.
"In a window" is said of the moment named; a request that began earlier can end in it.

output_throughput     output tokens that arrived in the windows / window_s (tokens/s)
total_throughput      the same plus the prompt tokens of requests whose first token arrived in them
request_throughput    requests that ended OK in the windows / window_s
goodput               of those, the ones that meet every limit of `slo` themselves / window_s; the
                      percentile of a limit does not matter here (as in aiperf); None without limits
slo_attainment        the share of the requests that ended in a window which meet every limit
                      themselves; a failed one misses them. With its 95 % interval, _low and _high
                      (measure/attainment.py); None without limits or when no request ended
achieved_concurrency  requests in flight (sent, not ended), averaged over the windows (Little's law;
                      sglang's bench calls sum(e2e) / duration `concurrency`)
requests, errors      requests that ended OK in the windows; requests that failed in any load
ttft_s                first token - send, of requests whose first token arrived in a window; those
                      cut at the end of the load count too, or long requests would be left out
e2e_s                 end - send, of requests that ended OK in a window
tpot_s                (e2e - ttft) / (output_tokens - 1), one value per request that ended OK in a
                      window with at least two tokens (sglang's, vLLM's and our definition; aiperf
                      calls it ITL)
itl_s                 the time between two tokens of a request, the later one in a window. Tokens
                      that were read together share the time since the read before (as in sglang's
                      bench), so that the mean does not depend on how the server packs them
mean, p50, p90, p99   percentiles interpolate linearly between the values (numpy's default)
energy_j              sum over every GPU of the launch over the windows (measure/power.py); None if
                      any GPU's is unavailable
power_w               energy_j / window_s
tokens_per_joule      output tokens in the windows / energy_j
joules_per_request    energy_j / requests
output_throughput_halfwidth  95 %, from restarts (measure/restarts.py); None for a single one
metastable            the throughput depends on how the load began (measure/restarts.py)
evidence              what the servers say of their own work (measure/evidence.py)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import sub
from typing import TypeAlias

from runner.errors import ConfigError
from runner.measure.attainment import share_with_bounds
from runner.measure.energy import energy_over_all
from runner.measure.evidence import evidence_of
from runner.measure.restarts import claim, output_rate
from runner.measure.validity import find_notes, find_reasons
from runner.settings import SloLimit
from runner.trial import (
    Distribution,
    Lengths,
    LoadPlan,
    LoadProtocol,
    LoadRun,
    RequestRecord,
    RequestStatus,
    RestartResult,
    RungRecord,
    RungResult,
)

SCALARS = (
    "output_throughput",
    "total_throughput",
    "request_throughput",
    "goodput",
    "achieved_concurrency",
    "power_w",
    "energy_j",
    "tokens_per_joule",
    "joules_per_request",
)
LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
STATISTICS = ("mean", "p50", "p90", "p99")

Span: TypeAlias = tuple[float, float]


def judge_rung(
    rung: RungRecord, slo: Sequence[SloLimit], plan: LoadPlan | None = None
) -> RungResult:
    """All metrics of a rung and whether it was measured fairly.

    `plan` is the plan of its load; None: a closed loop without a shared prefix.
    """
    plan = plan or default_plan(rung)
    loads = rung.counted
    window_s = sum(end_s - start_s for start_s, end_s in (load.window for load in loads))
    counts = _count(loads, slo)
    gpus = energy_over_all(rung.power, [load.window for load in loads])
    in_flight_s = sum(_overlap_s(r, load.window) for load in loads for r in load.records)
    achieved = _ratio(in_flight_s, window_s) or 0.0
    energy_j = _total([gpu.energy_j for gpu in gpus])
    reasons = find_reasons(rung, plan, achieved, gpus)
    attained = (
        share_with_bounds(counts.good_requests, counts.requests + counts.failed) if slo else None
    )
    claimed = claim(plan, rung.loads)
    return RungResult(
        position=rung.position,
        concurrency=rung.concurrency,
        valid=not reasons,
        reasons=reasons,
        window_start_s=loads[0].window_start_s,
        window_s=window_s,
        output_throughput=_rate(counts.output_tokens, window_s),
        output_throughput_halfwidth=claimed.halfwidth,
        total_throughput=_rate(counts.output_tokens + counts.prompt_tokens, window_s),
        request_throughput=_rate(counts.requests, window_s),
        goodput=_rate(counts.good_requests, window_s) if slo else None,
        achieved_concurrency=achieved,
        requests=counts.requests,
        errors=sum(r.status is RequestStatus.FAILED for load in rung.loads for r in load.records),
        ttft_s=distribution(_over(loads, _ttfts_s)),
        tpot_s=distribution(_some(tpot_s(r) for load in loads for r in _ended(load))),
        itl_s=distribution(_over(loads, _itls_in_window_s)),
        e2e_s=distribution(r.end_s - r.send_s for load in loads for r in _ended(load)),
        power_w=_ratio(energy_j, window_s),
        energy_j=energy_j,
        tokens_per_joule=_ratio(counts.output_tokens, energy_j),
        joules_per_request=_ratio(energy_j, counts.requests),
        gpus=gpus,
        restarts=tuple(_restart(load, counts=load in loads) for load in rung.loads),
        metastable=claimed.is_metastable,
        slo_attainment=None if attained is None else attained.share,
        slo_attainment_low=None if attained is None else attained.low,
        slo_attainment_high=None if attained is None else attained.high,
        notes=find_notes(rung, plan),
        evidence=evidence_of(rung.batches, [load.window for load in loads]),
        cut_below=next((load.cut_below for load in loads if load.cut_below is not None), None),
    )


def default_plan(rung: RungRecord) -> LoadPlan:
    """The plan that is assumed where none is known: a closed loop without a shared prefix."""
    unknown = Lengths.fixed(1)
    return LoadPlan("", LoadProtocol.CLOSED_LOOP, rung.concurrency, unknown, unknown, seed=0)


def _restart(load: LoadRun, *, counts: bool) -> RestartResult:
    start_s, end_s = load.window
    return RestartResult(load.start, counts, start_s, end_s - start_s, output_rate(load))


def metric_value(rung: RungResult, metric: str) -> float | None:
    """A metric by name, e.g. output_throughput or ttft_s.p99; None: this rung has no value.

    Raises ConfigError for a name that is no metric.
    """
    name, _, statistic = metric.partition(".")
    if name in SCALARS and not statistic:
        value: float | None = getattr(rung, name)
        return value
    if name in LATENCIES and statistic in STATISTICS:
        latency: Distribution | None = getattr(rung, name)
        return None if latency is None else float(getattr(latency, statistic))
    raise ConfigError(
        f"{metric!r} is no metric; choose one of {', '.join(SCALARS)}, or one of "
        f"{', '.join(LATENCIES)} followed by .{', .'.join(STATISTICS)}, e.g. ttft_s.p99"
    )


def distribution(values: Iterable[float]) -> Distribution | None:
    """Mean and percentiles; None when there is no value."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Distribution(
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p99=percentile(ordered, 0.99),
    )


def tpot_s(record: RequestRecord) -> float | None:
    """Time per output token after the first; None with fewer than two tokens."""
    if record.first_token_s is None or record.output_tokens <= 1:
        return None
    return (record.end_s - record.first_token_s) / (record.output_tokens - 1)


def itls_s(record: RequestRecord) -> Iterator[tuple[float, float]]:
    """(time of the later token, time between the two) for each two neighbouring tokens."""
    times_s = record.token_s
    start = 0
    while start < len(times_s):
        end = start + 1
        while end < len(times_s) and times_s[end] == times_s[start]:
            end += 1
        if start > 0:
            share_s = (times_s[start] - times_s[start - 1]) / (end - start)
            yield from ((times_s[start], share_s) for _ in range(end - start))
        start = end


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of one window; `prompt` and `cached` of requests whose first token arrived in it."""

    prompt: int
    cached: int
    output: int


def token_counts(load: LoadRun) -> TokenCounts:
    """What the rates of a load's window are made of."""
    window = load.window
    served = list(_served(load))
    begun = [record for record in served if _is_in(record.first_token_s, window)]
    return TokenCounts(
        prompt=sum(record.prompt_tokens for record in begun),
        cached=sum(record.cached_tokens for record in begun),
        output=sum(_tokens_in(record, window) for record in served),
    )


def attainment(load: LoadRun, limit: SloLimit) -> float | None:
    """The share of the requests that ended OK in the window and keep a limit themselves."""
    ended = _ended(load)
    return sum(_meets(record, limit) for record in ended) / len(ended) if ended else None


@dataclass(frozen=True, slots=True)
class _Counts:
    output_tokens: int
    prompt_tokens: int
    requests: int
    good_requests: int
    failed: int


def _count(loads: Sequence[LoadRun], slo: Sequence[SloLimit]) -> _Counts:
    ended = [record for load in loads for record in _ended(load)]
    served = [(record, load.window) for load in loads for record in _served(load)]
    return _Counts(
        output_tokens=sum(_tokens_in(r, window) for r, window in served),
        prompt_tokens=sum(
            r.prompt_tokens for r, window in served if _is_in(r.first_token_s, window)
        ),
        requests=len(ended),
        good_requests=sum(all(_meets(record, limit) for limit in slo) for record in ended),
        failed=sum(
            record.status is RequestStatus.FAILED and _is_in(record.end_s, load.window)
            for load in loads
            for record in load.records
        ),
    )


def _served(load: LoadRun) -> Iterator[RequestRecord]:
    return (record for record in load.records if record.status is not RequestStatus.FAILED)


def _ended(load: LoadRun) -> list[RequestRecord]:
    return [
        record
        for record in load.records
        if record.status is RequestStatus.OK and _is_in(record.end_s, load.window)
    ]


def _is_in(time_s: float | None, window: Span) -> bool:
    return time_s is not None and window[0] < time_s <= window[1]


def _tokens_in(record: RequestRecord, window: Span) -> int:
    """How many tokens arrived in the window; token times ascend."""
    return bisect_right(record.token_s, window[1]) - bisect_right(record.token_s, window[0])


def _overlap_s(record: RequestRecord, window: Span) -> float:
    return max(min(record.end_s, window[1]) - max(record.send_s, window[0]), 0.0)


def _over(
    loads: Sequence[LoadRun], values_of: Callable[[LoadRun], Iterator[float]]
) -> Iterator[float]:
    return (value for load in loads for value in values_of(load))


def _ttfts_s(load: LoadRun) -> Iterator[float]:
    for record in _served(load):
        if record.first_token_s is not None and _is_in(record.first_token_s, load.window):
            yield record.first_token_s - record.send_s


def _itls_in_window_s(load: LoadRun) -> Iterator[float]:
    start_s, end_s = load.window
    for record in _served(load):
        times_s = record.token_s
        gaps_s = list(map(sub, times_s[1:], times_s))
        if all(gaps_s):  # no two tokens were read together, which is quick to count
            first = max(bisect_right(times_s, start_s), 1)
            yield from gaps_s[first - 1 : max(bisect_right(times_s, end_s), 1) - 1]
            continue
        for time_s, itl_s in itls_s(record):
            if _is_in(time_s, load.window):
                yield itl_s


def _meets(record: RequestRecord, limit: SloLimit) -> bool:
    """Whether one request keeps a limit; for itl_s, each of its gaps must."""
    match limit.metric:
        case "ttft_s":
            first_s = record.first_token_s
            return first_s is not None and first_s - record.send_s <= limit.limit_s
        case "e2e_s":
            return record.end_s - record.send_s <= limit.limit_s
        case "tpot_s":
            value_s = tpot_s(record)
            return value_s is None or value_s <= limit.limit_s
        case "itl_s":
            return all(itl_s <= limit.limit_s for _, itl_s in itls_s(record))
        case metric:
            raise ConfigError(f"slo on {metric!r}; choose one of {', '.join(LATENCIES)}")


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value at a share (0 to 1) of ascending values, linear between them."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _rate(count: float, window_s: float) -> float:
    return count / window_s if window_s > 0 else 0.0


def _ratio(above: float | None, below: float | None) -> float | None:
    if above is None or below is None or below <= 0:
        return None
    return above / below


def _some(values: Iterable[float | None]) -> Iterator[float]:
    return (value for value in values if value is not None)


def _total(values: Sequence[float | None]) -> float | None:
    """The sum over all GPUs; None if there are none or any is unavailable."""
    known = list(_some(values))
    return math.fsum(known) if known and len(known) == len(values) else None
