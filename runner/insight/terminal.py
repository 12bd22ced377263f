"""The live views: a moving picture in a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from runner.forecast.setting import not_modelled
from runner.insight.live import (
    Event,
    LaunchPhase,
    Note,
    RungDone,
    RungProgress,
    RunningTrial,
    Session,
    StudyEnded,
    StudyStarted,
    TrialDone,
    TrialStarted,
    View,
    duration_words,
)
from runner.insight.words import format_number, not_modelled_words
from runner.settings import StudySettings
from runner.trial import EngineKind

PROGRESS_INTERVAL_S = 10.0
REFRESH_PER_SECOND = 4
BAR_WIDTH = 30


def view_for(stream: TextIO) -> View:
    """The moving picture where the stream is a capable terminal, else plain lines."""
    console = Console(file=stream, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return RichView(console)
    return PlainView(stream)


class PlainView:
    """One line per event; of progress at most one line in ten seconds."""

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._now = now
        self._session = Session()
        self._lock = threading.Lock()
        self._progress_s = -PROGRESS_INTERVAL_S

    def handle(self, event: Event) -> None:
        """Print the event's line, if it is due one."""
        with self._lock:
            now_s = self._now()
            line = event_line(event, self._session, now_s)
            if line and self._is_due(event, now_s):
                self._stream.write(line + "\n")
                self._stream.flush()

    def close(self) -> None:
        """Nothing to give back."""

    def _is_due(self, event: Event, now_s: float) -> bool:
        if not isinstance(event, RungProgress):
            return True
        is_due = now_s - self._progress_s >= PROGRESS_INTERVAL_S
        self._progress_s = now_s if is_due else self._progress_s
        return is_due


class RichView:
    """What runs now, at the foot of the terminal; what is final scrolls away above it."""

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._session = Session()
        self._lock = threading.Lock()
        self._live = Live(
            console=console,
            get_renderable=self._picture,
            refresh_per_second=REFRESH_PER_SECOND,
            transient=True,
            redirect_stdout=False,
        )

    def handle(self, event: Event) -> None:
        """Change the picture; what is final is also printed above it."""
        if isinstance(event, StudyStarted):
            self._live.start()
        with self._lock:
            now_s = self._now()
            line = event_line(event, self._session, now_s)
            if isinstance(event, TrialDone):
                line = self._session.result_words(event.result)
        if not isinstance(event, LaunchPhase | TrialStarted | RungProgress | RungDone):
            self._console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        """Take the picture away."""
        self._live.stop()

    def _picture(self) -> RenderableType:
        with self._lock:
            return session_picture(self._session, self._now())


def event_line(event: Event, session: Session, now_s: float) -> str:
    """Let the session observe an event, and tell the event in one line ("": no line)."""
    before = session.launch
    session.observe(event, now_s)
    match event:
        case StudyStarted(settings, results):
            verb = "continues" if results else "starts"
            return f"{settings.name} {verb}: {session.progress.words}{_unmodelled(settings)}"
        case LaunchPhase(launch, phase):
            is_same = before is not None and (before.number, before.phase) == (launch, phase)
            return "" if is_same else f"launch {launch}: {phase}"
        case TrialStarted(number):
            return f"#{number} {_setting_words(session.trial)}"
        case RungProgress():
            words = _trial_words(session)
            return f"#{session.trial.number} {words}" if session.trial and words else ""
        case RungDone(number, rung):
            rates = _rates(rung.output_throughput, rung.power_w)
            unfair = "; " if rung.cut_below is not None else "; not valid: "
            doubt = "" if rung.valid else f"{unfair}{', '.join(rung.reasons)}"
            notes = "".join(f"; note: {note}" for note in rung.notes)
            return f"#{number} C={rung.concurrency} done: {rates}{doubt}{notes}"
        case TrialDone(result):
            return f"{session.result_words(result)}; {_progress_words(session, now_s)}"
        case StudyEnded(state):
            return f"{state}: {_progress_words(session, None)}"
        case Note(text):
            return text


def _unmodelled(settings: StudySettings) -> str:
    """Which names mean nothing to a model that stands in for SGLang; empty where it knows all."""
    if settings.engine.kind is EngineKind.SGLANG:
        return ""
    names = not_modelled((*settings.engine.args, *(each.name for each in settings.parameters)))
    return f"\n{not_modelled_words(names)}" if names else ""


def session_picture(session: Session, now_s: float) -> RenderableType:
    """The foot of the terminal: progress, trial, launch or rung, best so far."""
    if session.settings is None:
        return Text("")
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        grid.add_column(no_wrap=True, overflow="ellipsis")
    if session.trial is not None:
        setting = Text(_setting_words(session.trial))
        grid.add_row(Text(f"#{session.trial.number}", style="cyan"), setting)
    if session.launch is not None:
        elapsed = duration_words(now_s - session.launch.since_s)
        words = f"launch {session.launch.number}: {session.launch.phase}, {elapsed}"
        grid.add_row("", Text(words))
    elif session.trial is not None:
        grid.add_row("", Text(_trial_words(session)))
    grid.add_row(Text("best", style="green"), Text(session.best_words() or "none yet"))
    return Group(_bar(session, now_s), grid)


def _bar(session: Session, now_s: float) -> Table:
    progress = session.progress
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_row(
        Text(session.settings.name if session.settings else "", style="bold"),
        ProgressBar(max(1, progress.measured + progress.left), progress.measured, BAR_WIDTH),
        Text(progress.words),
        Text(_eta_words(session, now_s)),
    )
    return row


def _setting_words(trial: RunningTrial | None) -> str:
    if trial is None:
        return ""
    return f"{trial.label} [{trial.name}]" if trial.name else trial.label


def _trial_words(session: Session) -> str:
    """`rung 2/3 C=8: 531 tokens/s, 1804 W`; before the first glimpse only the rung."""
    trial, ladder = session.trial, session.ladder
    if trial is None or trial.rungs_done >= len(ladder):
        return ""
    where = f"rung {trial.rungs_done + 1}/{len(ladder)} C={ladder[trial.rungs_done]}"
    if trial.glimpse is None:
        return where
    return f"{where}: {_rates(trial.glimpse.output_throughput, trial.glimpse.power_w)}"


def _rates(throughput: float | None, power_w: float | None) -> str:
    return f"{format_number(throughput)} tokens/s, {format_number(power_w)} W"


def _progress_words(session: Session, now_s: float | None) -> str:
    """Done, best so far, and (while it goes on) the time left."""
    parts = [session.progress.words]
    if best := session.best_words(with_setting=False):
        parts.append(f"best {best}")
    if now_s is not None and (eta := _eta_words(session, now_s)):
        parts.append(eta)
    return "; ".join(parts)


def _eta_words(session: Session, now_s: float) -> str:
    eta_s = session.eta_s(now_s)
    return f"about {duration_words(eta_s)} left" if eta_s else ""
