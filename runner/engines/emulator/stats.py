"""What the emulated server counts, and how /metrics shows it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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

    def add(self, other: Histogram) -> None:
        """Count what the other has counted too; both have the same bounds."""
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum

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


def render(replicas: Sequence[tuple[Stats, Sequence[Gauge]]], model_name: str, pp_size: int) -> str:
    """The whole /metrics text. Every stage exports the same scheduler numbers, as SGLang's do."""
    server = {"model_name": model_name, "engine_type": "unified"}
    gauges: dict[str, list[str]] = {}
    counters: dict[str, list[str]] = {}
    for dp_rank, (stats, values) in enumerate(replicas):
        replica = {"dp_rank": str(dp_rank)} if len(replicas) > 1 else {}
        for pp_rank in range(pp_size):
            rank = {"tp_rank": "0", "pp_rank": str(pp_rank), "moe_ep_rank": "0"}
            labels = {**server, **rank, **replica}
            for gauge in values:
                gauges.setdefault(gauge.name, []).append(sample(gauge.name, labels, gauge.value))
            for name, counter in (
                ("sglang:cuda_graph_passes_total", stats.passes),
                ("sglang:realtime_tokens_total", stats.realtime_tokens),
            ):
                counters.setdefault(name, []).extend(
                    sample(name, {**labels, "mode": mode}, count)
                    for mode, count in sorted(counter.items())
                )
    lines: list[str] = []
    for name, rows in gauges.items():
        _family(lines, name, "gauge", rows)
    for name, rows in counters.items():
        _family(lines, name, "counter", rows)
    _tokenizer(lines, total([stats for stats, _ in replicas]), server)
    return "\n".join(lines) + "\n"


def total(several: Sequence[Stats]) -> Stats:
    """What the tokenizer counts, over all replicas."""
    found = Stats()
    for stats in several:
        found.requests.update(stats.requests)
        found.prompt_tokens.update(stats.prompt_tokens)
        found.generation_tokens.update(stats.generation_tokens)
        found.cached_tokens += stats.cached_tokens
        found.aborted += stats.aborted
        for name in ("ttft_s", "e2e_s", "tpot_s"):
            getattr(found, name).add(getattr(stats, name))
    return found


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
