"""What a trial's MLflow run says: its name, tags, parameters, metrics and note. Pure.

Metrics of a rung have step = concurrency. Everything derives from the trial's files, times
included, so that logging a trial again changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from runner.clock import ClockAnchor
from runner.cluster.executor import LaunchReport
from runner.label import setting_label
from runner.measure.evidence_words import findings
from runner.measure.resolved import difference_words
from runner.record.power_series import gpu_series
from runner.record.tracking_store import PARENT_TAG, MetricPoint, RunStatus
from runner.trial import (
    Distribution,
    Outcome,
    Params,
    ParamValue,
    PowerSample,
    RungResult,
    TrialLengths,
    TrialResult,
)

KIND_TAG, STUDY_KIND, TRIAL_KIND = "kind", "study", "trial"
TRIAL_TAG = "trial"
NOTE_TAG = "mlflow.note.content"
LONGEST_TAG = 5000
UNAVAILABLE = "unavailable"
RUNG_METRICS = (
    "output_throughput",
    "output_throughput_halfwidth",
    "total_throughput",
    "request_throughput",
    "goodput",
    "slo_attainment",
    "slo_attainment_low",
    "slo_attainment_high",
    "achieved_concurrency",
    "requests",
    "errors",
    "window_s",
    "power_w",
    "energy_j",
    "tokens_per_joule",
    "joules_per_request",
)
EVIDENCE_METRICS = (
    "graph_share",
    "batch_mean",
    "batch_max",
    "queue_mean",
    "queue_max",
    "kv_usage_max",
    "retractions",
    "pauses",
    "paused_s",
)
LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
PERCENTILES = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class TrialTimes:
    """When a trial ran, as Unix time. `anchor` None: it ended before anything was measured."""

    anchor: ClockAnchor | None
    finished_s: float

    def at_ms(self, clock_s: float) -> int:
        """A reading of the trial's clock, in milliseconds of Unix time."""
        return self.finished_ms if self.anchor is None else _ms(self.anchor.to_wall_s(clock_s))

    @property
    def finished_ms(self) -> int:
        """When the trial's result was written."""
        return _ms(self.finished_s)

    def start_ms(self, result: TrialResult) -> int:
        """When the trial began: its spec, or its first window if that is older (continued)."""
        began = [] if self.anchor is None else [_ms(self.anchor.wall_s)]
        windows = [self.at_ms(rung.window_start_s) for rung in result.rungs]
        return min([*began, *windows, self.finished_ms])

    def end_ms(self, result: TrialResult) -> int:
        """When its last window closed; without one, when its result was written."""
        ends = [self.at_ms(rung.end_s) for rung in result.rungs]
        return max(ends, default=self.finished_ms)


def run_name(result: TrialResult) -> str:
    """`#12 pp8 d8 cap4 graph triton`; a baseline's name comes before its parameters."""
    label = setting_label(result.params)
    name = None if result.name == label else result.name
    return " ".join(word for word in (f"#{result.number}", name, label) if word)


def run_status(outcome: Outcome) -> RunStatus:
    """MLflow's status. A pruned trial did what it should: it is FINISHED, not a failure."""
    is_good = outcome in (Outcome.COMPLETE, Outcome.PRUNED)
    return RunStatus.FINISHED if is_good else RunStatus.FAILED


def run_tags(result: TrialResult, study: str, parent: str) -> dict[str, str]:
    """Tags by which a trial is found; those that do not apply are left out."""
    tags = {
        KIND_TAG: TRIAL_KIND,
        "study": study,
        TRIAL_TAG: result.number,
        PARENT_TAG: parent,
        "outcome": result.outcome.value,
        "reason": result.reason,
        "stage": result.stage,
        "baseline": result.name,
        "launch": result.launch,
        "retry_of": result.retry_of,
        "repeat_of": result.repeat_of,
        "lengths": result.lengths.value,
        "shares": result.shares,
        "canary": None if result.canary is None else result.canary.words,
        "differences": "; ".join(difference_words(result.differences)) or None,
        "spec_hash": result.spec_hash,
    }
    return {key: str(value)[:LONGEST_TAG] for key, value in tags.items() if value is not None}


def run_params(result: TrialResult) -> dict[str, str]:
    """Parameters as asked (`pp_size`) and as the servers resolved them (`resolved.pp_size`)."""
    asked = {legal_name(key): _text(value) for key, value in result.params.items()}
    resolved = {f"resolved.{legal_name(k)}": _text(v) for k, v in result.resolved.items()}
    return asked | {key: value for key, value in resolved.items() if value}


