"""How far a study is: its state in a word, its trials in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from runner.insight.confirmation import lengths_words
from runner.insight.live import duration_words
from runner.insight.progress import progress_of
from runner.insight.ranking import rank
from runner.insight.words import format_value
from runner.label import setting_label
from runner.record.codec import encode
from runner.record.store import StudyProgress, StudyState
from runner.settings import StudySettings
from runner.trial import Outcome, TrialResult

AGAIN = ("failed", "invalid", "lost")


def status_document(
    results: Sequence[TrialResult], settings: StudySettings, progress: StudyProgress
) -> dict[str, object]:
    """The JSON answer of `runner status`; re-measurements are not among the counted trials.

    `eta_s` is what is left, re-measurements too, at the mean pace of all sessions, None before the
    first trial.
    A study whose driver was killed in its first session counts as interrupted.
    """
    counts = Counter(result.outcome for result in results if result.repeat_of is None)
    far = progress_of(results, settings)
    state = progress.state or StudyState.INTERRUPTED
    is_over = state is StudyState.FINISHED or far.left == 0
    pace_s = 60.0 * progress.minutes_used / far.measured if far.measured else None
    best = rank(results, settings).best
    return {
        "name": settings.name,
        "state": state.value,
        "trials": {
            **{outcome.value: counts[outcome] for outcome in Outcome},
            "running": len(progress.running) if state is StudyState.RUNNING else 0,
            "wanted": far.wanted,
        },
        "best": None if best is None else encode(best.result),
        "eta_s": 0.0 if is_over else None if pace_s is None else pace_s * far.left,
    }


def best_words(results: Sequence[TrialResult], settings: StudySettings) -> str | None:
    """`#3 pp4 tp2 d8 cap59 graph, 212 tokens/s at C=8`, the value the mean as in the report."""
    ranking = rank(results, settings)
    if (best := ranking.best) is None:
        return None
    value = format_value(best.values[0], settings.objectives[0])
    if at := lengths_words(ranking.lengths, settings):
        value += f", {at}"
    return f"#{best.number} {setting_label(best.params)}, {value}"


def print_status(document: Mapping[str, Any], far: str, best: str | None, stream: TextIO) -> None:
    """The same for a person; `far` from Progress.words, `best` from best_words."""
    counts = dict(document["trials"])
    del counts["wanted"]
    parts = [f"{count} {word}" for word, count in counts.items() if count]
    lines = [f"{document['name']}: {document['state']}, {far}"]
    lines += [", ".join(parts)] if parts else []
    if any(counts[word] for word in AGAIN):
        lines.append(f"({', '.join(AGAIN)}: do not count; most are tried again)")
    if best is not None:
        lines.append(f"best {best}")
    if document["eta_s"]:
        lines.append(f"about {duration_words(document['eta_s'])} left")
    stream.write("\n".join(lines) + "\n")
