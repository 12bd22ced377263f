"""What a plan looks like to a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from runner.forecast.findings import Finding
from runner.forecast.order import best_first, same_rows
from runner.forecast.own_lengths import OwnLengths
from runner.forecast.plan import StudyPlan
from runner.forecast.prediction import Basis
from runner.forecast.ranking import SEEDS, Ranked
from runner.insight.forecast_view import (
    PADDING,
    level_title,
    load_words,
    model_words,
    show,
    unmeasured_words,
)
from runner.insight.live import duration_words
from runner.insight.words import format_number, not_modelled_words
from runner.label import setting_label
from runner.launch import CAP, as_int
from runner.lengths import law_words
from runner.settings import StudySettings
from runner.trial import EngineKind, Params

MOST_GROUPS = 6
MOST_NAMED = 3
MOST_SETTING_WIDTH, LEAST_WHY_WIDTH = 38, 24
JOULES_PER_KWH = 3.6e6


def print_plan(plan: StudyPlan, stream: TextIO) -> None:
    """The space, what is wrong or wasted in it, the ranking, what the study takes."""
    show(list(_parts(plan)), stream)


def _parts(plan: StudyPlan) -> Iterator[RenderableType]:
    yield Text(f"{plan.settings.name}: {_space_words(plan)}", style="bold")
    yield Text(load_words(plan.settings), style="dim")
    if plan.own is not None:
        yield from _own_lengths(plan, plan.own)
    yield from _model(plan)
    if plan.unused:
        values = ", ".join(plan.unused)
        yield Text(f"In no setting (more GPUs than there are, or a constraint): {values}")
    if plan.refused or plan.refused_baselines:
        yield _heading("Cannot run")
        if plan.refused:
            yield _findings_table(plan.refused)
        for each in plan.refused_baselines:
            yield Text(f"baseline {each.name}: {each.reason}")
    if plan.warnings:
        yield _heading("Runs, but wastes")
        yield _findings_table(plan.warnings)
    if plan.equivalent:
        yield _heading("Equivalent")
        yield from _equivalent(plan)
    if not plan.runnable and not plan.baselines:
        yield Text("\nNo setting of this study can run.", style="bold")
        return
    yield _heading(f"Predicted, best first: {_objective_words(plan.settings)}")
    yield _ranking_table(plan)
    yield Text(_basis_words(plan), style="dim")
    yield Text("")
    yield from _cost(plan)


def _model(plan: StudyPlan) -> Iterator[Text]:
    """Whose numbers these are, and what they do not know."""
    yield Text(model_words(plan.settings), style="dim")
    sizes = [row.planned.shape.gpus for row in (*plan.ranking, *plan.baselines)]
    unmeasured = unmeasured_words(plan.settings, max(sizes, default=1))
    if unmeasured is not None:
        yield Text(unmeasured, style="yellow")
    if plan.settings.workload.remembers_start:
        yield Text(
            "Replies of like length keep the order in which a load began, here one after another; "
            "runner predict says what a setting makes where all begin together.",
            style="dim",
        )
    if plan.not_modelled:
        yield Text(not_modelled_words(plan.not_modelled), style="yellow")


def _own_lengths(plan: StudyPlan, own: OwnLengths) -> Iterator[Text]:
    """Whose lengths these are, and whether the user's own have another leader."""
    words = f"{law_words(own.search)} is what the search asks for, and what is ranked here"
    if plan.settings.measure.finalists:
        words += f"; finalists and baselines are measured again at your {law_words(own.own)}"
    yield Text(f"{words}.", style="dim")
    if any(limit.metric == "e2e_s" for limit in plan.settings.slo):
        words = "Limits on e2e_s are easier to keep with the replies of the search."
        yield Text(words, style="yellow")
    if own.leader is not None:
        label = setting_label(own.leader.params)
        yield Text(
            f"At your lengths the closed form puts another setting first: {label}. "
            "Have enough finalists (measure.finalists), or search at your lengths "
            "(search.output_tokens).",
            style="yellow",
        )


def _heading(words: str) -> Text:
    return Text(f"\n{words}", style="bold")


def _space_words(plan: StudyPlan) -> str:
    examined = len(plan.examined.settings)
    if plan.examined.total is None:
        seed = plan.settings.search.seed
        words = f"a large space; of {examined} settings sampled with seed {seed}, "
        return f"{words}{plan.runnable} can run"
    return f"{examined} settings, {plan.runnable} can run"


def _findings_table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, padding=PADDING, pad_edge=False, show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for finding in findings:
        words = Text(finding.reason)
        words.append(f"\ne.g. {finding.example}", style="dim")
        table.add_row(Text(str(finding.count)), words)
    return table


