from __future__ import annotations

import io
from dataclasses import dataclass, replace

import pytest
from rich.console import Console

from runner.insight.live import (
    Event,
    LaunchPhase,
    Note,
    RungDone,
    RungProgress,
    Session,
    StudyEnded,
    StudyStarted,
    TrialDone,
    TrialStarted,
    duration_words,
)
from runner.insight.terminal import PlainView, RichView, session_picture, view_for
from runner.trial import EngineKind, Outcome
from tests.samples import PARAMS, make_result, make_rung, make_settings

START = StudyStarted(make_settings(), (), "runner tune demo.yaml")
TRIAL = TrialStarted(7, None, PARAMS)


@dataclass
class Wall:
    """A clock that a test moves by hand."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


def plain_lines(*events: Event) -> list[str]:
    stream = io.StringIO()
    view = PlainView(stream, Wall())
    for event in events:
        view.handle(event)
    view.close()
    return stream.getvalue().splitlines()


def test_names_that_the_model_does_not_know_are_told_where_it_stands_in_for_sglang() -> None:
    known = make_settings()
    simulated = replace(known.engine, kind=EngineKind.SIMULATED, args={"pp_async_depth": 4})
    for engine, expected in (
        (known.engine, []),
        (replace(simulated, kind=EngineKind.SGLANG), []),
        (simulated, ["Not modelled, so without effect on these numbers: pp_async_depth."]),
    ):
        first, *others = plain_lines(StudyStarted(replace(known, engine=engine), (), "runner tune"))
        assert first == "demo starts: 0 of 20 trials done"
        assert others == expected


def test_a_trial_in_plain_lines() -> None:
    rung = make_rung(32, 540.0, power_w=1800.0)
    done = make_result(7, 540.0, rungs=(rung,))
    start = LaunchPhase(3, "start")
    *lines, last = plain_lines(START, TRIAL, start, RungDone(7, rung), TrialDone(done))
    assert lines == [
        "demo starts: 0 of 20 trials done",
        "#7 pp8 d8 cap4 graph triton",
        "launch 3: start",
        "#7 C=32 done: 540 tokens/s, 1800 W",
    ]
    what = "#7 pp8 d8 cap4 graph triton complete, 540 tokens/s at C=32"
    assert last == f"{what}; 1 of 20 trials done; best #7 540 tokens/s at C=32"


def test_a_continued_study_says_what_is_done() -> None:
    results = (make_result(0, 100.0), make_result(1, None), make_result(2, 90.0, repeat_of=0))
    start = StudyStarted(make_settings(), results, "runner resume demo")
    assert plain_lines(start) == ["demo continues: 1 of 20 trials done, 1 of 1 measured again"]


def test_failures_are_told_with_their_reason_in_one_line() -> None:
    failed = make_result(7, None, outcome=Outcome.INFEASIBLE, reason="out of\nmemory")
    line = plain_lines(START, TRIAL, TrialDone(failed))[-1]
    assert line == "#7 pp8 d8 cap4 graph triton infeasible, out of memory; 0 of 20 trials done"


def test_a_remeasurement_names_its_setting() -> None:
    again = make_result(9, 100.0, repeat_of=7)
    assert "#9 (#7 again) pp8" in plain_lines(START, TrialDone(again))[-1]


def test_a_rung_that_does_not_count_says_why() -> None:
    rung = make_rung(8, 10.0, valid=False, reasons=("not steady", "throttled"))
    assert plain_lines(START, TRIAL, RungDone(7, rung))[-1].endswith(
        "; not valid: not steady, throttled"
    )


def test_a_rung_that_was_cut_short_is_not_called_unfair() -> None:
    rung = make_rung(8, 10.0, valid=False, reasons=("cut short: at 10 tokens/s",))
    line = plain_lines(START, TRIAL, RungDone(7, replace(rung, cut_below=40.0)))[-1]
    assert line.endswith("; cut short: at 10 tokens/s")
    assert "not valid" not in line


def test_plain_progress_is_at_most_one_line_in_ten_seconds() -> None:
    stream, wall = io.StringIO(), Wall()
    view = PlainView(stream, wall)
    view.handle(START)
    view.handle(TRIAL)
    for _ in range(200):  # twenty seconds of glimpses
        view.handle(RungProgress(500.0, 1500.0))
        wall.now_s += 0.1
    lines = [line for line in stream.getvalue().splitlines() if "rung" in line]
    assert lines == ["#7 rung 1/3 C=32: 500 tokens/s, 1500 W"] * 2


def test_a_phase_that_is_told_again_is_no_new_line() -> None:
    phases = [LaunchPhase(3, "start"), LaunchPhase(3, "start"), LaunchPhase(3, "stop")]
    assert plain_lines(START, *phases)[1:] == ["launch 3: start", "launch 3: stop"]


def test_rungs_are_named_in_measured_order() -> None:
    session = Session()
    for event in (
        START,
        TRIAL,
        RungDone(7, make_rung(32, 1.0, position=0)),
        RungProgress(1.0, None),
    ):
        session.observe(event, 0.0)
    assert "rung 2/3 C=8: 1.00 tokens/s, - W" in picture(session)


def picture(session: Session, now_s: float = 0.0, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(session_picture(session, now_s))
    return capture.get()


def test_picture_shows_trial_launch_best_done_and_eta() -> None:
    session = Session()
    session.observe(START, 0.0)
    session.observe(TrialDone(make_result(0, 300.0, name="tp8")), 30.0)
    session.observe(TRIAL, 30.0)
    session.observe(LaunchPhase(2, "load_weights"), 30.0)
    text = picture(session, 40.0)
    assert "1 of 20 trials done" in text
    assert "about 11 min 20 s left" in text  # 19 and 4 again, 30 s each, 10 s of them gone
    assert "#7    pp8 d8 cap4 graph triton" in text
    assert "launch 2: load_weights, 10 s" in text
    assert "best  #0 pp8 d8 cap4 graph triton 300 tokens/s at C=32" in text


def test_picture_fits_a_narrow_terminal() -> None:
    session = Session()
    for event in (START, TRIAL, RungProgress(12345.6, 4800.0)):
        session.observe(event, 0.0)
    assert max(len(line) for line in picture(session, width=40).splitlines()) <= 40


def test_eta_is_paced_by_this_session_only() -> None:
    session = Session()
    before = tuple(make_result(n, 100.0) for n in range(10))
    session.observe(StudyStarted(make_settings(), before, ""), 500.0)
    assert session.eta_s(500.0) is None
    session.observe(TrialDone(make_result(10, None)), 560.0)  # failed: takes time, counts nothing
    assert session.eta_s(560.0) is None
    session.observe(TrialDone(make_result(11, 100.0)), 620.0)
    left = 9 + 4  # trials; finalists and the baseline once more
    assert session.eta_s(620.0) == 120.0 * left
    assert session.eta_s(650.0) == 120.0 * left - 30.0
    assert session.eta_s(10_000.0) == 120.0 * (left - 1)  # the trial that runs takes its time


def test_nothing_is_left_when_all_are_done() -> None:
    session = Session()
    session.observe(START, 0.0)
    for number in range(20):
        session.observe(TrialDone(make_result(number, 100.0)), 20.0 * (number + 1))
    assert session.eta_s(400.0) == 3 * 20.0  # the finalists, once more
    for number in range(20, 23):
        session.observe(TrialDone(make_result(number, 100.0, repeat_of=number - 20)), 400.0)
    assert session.eta_s(400.0) == 0.0


def test_rich_view_keeps_results_and_takes_its_picture_away() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    view = RichView(console, Wall())
    view.handle(Note("ended an orphan"))
    for event in (START, TRIAL, RungProgress(1.0, 2.0), TrialDone(make_result(7, 540.0))):
        view.handle(event)
    view.handle(StudyEnded("finished"))
    view.close()
    text = stream.getvalue()
    assert "ended an orphan\n" in text
    assert "#7 pp8 d8 cap4 graph triton complete, 540 tokens/s at C=32\n" in text
    assert "finished: 1 of 20 trials done; best #7 540 tokens/s at C=32\n" in text
    assert text.rstrip().endswith("\x1b[2K")  # the last thing written wipes the picture


def test_closing_a_view_that_never_began_is_harmless() -> None:
    RichView(Console(file=io.StringIO(), force_terminal=True)).close()


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "term", "kind"),
    [
        (FakeTerminal(), "xterm-256color", RichView),
        (FakeTerminal(), "dumb", PlainView),
        (io.StringIO(), "xterm-256color", PlainView),
    ],
)
def test_the_view_follows_the_stream(
    stream: io.StringIO, term: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    assert type(view_for(stream)) is kind


@pytest.mark.parametrize(
    ("duration_s", "words"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (250.0, "4 min 10 s"),
        (7500.0, "2 h 05 min"),
    ],
)
def test_durations_are_words(duration_s: float, words: str) -> None:
    assert duration_words(duration_s) == words


def test_a_rung_with_a_note_tells_it() -> None:
    rung = make_rung(8, 10.0, notes=("nothing was cached",))
    assert plain_lines(START, TRIAL, RungDone(7, rung))[-1].endswith("; note: nothing was cached")
