"""What a driver says while it tunes, and what that adds up to: done, left, best so far.

The driver hands events to a `View`; terminal.py has the views. Nothing here measures or decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from runner.insight.confirmation import lengths_words
from runner.insight.progress import Progress, progress_of
from runner.insight.ranking import rank
from runner.insight.summary import short_reason
from runner.insight.words import format_value
from runner.label import setting_label
from runner.plans import rung_plans
from runner.settings import StudySettings
from runner.trial import Params, RungResult, TrialLengths, TrialResult


@dataclass(frozen=True, slots=True)
class StudyStarted:
    """A session begins; `results` are what earlier sessions left, `command` continues the study."""

    settings: StudySettings
    results: tuple[TrialResult, ...]
    command: str


@dataclass(frozen=True, slots=True)
class LaunchPhase:
    """A launch enters a phase of its start or stop."""

    launch: int
    phase: str


@dataclass(frozen=True, slots=True)
class TrialStarted:
    """A trial begins; its launch may still have to start. `name` is a baseline's."""

    number: int
    name: str | None
    params: Params
    repeat_of: int | None = None
    lengths: TrialLengths = TrialLengths.SEARCH


@dataclass(frozen=True, slots=True)
class RungProgress:
    """A glimpse of the load that runs now; None: not known."""

    output_throughput: float | None
    power_w: float | None


@dataclass(frozen=True, slots=True)
class RungDone:
    """A rung was measured and judged."""

    number: int
    rung: RungResult


@dataclass(frozen=True, slots=True)
class TrialDone:
    """A trial has its result, whatever the outcome."""

    result: TrialResult


@dataclass(frozen=True, slots=True)
class StudyEnded:
    """The session ends: finished, interrupted or stopped."""

    state: str


@dataclass(frozen=True, slots=True)
class Note:
    """Anything else a user should read."""

    text: str


Event: TypeAlias = (
    StudyStarted
    | LaunchPhase
    | TrialStarted
    | RungProgress
    | RungDone
    | TrialDone
    | StudyEnded
    | Note
)


class View(Protocol):
    """Shows a session to a person. May be called from any thread."""

    def handle(self, event: Event) -> None:
        """Take one event; returns at once."""
        ...

    def close(self) -> None:
        """Give the terminal back."""
        ...


@dataclass(frozen=True, slots=True)
class RunningLaunch:
    """A launch that is starting or stopping, since when in this phase."""

    number: int
    phase: str
    since_s: float


@dataclass(frozen=True, slots=True)
class RunningTrial:
    """The trial under way, the rungs it has behind it and the last glimpse of the next one."""

    number: int
    name: str | None
    label: str
    rungs_done: int = 0
    glimpse: RungProgress | None = None


NOT_BEGUN = Progress(0, 0, is_repeating=False, again_done=0, again_wanted=0)


@dataclass(slots=True)
class Session:
    """The state of a live view; `observe` takes every event in order."""

    settings: StudySettings | None = None
    started_s: float = 0.0
    measured_before: int = 0
    measured_s: float = 0.0
    results: list[TrialResult] = field(default_factory=list)
    progress: Progress = NOT_BEGUN  # kept: a picture asks for it several times a second
    launch: RunningLaunch | None = None
    trial: RunningTrial | None = None

    def observe(self, event: Event, now_s: float) -> None:
        """Take one event in; `now_s` is wall time."""
        match event:
            case StudyStarted(settings, results):
                self.settings, self.started_s = settings, now_s
                self.results = list(results)
                self.progress = progress_of(self.results, settings)
                self.measured_before = self.progress.measured
            case LaunchPhase(launch, phase):
                shown = self.launch
                if shown is None or (shown.number, shown.phase) != (launch, phase):
                    self.launch = RunningLaunch(launch, phase, now_s)
            case TrialStarted(number, name, params, repeat_of, lengths):
                label = setting_label(params) + self._again_words(repeat_of, lengths)
                self.trial = RunningTrial(number, name, label)
            case RungProgress():
                self.launch = None
                self.trial = self.trial and replace(self.trial, glimpse=event)
            case RungDone(_, rung):
                self.launch = None
                done = rung.position + 1
                self.trial = self.trial and replace(self.trial, rungs_done=done, glimpse=None)
            case TrialDone(result):
                before = self.progress.measured
                self.results.append(result)
                if self.settings is not None:
                    self.progress = progress_of(self.results, self.settings)
                self.measured_s = now_s if self.progress.measured > before else self.measured_s
                self.launch = self.trial = None
            case StudyEnded() | Note():
                pass

    @property
    def ladder(self) -> tuple[int, ...]:
        """The concurrencies of a trial in measured order."""
        if self.settings is None:
            return ()
        return tuple(plan.concurrency for plan in rung_plans(self.settings, 0))

    def eta_s(self, now_s: float) -> float | None:
        """Wall seconds to the end of the study, at this session's mean pace; None: no pace yet.

        A trial that takes longer than the mean does not count as done: the others are still to
        come.
        """
        progress = self.progress
        done_here = progress.measured - self.measured_before
        if progress.left <= 0:
            return 0.0
        if done_here <= 0:
            return None
        pace_s = (self.measured_s - self.started_s) / done_here
        return max(pace_s * progress.left - (now_s - self.measured_s), pace_s * (progress.left - 1))

    def best_words(self, *, with_setting: bool = True) -> str | None:
        """`#5 pp8 d8 cap4 graph triton 582 tokens/s at C=32`."""
        if self.settings is None:
            return None
        ranking = rank(self.results, self.settings)
        if (best := ranking.best) is None:
            return None
        value = format_value(best.values[0], self.settings.objectives[0])
        if at := lengths_words(ranking.lengths, self.settings):
            value += f", {at}"
        label = f" {setting_label(best.params)}" if with_setting else ""
        return f"#{best.number}{label} {value}"

    def result_words(self, result: TrialResult) -> str:
        """`#7 pp8 d8 complete, 540 tokens/s at C=32`, or the outcome and its reason."""
        again = self._again_words(result.repeat_of, result.lengths)
        what = f"#{result.number}{again} {setting_label(result.params)} {result.outcome}"
        if result.values and self.settings is not None:
            return f"{what}, {format_value(result.values[0], self.settings.objectives[0])}"
        reason = short_reason(result)
        return f"{what}, {reason}" if reason else what

    def _again_words(self, repeat_of: int | None, lengths: TrialLengths) -> str:
        """` (#3 again, at your lengths)`; empty for a trial of the search."""
        if repeat_of is None:
            return ""
        at = "" if self.settings is None else lengths_words(lengths, self.settings)
        return f" (#{repeat_of} again, {at})" if at else f" (#{repeat_of} again)"


def duration_words(duration_s: float) -> str:
    """`45 s`, `4 min 10 s`, `2 h 05 min`."""
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
