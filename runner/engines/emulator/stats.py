"""What the emulated server counts, and how /metrics shows it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from runner.pipeline import BatchReport

LATENCY_BUCKETS_S = (
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0),
    *(200.0, 400.0),
)
TOKEN_BUCKETS_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0),
)


class Histogram:
    """Counts observations per bucket, as Prometheus does."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: Mapping[str, str]) -> Iterable[str]:
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            edge = "+Inf" if bound == float("inf") else str(bound)
            yield sample(f"{name}_bucket", {**labels, "le": edge}, total)
        yield sample(f"{name}_count", labels, total)
        yield sample(f"{name}_sum", labels, self._sum)


@dataclass(slots=True)
class Stats:
    """Counters since the start; by "true"/"false" for streaming where SGLang splits them so."""

    requests: Counter[str] = field(default_factory=Counter)
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    generation_tokens: Counter[str] = field(default_factory=Counter)
    cached_tokens: int = 0
    aborted: int = 0
    passes: Counter[str] = field(default_factory=Counter)
    realtime_tokens: Counter[str] = field(default_factory=Counter)
    ttft_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS_S))
    e2e_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS_S))
    tpot_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_BUCKETS_S))

    def record_batch(self, batch: BatchReport) -> None:
        """Take one micro-batch in."""
        phase = "prefill" if batch.is_prefill else "decode"
        self.passes[f"{phase}_{'cuda_graph' if batch.cuda_graph else 'none'}"] += 1
        if batch.is_prefill:
            self.realtime_tokens["prefill_compute"] += batch.new_tokens
        else:
            self.realtime_tokens["decode"] += batch.running


def sample(name: str, labels: Mapping[str, str], value: float) -> str:
    """One line of the text format."""
    inside = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
    return f"{name}{{{inside}}} {float(value)}"


@dataclass(frozen=True, slots=True)
class Gauge:
    """One gauge of a scheduler."""

    name: str
    value: float


def render(stats: Stats, gauges: Iterable[Gauge], model_name: str, pp_size: int) -> str:
    """The whole /metrics text. Every stage exports the same scheduler numbers, as SGLang's do."""
    server = {"model_name": model_name, "engine_type": "unified"}
    ranks = [
        {**server, "tp_rank": "0", "pp_rank": str(rank), "moe_ep_rank": "0"}
        for rank in range(pp_size)
    ]
    lines: list[str] = []
    for gauge in gauges:
        _family(lines, gauge.name, "gauge", [sample(gauge.name, r, gauge.value) for r in ranks])
    for name, counter in (
        ("sglang:cuda_graph_passes_total", stats.passes),
        ("sglang:realtime_tokens_total", stats.realtime_tokens),
    ):
        rows = [
            sample(name, {**rank, "mode": mode}, count)
            for rank in ranks
            for mode, count in sorted(counter.items())
        ]
        _family(lines, name, "counter", rows)
    _tokenizer(lines, stats, server)
    return "\n".join(lines) + "\n"


def _tokenizer(lines: list[str], stats: Stats, server: Mapping[str, str]) -> None:
    for name, counter in (
        ("sglang:prompt_tokens_total", stats.prompt_tokens),
        ("sglang:generation_tokens_total", stats.generation_tokens),
        ("sglang:num_requests_total", stats.requests),
    ):
        rows = [
            sample(name, {**server, "is_streaming": kind}, counter[kind])
            for kind in sorted(counter)
        ]
        _family(lines, name, "counter", rows)
    for name, total in (
        ("sglang:cached_tokens_total", stats.cached_tokens),
        ("sglang:num_aborted_requests_total", stats.aborted),
    ):
        _family(lines, name, "counter", [sample(name, server, total)])
    for name, histogram in (
        ("sglang:time_to_first_token_seconds", stats.ttft_s),
        ("sglang:request_time_per_output_token_seconds", stats.tpot_s),
        ("sglang:e2e_request_latency_seconds", stats.e2e_s),
    ):
        _family(lines, name, "histogram", histogram.lines(name, server))


def _family(lines: list[str], name: str, kind: str, rows: Iterable[str]) -> None:
    lines += (f"# HELP {name} See SGLang's documentation.", f"# TYPE {name} {kind}", *rows)
