"""The report as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from runner.insight.chart import Series, line_chart
from runner.insight.summary import Row, Summary, summarize
from runner.insight.words import format_number
from runner.measure.idle import IdleGpu
from runner.settings import Choices, Parameter, StudySettings
from runner.trial import TrialResult

BASELINE_TONES = 4
STYLE_FILE = Path(__file__).with_name("page.css")


def html_page(
    results: Sequence[TrialResult], settings: StudySettings, idle: Sequence[IdleGpu] = ()
) -> str:
    """Verdict, charts over concurrency, every setting, what failed and what was searched."""
    summary = summarize(results, settings, idle)
    parts = [
        f"<h1>{escape(summary.name)}</h1>",
        f'<p class="quiet">{escape(summary.counts)}</p>',
        f'<p class="quiet">{escape(summary.conditions)}</p>',
        _verdict(summary),
        _charts(summary),
        _settings_table(summary, summary.rows_title or "Settings, best first", summary.rows),
        _settings_table(summary, summary.searched_title, summary.searched_rows),
        _unfinished_table(summary),
        _space(settings),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(summary.name)}: report</title>\n"
        f"<style>\n{STYLE_FILE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def _verdict(summary: Summary) -> str:
    said = (*summary.verdict, *summary.power)
    sentences = "".join(f"<p>{escape(sentence.strip())}</p>" for sentence in said)
    return f'<div class="verdict">{sentences}</div>'


def _charts(summary: Summary) -> str:
    if not summary.rows:
        return ""
    throughput = {row.number: row.throughput for row in summary.rows}
    power = {row.number: row.power for row in summary.rows}
    figures = [
        ("Output throughput", "tokens/s", throughput),
        ("Power of all GPUs", "W", power),
    ]
    drawn = [
        f"<figure><figcaption>{title}</figcaption>"
        + line_chart(list(_series(summary, values, unit)), "concurrency", unit)
        + "</figure>"
        for title, unit, values in figures
    ]
    hint = "Dashed: baselines. Grey: the other settings; point at a line for its name."
    return f'<div class="charts">{"".join(drawn)}</div><p class="quiet">{hint}</p>'


def _series(
    summary: Summary, values: dict[int, tuple[float | None, ...]], unit: str
) -> Iterable[Series]:
    """The best and the baselines last, so that they lie on top."""
    styles = _styles(summary.rows)
    order = sorted(summary.rows, key=lambda row: (row.mark == "best", row.baseline or ""))
    for row in order:
        pairs = zip(summary.ladder, values[row.number], strict=True)
        points = tuple((float(x), y) for x, y in pairs if y is not None)
        numbers = ", ".join(f"{format_number(y)} {unit} at C={x:g}" for x, y in points)
        label = f"#{row.number} best" if row.mark == "best" else row.baseline or ""
        yield Series(points, f"#{row.number} {row.label}: {numbers}", styles[row.number], label)


def _styles(rows: Sequence[Row]) -> dict[int, str]:
    baselines = sorted(row.number for row in rows if row.baseline)
    styles = {row.number: "rival" if row.mark == "~" else "" for row in rows}
    styles |= {number: f"base-{index % BASELINE_TONES}" for index, number in enumerate(baselines)}
    return styles | {row.number: "best" for row in rows if row.mark == "best"}


def _settings_table(summary: Summary, title: str, rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    top = f"C={summary.objective.concurrency:g}"
    heads = [f"tokens/s C={c}" for c in summary.ladder]
    heads += [f"{what} {top}" for what in ("W", "tokens/J", "TTFT p99 s", "TPOT p99 ms")]
    head = _cells("th", ["", "trial", "setting"], ["", "", "setting"])
    heads += [f"requests within limits {top}"] if summary.has_limits else []
    head += _cells("th", [*heads, "measured"])
    body = "".join(_row(row, has_limits=summary.has_limits) for row in rows)
    legend = (
        "~ cannot be told from the best at this noise; slo: misses a latency limit; "
        "= #7: its servers resolve to those of #7, whose measurement it shows."
    )
    return (
        f'<h2>{escape(title)}</h2><div class="wide"><table><tr>{head}</tr>{body}</table>'
        f'</div><p class="quiet">{legend}</p>'
    )


def _row(row: Row, *, has_limits: bool) -> str:
    tpot_ms = None if row.tpot_p99_s is None else 1000.0 * row.tpot_p99_s
    numbers = [*row.throughput, row.power_w, row.tokens_per_joule, row.ttft_p99_s, tpot_ms]
    name = f" <small>baseline {escape(row.baseline)}</small>" if row.baseline else ""
    style = ' class="best"' if row.mark == "best" else ""
    return (
        f"<tr{style}>"
        + _cells("td", [row.mark, f"#{row.number}"])
        + f'<td class="setting">{escape(row.label)}{name}</td>'
        + _cells("td", [format_number(number) for number in numbers])
        + (_cells("td", [_attainment(row)]) if has_limits else "")
        + _cells("td", [f"{row.measurements}x"])
        + "</tr>"
    )


def _attainment(row: Row) -> str:
    """The share with its interval: `99.2 % (98.1 - 99.7)`."""
    if row.attainment is None:
        return format_number(None)
    share, low, high = (100.0 * value for value in row.attainment)
    return f"{share:.1f} % ({low:.1f} - {high:.1f})"


def _unfinished_table(summary: Summary) -> str:
    if not summary.unfinished:
        return ""
    styles = ["", "word", "setting", "word"]
    head = _cells("th", ["trial", "outcome", "setting", "reason"], styles)
    body = "".join(
        f"<tr>{_cells('td', [f'#{u.number}', u.outcome.value, u.label, u.reason], styles)}</tr>"
        for u in summary.unfinished
    )
    table = f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
    return f"<h2>Not measured to the end</h2>{table}"


def _space(settings: StudySettings) -> str:
    rows = [(parameter.name, _range(parameter)) for parameter in settings.parameters]
    rows += [("constraint", expression.text) for expression in settings.constraints]
    rows += [
        ("latency limit", f"{limit.metric} {limit.percentile} <= {limit.limit_s:g} s")
        for limit in settings.slo
    ]
    body = "".join(f"<tr>{_cells('td', row, ['word', 'word'])}</tr>" for row in rows)
    return f'<h2>What was searched</h2><div class="wide"><table>{body}</table></div>'


def _range(parameter: Parameter) -> str:
    if isinstance(parameter, Choices):
        text = ", ".join(str(value) for value in parameter.values)
    else:
        text = f"{parameter.low:g} to {parameter.high:g}{', logarithmic' if parameter.log else ''}"
    return text if parameter.when is None else f"{text}, when {parameter.when.text}"


def _cells(tag: str, texts: Sequence[str], styles: Sequence[str] = ()) -> str:
    cells = []
    for index, text in enumerate(texts):
        style = f' class="{styles[index]}"' if index < len(styles) and styles[index] else ""
        cells.append(f"<{tag}{style}>{escape(text)}</{tag}>")
    return "".join(cells)
