from __future__ import annotations

import io
import json

from runner.insight.progress import progress_of
from runner.insight.status import best_words, print_status, status_document
from runner.record.store import StudyProgress, StudyState
from runner.trial import Outcome
from tests.samples import make_result, make_settings

STUDY = make_settings()
RESULTS = [
    make_result(0, 100.0),
    make_result(1, 90.0, outcome=Outcome.PRUNED, values=()),
    make_result(2, None, outcome=Outcome.INFEASIBLE),
    make_result(3, 99.0, repeat_of=0),
]


def progress(
    state: StudyState | None, running: tuple[int, ...] = (), minutes_used: float = 3.0
) -> StudyProgress:
    return StudyProgress(state, None, running, minutes_used, 4)


def test_document_counts_each_outcome_and_leaves_remeasurements_out() -> None:
    document = status_document(RESULTS, STUDY, progress(StudyState.RUNNING, running=(4,)))
    assert json.loads(json.dumps(document["trials"])) == {
        "complete": 1,
        "pruned": 1,
        "infeasible": 1,
        "failed": 0,
        "invalid": 0,
        "lost": 0,
        "running": 1,
        "wanted": 20,
    }
    assert list(document) == ["name", "state", "trials", "best", "eta_s"]
    assert document["state"] == "running"


def test_eta_is_what_is_left_at_the_mean_pace_of_all_sessions() -> None:
    """18 trials, then the baseline and three finalists once more."""
    document = status_document(RESULTS[:3], STUDY, progress(StudyState.INTERRUPTED))
    assert document["eta_s"] == (18 + 4) * 90.0


def test_without_a_counted_trial_there_is_no_eta() -> None:
    document = status_document([], STUDY, progress(StudyState.RUNNING))
    assert document["eta_s"] is None
    assert document["best"] is None


def test_a_finished_study_has_nothing_left() -> None:
    assert status_document(RESULTS, STUDY, progress(StudyState.FINISHED))["eta_s"] == 0.0


def test_what_a_killed_driver_left_half_done_does_not_run() -> None:
    document = status_document(RESULTS, STUDY, progress(None, running=(4,)))
    assert document["state"] == "interrupted"
    trials = document["trials"]
    assert isinstance(trials, dict)
    assert trials["running"] == 0


def test_status_in_words() -> None:
    stream = io.StringIO()
    document = status_document(RESULTS[:3], STUDY, progress(StudyState.RUNNING, (4,)))
    far = progress_of(RESULTS[:3], STUDY).words
    print_status(document, far, best_words(RESULTS[:3], STUDY), stream)
    assert stream.getvalue().splitlines() == [
        "demo: running, 2 of 20 trials done",
        "1 complete, 1 pruned, 1 infeasible, 1 running",
        "best #0 pp8 d8 cap4 graph triton, 100 tokens/s at C=32",
        "about 33 min 00 s left",
    ]