def run_metrics(
    result: TrialResult,
    times: TrialTimes,
    samples: Sequence[PowerSample],
    gpu_uuids: Sequence[str],
) -> list[MetricPoint]:
    """Every metric of the run: rungs, parameters as numbers, objectives, GPUs over time."""
    points = [
        MetricPoint(name, value, times.at_ms(rung.end_s), rung.concurrency)
        for rung in result.rungs
        for name, value in rung_values(rung)
    ]
    end_ms = times.end_ms(result)
    points += [
        MetricPoint(f"param.{legal_name(name)}", value, end_ms, 0)
        for name, value in numeric(result.params)
    ]
    if all(rung.valid for rung in result.rungs):  # else charts would rank what is no measurement
        points += [
            MetricPoint(objective_name(index), value, end_ms, 0)
            for index, value in enumerate(result.values)
        ]
    points += [
        MetricPoint(series.name, value, times.at_ms(time_s), step)
        for series in gpu_series(samples, gpu_uuids)
        for step, (time_s, value) in enumerate(series.points)
    ]
    return points


def objective_name(index: int) -> str:
    """`objective` for the first, `objective.2` and so on for further ones."""
    return "objective" if index == 0 else f"objective.{index + 1}"


def rung_values(rung: RungResult) -> Iterator[tuple[str, float]]:
    """The metrics of a rung that were measured."""
    measured = [(name, getattr(rung, name)) for name in RUNG_METRICS]
    told = [(name, getattr(rung.evidence, name)) for name in EVIDENCE_METRICS]
    for name, value in (*measured, *told):
        if value is not None:
            yield name, float(value)
    for name in LATENCIES:
        latency: Distribution | None = getattr(rung, name)
        if latency is not None:
            for percentile in PERCENTILES:
                yield f"{name}.{percentile}", getattr(latency, percentile)


def numeric(params: Params) -> Iterator[tuple[str, float]]:
    """The parameters that are numbers (MLflow compares parameters as strings only)."""
    for name, value in params.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


def run_note(result: TrialResult, report: LaunchReport | None) -> str:
    """What a person reads first: outcome, how the servers were started, the rungs in a table."""
    lines = [f"**{result.outcome.value}**" + (f": {result.reason}" if result.reason else "")]
    if result.shares is not None:
        lines += ["", f"Not measured: its servers resolve to those of #{result.shares}."]
    lines += [line for w in difference_words(result.differences) for line in ("", f"Note: {w}.")]
    if result.lengths is TrialLengths.WORKLOAD:
        lines += ["", "Measured at the lengths of the workload, not at those of the search."]
    notes = dict.fromkeys(note for rung in result.rungs for note in rung.notes)
    lines += [line for note in notes for line in ("", f"Note: {note}.")]
    lines += [line for found in findings(result) for line in ("", f"{found.sentence}.")]
    unsure = [str(rung.concurrency) for rung in result.rungs if rung.metastable]
    if unsure:
        lines += ["", f"Metastable at C={', '.join(unsure)}: it depends on how the load began."]
    commands = () if report is None else report.commands
    if commands:
        more = f" (the first of {len(commands)} servers)" if len(commands) > 1 else ""
        lines += ["", f"Started with{more}:", "", "```", commands[0], "```"]
    if result.rungs:
        lines += ["", "| concurrency | tok/s | +- (95 %) | TTFT p99 | TPOT p50 | W | tok/J |"]
        lines += ["|---:|---:|---:|---:|---:|---:|---:|"]
        lines += [_row(rung) for rung in sorted(result.rungs, key=lambda rung: rung.concurrency)]
    return "\n".join(lines)[:LONGEST_TAG]


def legal_name(name: str) -> str:
    """`name` with what MLflow refuses in keys (`=`, `[`, `%` ...) replaced."""
    return re.sub(r"[^\w\-./ :]", "_", name, flags=re.ASCII)


def _row(rung: RungResult) -> str:
    cells = (
        str(rung.concurrency),
        f"{rung.output_throughput:.0f}{'' if rung.valid else ' (not valid)'}",
        _halfwidth(rung),
        "-" if rung.ttft_s is None else f"{1000 * rung.ttft_s.p99:.1f} ms",
        "-" if rung.tpot_s is None else f"{1000 * rung.tpot_s.p50:.1f} ms",
        UNAVAILABLE if rung.power_w is None else f"{rung.power_w:.0f}",
        UNAVAILABLE if rung.tokens_per_joule is None else f"{rung.tokens_per_joule:.3g}",
    )
    return f"| {' | '.join(cells)} |"


def _halfwidth(rung: RungResult) -> str:
    width = rung.output_throughput_halfwidth
    return "-" if width is None else f"{width:.1f}"


def _text(value: ParamValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _ms(seconds: float) -> int:
    return round(1000 * seconds)
