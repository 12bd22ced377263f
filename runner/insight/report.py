"""The report of a study: one JSON document, or a table and a verdict for a person."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.insight.confirmation import lengths_document
from runner.insight.output import print_for_people
from runner.insight.power_words import power_document
from runner.insight.ranking import Ranking, Setting, rank
from runner.insight.summary import Row, Summary, Unfinished, summarize
from runner.insight.words import format_number
from runner.measure.idle import IdleGpu
from runner.record.codec import encode
from runner.record.store import StudyState
from runner.settings import StudySettings
from runner.trial import TrialResult

RUNG_WIDTH = 6  # a cell of tokens/s with its padding
FIXED_WIDTH = 40  # the other cells with their padding, but for the setting
OBJECTIVE_WIDTH = 10
LIMITS_WIDTH = 6
LEAST_LABEL_WIDTH, MOST_LABEL_WIDTH = 18, 34
PADDING = (0, 1, 0, 0)
STYLES = {"best": "bold green", "~": "green", "slo": "yellow", "": ""}
LEGEND = {
    "~": "~ within the noise of the best",
    "slo": "slo misses a latency limit",
}


def report_document(
    results: Sequence[TrialResult],
    settings: StudySettings,
    idle: Sequence[IdleGpu] = (),
    state: StudyState | None = None,
) -> dict[str, object]:
    """The JSON answer of `runner report`: best, contenders, baselines, every trial, the power.

    `study` says which study it is, how it ended (`state`; None: not said) and on which engine: only
    `sglang` measures. `noise` is that of one measurement, relative.

    `settings` is the ranking, best first: what each setting is worth by all measurements of it that
    count. `best` is the first measurement of the leading one.

    Where the search had other lengths than the workload, `lengths` has both orders.
    """
    ranking = rank(results, settings)
    ordered = sorted(results, key=lambda result: result.number)
    lengths = lengths_document(ranking, settings)
    engine = settings.engine
    return {
        "study": {
            "name": settings.name,
            "state": None if state is None else str(state),
            "engine": str(engine.kind),
            "profile": engine.profile,
            "time_scale": engine.time_scale,
        },
        "noise": ranking.noise,
        "best": None if ranking.best is None else encode(ranking.best.result),
        "settings": [setting_document(ranking, setting) for setting in ranking.settings],
        "contenders": [setting.number for setting in ranking.contenders],
        "baselines": [encode(result) for result in _last_of_each_baseline(ordered)],
        "trials": [encode(result) for result in ordered],
        "power": power_document(ranking, results, idle),
        **({} if lengths is None else {"lengths": lengths}),
    }


def setting_document(ranking: Ranking, setting: Setting) -> dict[str, object]:
    """One row of the ranking: the values it is ranked by, and how sure the first one is."""
    return {
        "number": setting.number,
        "name": setting.name,
        "params": dict(setting.params),
        "values": list(setting.values),
        "halfwidth": ranking.halfwidth(setting),
        "measured_by": [measurement.number for measurement in setting.counted],
        "shares": setting.shares,
    }


def print_report(
    results: Sequence[TrialResult],
    settings: StudySettings,
    stream: TextIO,
    state: StudyState | None = None,
    home_option: str = "",
    idle: Sequence[IdleGpu] = (),
) -> None:
    """Print the table, best first, then the verdict and what to do next.

    `state` None: not said. `home_option` is put behind each printed command, ` --home /data`.
    `idle`: the GPUs before the study's first launch on them.
    """
    summary = summarize(results, settings, idle)
    steps = [f"{words:<19} {command}{home_option}" for words, command in _steps(settings, state)]
    print_for_people(stream, lambda console: _render(console, summary, state, steps))


def _render(
    console: Console, summary: Summary, state: StudyState | None, steps: Sequence[str]
) -> None:
    title = f"{summary.name}: {summary.counts}" + (f" ({state})" if state else "")
    console.print(Text(title, style="bold"))
    console.print(Text(summary.conditions, style="dim"))
    if summary.rows:
        rungs = _shown_rungs(summary, console.width)
        _print_rows(console, summary, summary.rows_title, summary.rows, rungs)
        if summary.searched_rows:
            _print_rows(console, summary, summary.searched_title, summary.searched_rows, rungs)
        console.print(Text("; ".join(_legend(summary, rungs)), style="dim"))
    if summary.unfinished:
        console.print(Text("\nNot measured to the end", style="bold"))
        console.print(_unfinished_table(summary))
    console.print()
    for sentence in (*summary.verdict, *summary.power):
        console.print(Text(sentence))
    console.print()
    for step in steps:
        console.print(Text(step), soft_wrap=True)


def _print_rows(
    console: Console, summary: Summary, title: str, rows: Sequence[Row], rungs: Sequence[int]
) -> None:
    if title:
        console.print(Text(f"\n{title}", style="bold"))
    console.print(_settings_table(summary, rows, rungs))


def _shown_rungs(summary: Summary, width: int) -> tuple[int, ...]:
    longest = max(len(_label(row)) for row in (*summary.rows, *summary.searched_rows))
    label_width = min(max(longest, LEAST_LABEL_WIDTH), MOST_LABEL_WIDTH)
    extra = 0 if summary.is_objective_shown else OBJECTIVE_WIDTH
    extra += LIMITS_WIDTH if summary.has_limits else 0
    room = (width - FIXED_WIDTH - label_width - extra) // RUNG_WIDTH
    return choose_rungs(summary.ladder, summary.objective.concurrency, room)


def choose_rungs(ladder: Sequence[int], objective: float, room: int) -> tuple[int, ...]:
    """At least one and at most `room` rungs, ascending.

    The objective's rung comes first, then the ends of the ladder, then the highest.
    """
    ends = (min(ladder), max(ladder))
    wanted = sorted(ladder, key=lambda c: (c != objective, c not in ends, -c))
    return tuple(sorted(wanted[: max(1, room)]))


def _label(row: Row | Unfinished) -> str:
    return f"{row.label} [{row.baseline}]" if row.baseline else row.label


def _settings_table(summary: Summary, rows: Sequence[Row], shown: Sequence[int]) -> Table:
    table = Table(box=None, padding=PADDING, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("trial", no_wrap=True, justify="right")
    table.add_column("setting", min_width=LEAST_LABEL_WIDTH, ratio=1)
    for concurrency in shown:
        table.add_column(f"C={concurrency}\ntok/s", justify="right", no_wrap=True)
    titles = ["power\nW", "\ntok/J", "TTFT\np99 s", "TPOT\np99 ms", "\nn"]
    if summary.has_limits:
        titles.append("SLO\n%")
    if not summary.is_objective_shown:
        titles.append(summary.objective.metric.replace(".", "\n"))
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        rungs = dict(zip(summary.ladder, row.throughput, strict=True))
        cells = _cells(row, [rungs[c] for c in shown])
        cells += [Text(_percent(row.attainment))] if summary.has_limits else []
        cells += [] if summary.is_objective_shown else [Text(format_number(row.objective))]
        table.add_row(*cells, style=STYLES.get(row.mark, ""))
    return table


def _cells(row: Row, throughput: Sequence[float | None]) -> list[Text]:
    tpot_ms = None if row.tpot_p99_s is None else 1000.0 * row.tpot_p99_s
    cells = [row.mark, f"#{row.number}", _label(row)]
    cells += [format_number(value) for value in throughput]
    cells += [format_number(value) for value in (row.power_w, row.tokens_per_joule)]
    cells += [format_number(row.ttft_p99_s), format_number(tpot_ms), str(row.measurements)]
    return [Text(cell) for cell in cells]


def _percent(attainment: tuple[float, float, float] | None) -> str:
    return "-" if attainment is None else f"{100.0 * attainment[0]:.1f}"


def _legend(summary: Summary, shown: Sequence[int]) -> list[str]:
    rows = (*summary.rows, *summary.searched_rows)
    marks = {row.mark for row in rows}
    notes = ["[name] baseline"] if any(row.baseline for row in rows) else []
    notes += [words for mark, words in LEGEND.items() if mark in marks]
    if any(mark.startswith("=") for mark in marks):
        notes.append("= #N same servers as #N, not measured again")
    notes.append(f"W, tok/J, TTFT, TPOT at C={summary.objective.concurrency:g}")
    notes.append("n measurements")
    notes += ["SLO requests that meet every limit"] if summary.has_limits else []
    if any(row.power_w is None for row in summary.rows):
        notes.append("W - unavailable")
    if hidden := [str(c) for c in summary.ladder if c not in shown]:
        notes.append(f"no room for C={', '.join(hidden)}")
    return notes


def _unfinished_table(summary: Summary) -> Table:
    table = Table(box=None, padding=PADDING, pad_edge=False)
    table.add_column("trial", justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("setting", min_width=LEAST_LABEL_WIDTH)
    table.add_column("reason", overflow="fold", ratio=1)
    for row in summary.unfinished:
        cells = (f"#{row.number}", row.outcome.value, _label(row), row.reason)
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _steps(settings: StudySettings, state: StudyState | None) -> list[tuple[str, str]]:
    name = settings.name
    steps = [
        ("Browse the trials:", f"runner ui {name}"),
        ("One page to keep:", f"runner report {name} --html {name}.html"),
    ]
    if state in (StudyState.STOPPED, StudyState.INTERRUPTED):
        steps.insert(0, ("Continue:", f"runner resume {name}"))
    return steps


def _last_of_each_baseline(ordered: Sequence[TrialResult]) -> list[TrialResult]:
    """For each baseline its complete trial, or the last attempt at it; re-measurements aside."""
    found: dict[str, TrialResult] = {}
    for result in ordered:
        if result.name is None or result.repeat_of is not None:
            continue
        if result.name not in found or not found[result.name].values:
            found[result.name] = result
    return list(found.values())