def _equivalent(plan: StudyPlan) -> Iterator[Text]:
    for each in plan.equivalent[:MOST_GROUPS]:
        yield Text(f"{_group_words(each.settings)} ({each.basis})")
    rest = plan.equivalent[MOST_GROUPS:]
    if rest:
        saved = sum(len(each.settings) - 1 for each in rest)
        yield Text(f"and {len(rest)} more groups; they make {saved} settings not worth a trial")


def _group_words(settings: Sequence[Params]) -> str:
    """Settings that differ by the cap only as a range of it, others one by one."""
    without = [{name: each[name] for name in each if name != CAP} for each in settings]
    caps = sorted(as_int(each[CAP]) for each in settings if CAP in each)
    if len(caps) == len(settings) and all(each == without[0] for each in without):
        is_range = caps[-1] - caps[0] == len(caps) - 1
        shown = ", ".join(str(cap) for cap in caps[: 2 * MOST_NAMED])
        words = f"{caps[0]} - {caps[-1]}" if is_range else shown
        return f"{setting_label(without[0])}: cap {words}, {len(caps)} settings"
    labels = [setting_label(each) for each in settings[:MOST_NAMED]]
    more = len(settings) - len(labels)
    return " = ".join(labels) + (f" and {more} more" if more else "")


def _objective_words(settings: StudySettings) -> str:
    objective = settings.objectives[0]
    more = " (the first objective)" if len(settings.objectives) > 1 else ""
    return f"{objective.metric} at {level_title(settings)}={objective.concurrency:g}{more}"


def _ranking_table(plan: StudyPlan) -> Table:
    table = Table(box=None, padding=PADDING, pad_edge=False)
    metric = plan.settings.objectives[0].metric
    title = "tok/s" if metric.endswith("put") else metric
    for name in (title, "p10 - p90", "W"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("setting", overflow="fold", max_width=MOST_SETTING_WIDTH)
    table.add_column("why", overflow="fold", ratio=1, min_width=LEAST_WHY_WIDTH)
    ordered = best_first(plan.settings, (*plan.ranking, *plan.baselines))
    for rows in same_rows(plan.settings, ordered):
        style = "cyan" if any(row.name for row in rows) else ""
        table.add_row(*(Text(cell) for cell in _cells(plan, rows)), style=style)
    return table


def _label(row: Ranked) -> str:
    label = setting_label(row.planned.params)
    return f"{label} [{row.name}]" if row.name else label


def _cells(plan: StudyPlan, rows: Sequence[Ranked]) -> tuple[str, ...]:
    """One line for settings with the same numbers."""
    row = rows[0]
    level = plan.settings.objectives[0].concurrency
    rung = next(rung for rung in row.rungs if rung.level == level)
    mark = "" if row.basis is Basis.SIMULATION else "~"
    spread = "-"
    if rung.p10 is not None and rung.p90 is not None:
        spread = f"{format_number(rung.p10)} - {format_number(rung.p90)}"
    return (
        mark + format_number(row.objective),
        spread,
        format_number(rung.power_w),
        " = ".join(_label(each) for each in rows),
        row.reason
        + (f"; {row.alike} more cap{'s' if row.alike > 1 else ''} alike" if row.alike else "")
        + (f"; misses {_limits(plan.settings)}" if row.misses_slo else ""),
    )


def _limits(settings: StudySettings) -> str:
    words = [f"{each.metric} {each.percentile} {each.limit_s:g} s" for each in settings.slo]
    return f"the limit {words[0]}" if len(words) == 1 else f"one of {', '.join(words)}"


def _basis_words(plan: StudyPlan) -> str:
    rows = [*plan.ranking, *plan.baselines]
    words = f"Simulated under up to {SEEDS} seeds; p10 - p90 is output_throughput over them, "
    words += "a dash where one was enough. "
    words += (
        "One row a layout, at its best cap, and for what has the same numbers; alike are caps that "
        "the closed form puts within 0.5 %. From the best on, rows whose spreads overlap with "
        "it stand together: baselines first, then what is nearest to SGLang's defaults."
    )
    if any(row.basis is Basis.CLOSED_FORM for row in rows):
        words += " ~ by the closed form only."
    return words


def _cost(plan: StudyPlan) -> Iterator[Text]:
    cost, settings = plan.cost, plan.settings
    trials = f"{cost.trials} trials and up to {cost.remeasured} re-measurements"
    clock = ""
    if settings.engine.kind is EngineKind.EMULATED:
        clock = f" at time scale {settings.engine.time_scale:g}"
    elif settings.engine.kind is EngineKind.SIMULATED:
        clock = " on the machine of the profile"
    limit = f"; then search.{cost.limited_by} is spent" if cost.limited_by else ""
    yield Text(
        f"{trials} in about {cost.launches} launches: about {duration_words(cost.time_s)}{clock}, "
        f"{format_number(cost.energy_j / 1e6)} MJ ({format_number(cost.energy_j / JOULES_PER_KWH)}"
        f" kWh){limit}, if none is stopped early."
    )
