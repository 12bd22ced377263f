"""A load of a running server as a person sees it: how far it is, then its numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from runner.forecast.lengths import length_facts
from runner.insight.forecast_view import PADDING, PROTOCOL_WORDS, show
from runner.insight.live import duration_words
from runner.insight.load_result import LimitCheck, LoadResult
from runner.insight.words import format_number
from runner.lengths import law_words
from runner.load.client import Target
from runner.load.generator import LoadProgress
from runner.trial import Arrivals, Distribution, LoadPlan, LoadProtocol

BAR_WIDTH = 12
LINE_EVERY_S = 5.0  # where nothing can be overwritten
REFRESH_PER_SECOND = 2
LEAST_SHARE = 0.02  # a smaller share says nothing of the time that is left
TOKEN_ROWS = (
    ("prompt tokens", "prompt"),
    ("prompt tokens cached", "cached"),
    ("output tokens", "output"),
)
LATENCY_ROWS = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("end to end", "e2e_s"))


class LoadView:
    """How far a load is: a bar in a capable terminal, elsewhere a line every few seconds.

    Called from the load's event loop, so it only takes the numbers; a thread draws.
    """

    def __init__(
        self, stream: TextIO, plan: LoadPlan, what: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._what = what
        self._requests = plan.requests or 1
        self._tokens = self._requests * length_facts(plan.output_tokens).mean
        self._now = now
        self._started_s = now()
        self._due_s = self._started_s + LINE_EVERY_S
        self._progress = LoadProgress(0.0, 0, 0, 0.0)
        console = Console(file=stream, highlight=False)
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                console=console,
                get_renderable=self._picture,
                refresh_per_second=REFRESH_PER_SECOND,
                transient=True,
                redirect_stdout=False,
            )
            self._live.start()

    def __call__(self, progress: LoadProgress) -> None:
        """Take the newest numbers."""
        self._progress = progress
        if self._live is None and self._now() >= self._due_s:
            self._due_s = self._now() + LINE_EVERY_S
            self._stream.write(f"{self._what}: {self._words()}\n")
            self._stream.flush()

    def close(self) -> None:
        """Give the terminal back."""
        if self._live is not None:
            self._live.stop()

    def _picture(self) -> RenderableType:
        row = Table.grid(padding=PADDING)
        for _ in range(3):
            row.add_column(no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(self._requests, min(self._progress.finished, self._requests), BAR_WIDTH)
        row.add_row(Text(self._what, style="bold"), bar, Text(self._words()))
        return row

    def _words(self) -> str:
        seen = self._progress
        if seen.in_flight == seen.finished == 0:
            return "starting"
        words = f"{seen.finished} of {self._requests} requests, {seen.in_flight} in flight"
        if seen.failed:
            words += f", {seen.failed} failed"
        words += f", {format_number(seen.output_throughput)} tokens/s"
        share = max(seen.output_tokens / self._tokens, seen.finished / self._requests)
        if not LEAST_SHARE < share < 1.0:
            return words
        left_s = (self._now() - self._started_s) * (1.0 - share) / share
        return f"{words}, about {duration_words(left_s)} left"


def print_load(result: LoadResult, target: Target, server: str, stream: TextIO) -> None:
    """The numbers of a load: rates, latencies, limits, and whether they can be trusted."""
    parts: list[RenderableType] = [
        Text(f"{target.url} {target.api.path}", style="bold"),
        Text(server),
        Text(_plan_words(result.plan)),
        Text(_length_words(result.plan)),
        Text(""),
        _rates(result),
        Text(""),
        _latencies(result),
    ]
    if result.slo:
        parts += [Text(""), *(_limit_line(check) for check in result.slo)]
    parts.append(Text(""))
    for reason in result.reasons:
        parts.append(Text(f"Not valid: {reason}.", style="yellow"))
    if not result.reasons:
        parts.append(Text("Valid."))
    parts.append(Text(_client_words(result)))
    show(parts, stream)


def _plan_words(plan: LoadPlan) -> str:
    match plan.protocol:
        case LoadProtocol.CLOSED_LOOP:
            how = f"concurrency {plan.concurrency}"
        case LoadProtocol.OPEN_LOOP:
            even = "evenly" if plan.arrivals is Arrivals.CONSTANT else "at random (Poisson)"
            how = f"{plan.rate:g} requests/s, arriving {even}"
        case LoadProtocol.BURST:
            how = "all at once"
    return f"{PROTOCOL_WORDS[plan.protocol]}, {how}: {plan.requests} requests, seed {plan.seed}"


def _length_words(plan: LoadPlan) -> str:
    words = f"prompt {law_words(plan.prompt_tokens)}, output {law_words(plan.output_tokens)}"
    return f"{words}, {plan.shared_prefix:.0%} shared" if plan.shared_prefix else words


def _rates(result: LoadResult) -> Table:
    table = Table(box=None, padding=PADDING, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("all requests", justify="right", no_wrap=True)
    spans = [result.totals]
    if result.window is not None:
        table.add_column("steady window", justify="right", no_wrap=True)
        spans.append(result.window)
    results = [part.result for part in spans]
    rows: list[tuple[str, list[float | None]]] = [
        ("duration s", [each.window_s for each in results]),
        ("output tokens/s", [each.output_throughput for each in results]),
        ("total tokens/s", [each.total_throughput for each in results]),
        ("requests/s", [each.request_throughput for each in results]),
    ]
    if result.slo:
        rows.append(("goodput requests/s", [each.goodput for each in results]))
    rows.append(("requests in flight", [each.achieved_concurrency for each in results]))
    for title, values in rows:
        table.add_row(title, *(format_number(value) for value in values))
    table.add_row("requests ended", *(f"{each.requests}" for each in results))
    for title, name in TOKEN_ROWS:
        table.add_row(title, *(f"{getattr(part.tokens, name)}" for part in spans))
    if result.totals.result.errors:
        table.add_row("requests failed", str(result.totals.result.errors), style="red")
    return table


def _latencies(result: LoadResult) -> Table:
    table = Table(box=None, padding=PADDING, pad_edge=False)
    table.add_column("latency in ms", no_wrap=True)
    for title in ("mean", "p50", "p90", "p99"):
        table.add_column(title, justify="right", no_wrap=True)
    spans = [("all requests", result.totals)]
    if result.window is not None:
        spans.append(("steady window", result.window))
    for title, name in LATENCY_ROWS:
        for span, part in spans:
            found: Distribution | None = getattr(part.result, name)
            cells = ["-"] * 4
            if found is not None:
                values_s = (found.mean, found.p50, found.p90, found.p99)
                cells = [format_number(value_s * 1000) for value_s in values_s]
            table.add_row(f"{title}, {span}", *cells)
    return table


def _limit_line(check: LimitCheck) -> Text:
    limit_s = check.limit.limit_s
    if check.measured_s is None:
        return Text(f"{check.metric}: nothing to measure, limit {limit_s:g} s: missed", style="red")
    share = "" if check.attainment is None else f"; {check.attainment:.1%} of requests keep it"
    verdict, style = ("met", "green") if check.is_met else ("missed", "red")
    value = f"{1000 * check.measured_s:.4g}"
    words = f"{check.metric}: {value} ms, limit {1000 * limit_s:g} ms: {verdict}{share}"
    return Text(words, style=style)


def _client_words(result: LoadResult) -> str:
    client = result.load.client
    return (
        f"Load generator: {client.cpu_share:.0%} of a core, at most "
        f"{client.max_lag_s * 1000:.0f} ms late."
    )
