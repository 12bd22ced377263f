"""Two rankings, one for the lengths of the search and one for the user's: what is said of both."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest

from runner.insight.confirmation import lengths_words
from runner.insight.live import Session, StudyStarted, TrialDone, TrialStarted
from runner.insight.page import html_page
from runner.insight.ranking import rank
from runner.insight.report import print_report, report_document
from runner.insight.status import best_words
from runner.insight.summary import summarize
from runner.settings import MeasureSettings, StudySettings
from runner.trial import Lengths, Outcome, TrialLengths, TrialResult
from tests.samples import PARAMS, make_ladder, make_result, make_rung, make_settings

OWN = Lengths("uniform", 1300, 3000)


def two_laws(**measure: Any) -> StudySettings:  # noqa: ANN401 - any field of MeasureSettings
    """The demo study, searched at 256 tokens for replies of 1,300 to 3,000."""
    study = make_settings()
    return replace(
        study,
        workload=replace(study.workload, output_tokens=OWN),
        search=replace(study.search, output_tokens=Lengths.fixed(256)),
        measure=replace(MeasureSettings(0.01, 10.0, 120.0, 1, 3), **measure),
    )


STUDY = two_laws()


def own(number: int, repeat_of: int, value: float | None, **more: Any) -> TrialResult:  # noqa: ANN401
    """A re-measurement at the user's lengths."""
    lengths = TrialLengths.WORKLOAD
    return make_result(number, value, repeat_of=repeat_of, lengths=lengths, **more)


SEARCHED = [
    make_result(0, 200.0, name="pp8-auto"),
    make_result(1, 610.0),
    make_result(2, 590.0),
    make_result(3, 300.0),
]
CHANGED = [
    *SEARCHED,
    own(4, 1, 480.0),
    own(5, 2, 512.0),
    own(6, 0, 190.0, name="pp8-auto"),
]


def verdict(results: list[TrialResult], settings: StudySettings = STUDY) -> str:
    return "\n".join(summarize(results, settings).verdict)


def test_values_at_other_lengths_are_never_averaged() -> None:
    ranking = rank(CHANGED, STUDY)
    assert [(s.number, s.values) for s in ranking.settings] == [
        (2, (512.0,)),
        (1, (480.0,)),
        (0, (190.0,)),
    ]
    assert ranking.lengths is TrialLengths.WORKLOAD
    assert ranking.searched is not None
    assert [(s.number, s.values) for s in ranking.searched.settings] == [
        (1, (610.0,)),
        (2, (590.0,)),
        (3, (300.0,)),
        (0, (200.0,)),
    ]
    assert [s.name for s in ranking.baselines] == ["pp8-auto"]


def test_a_single_measurement_at_the_users_lengths_decides() -> None:
    ranking = rank([*SEARCHED, own(4, 2, 100.0)], STUDY)
    assert [s.number for s in ranking.settings] == [2]
    assert [s.number for s in ranking.contenders] == [2]


def test_noise_between_lengths_is_no_noise() -> None:
    """610 and 480 are the same setting, 24 % apart: that is what lengths do, not noise."""
    ranking = rank(CHANGED, STUDY)
    assert ranking.noise == STUDY.measure.precision
    assert [s.number for s in ranking.contenders] == [2]


def test_noise_at_the_users_lengths_is_what_their_windows_say() -> None:
    wide = make_rung(32, 512.0, output_throughput_halfwidth=0.06 * 512.0)
    ranking = rank([*SEARCHED, own(4, 1, 480.0), own(5, 2, 512.0, rungs=(wide,))], STUDY)
    assert ranking.noise == pytest.approx(0.06)
    assert [s.number for s in ranking.contenders] == [2, 1]


def test_noise_of_repeats_is_that_of_their_own_lengths() -> None:
    repeats = [own(4, 1, 500.0), own(5, 1, 490.0), own(6, 2, 400.0), own(7, 2, 410.0)]
    ranking = rank([*SEARCHED, *repeats], STUDY)
    assert ranking.noise == pytest.approx(4.30 * (0.01**2 + (10 / 810) ** 2) ** 0.5, rel=0.05)
    assert ranking.searched is not None
    assert ranking.searched.noise == STUDY.measure.precision


def test_a_confirmation_that_failed_is_no_confirmation() -> None:
    failed = own(4, 1, None, outcome=Outcome.INFEASIBLE)
    ranking = rank([*SEARCHED, failed], STUDY)
    assert ranking.lengths is TrialLengths.SEARCH
    assert ranking.best is not None
    assert ranking.best.number == 1
    ranking = rank([*SEARCHED, failed, own(5, 2, 512.0)], STUDY)
    assert [s.number for s in ranking.settings] == [2]


def test_a_changed_order_is_told_with_both_values() -> None:
    text = verdict(CHANGED)
    assert "Best: #2 " in text
    assert "512 tokens/s at C=32 (95 %: +- 0.5 %), measured once." in text
    assert (
        "At your lengths (1,300 - 3,000 tokens) the order changed: #2 leads with 512 tokens/s at "
        "C=32 (#1: 480); at 256 tokens #1 led with 610 tokens/s at C=32 (#2: 590)."
    ) in text
    assert "2.69 times baseline pp8-auto (#0: 190 tokens/s" in text


def test_a_change_within_the_noise_is_called_that() -> None:
    near = [*SEARCHED, own(4, 1, 510.0), own(5, 2, 512.0)]
    assert "(#1: 510, within the noise); at 256 tokens #1 led" in verdict(near)


def test_an_order_that_stays_is_told_too() -> None:
    stayed = [*SEARCHED, own(4, 1, 500.0), own(5, 2, 400.0)]
    assert (
        "At your lengths (1,300 - 3,000 tokens) #1 leads as it did at 256 tokens: 500 tokens/s at "
        "C=32, there 610 tokens/s at C=32."
    ) in verdict(stayed)


def test_a_leader_without_a_value_at_the_users_lengths_is_missed() -> None:
    text = verdict([*SEARCHED, own(4, 1, None), own(5, 2, 400.0)])
    assert "#2 leads with 400 tokens/s at C=32 (#1 has no value there); at 256 tokens" in text


def test_what_was_not_confirmed_is_called_that() -> None:
    words = "No setting was measured at your lengths (1,300 - 3,000 tokens)"
    assert f"{words}; 256 tokens stand here." in verdict(SEARCHED)
    none = two_laws(finalists=0)
    assert f"{words}: measure.finalists is 0; 256 tokens" in verdict(SEARCHED, none)


def test_a_study_with_one_law_says_nothing_of_lengths() -> None:
    study = make_settings()
    results = [*SEARCHED, make_result(4, 600.0, repeat_of=1)]
    assert "your lengths" not in verdict(results, study)
    assert "lengths" not in report_document(results, study)
    assert lengths_words(TrialLengths.SEARCH, study) == ""
    summary = summarize(results, study)
    assert (summary.rows_title, summary.searched_title, summary.searched_rows) == ("", "", ())


def test_the_report_has_a_table_for_each_law() -> None:
    stream = io.StringIO()
    print_report(CHANGED, STUDY, stream)
    text = stream.getvalue()
    first, second = text.split("At the lengths of the search (256 tokens)")
    assert "At your lengths (1,300 - 3,000 tokens)" in first
    assert "64 tokens in" not in first
    assert "256 tokens in, 1,300 - 3,000 tokens out (the search: 256" in " ".join(first.split())
    assert [line.split()[1] for line in first.splitlines() if "#" in line] == [
        "#2",
        "#1",
        "pp8",
    ] or ([word for word in first.split() if word.startswith("#")] == ["#2", "#1", "#0"])
    assert [w for w in second.split("\n\n")[0].split() if w.startswith("#")] == [
        "#1",
        "#2",
        "#3",
        "#0",
    ]


def test_the_page_has_a_table_for_each_law() -> None:
    page = html_page(CHANGED, STUDY)
    assert "<h2>At your lengths (1,300 - 3,000 tokens)</h2>" in page
    assert "<h2>At the lengths of the search (256 tokens)</h2>" in page
    assert "<h2>Settings, best first</h2>" in html_page(SEARCHED, make_settings())


def test_the_document_has_both_orders() -> None:
    document = report_document(CHANGED, STUDY)
    assert document["contenders"] == [2]
    assert isinstance(document["best"], dict)
    assert document["best"]["number"] == 2
    assert document["lengths"] == {
        "search": {
            "output_tokens": "256 tokens",
            "order": [
                {"number": number, "values": [value]}
                for number, value in ((1, 610.0), (2, 590.0), (3, 300.0), (0, 200.0))
            ],
        },
        "workload": {
            "output_tokens": "1,300 - 3,000 tokens",
            "order": [
                {"number": number, "values": [value]}
                for number, value in ((2, 512.0), (1, 480.0), (0, 190.0))
            ],
        },
        "leader_changed": True,
    }
    lengths = report_document(SEARCHED, STUDY)["lengths"]
    assert isinstance(lengths, dict)
    assert (lengths["workload"]["order"], lengths["leader_changed"]) == ([], None)


def test_status_and_live_view_name_the_lengths() -> None:
    assert (best_words(SEARCHED, STUDY) or "").endswith("610 tokens/s at C=32, at 256 tokens")
    assert (best_words(CHANGED, STUDY) or "").endswith("512 tokens/s at C=32, at your lengths")
    session = Session()
    session.observe(StudyStarted(STUDY, tuple(SEARCHED), ""), 0.0)
    session.observe(TrialStarted(4, None, PARAMS, 1, TrialLengths.WORKLOAD), 1.0)
    assert session.trial is not None
    assert session.trial.label.endswith(" (#1 again, at your lengths)")
    done = own(4, 1, 480.0)
    session.observe(TrialDone(done), 2.0)
    assert session.result_words(done).startswith("#4 (#1 again, at your lengths) ")
    assert (session.best_words() or "").endswith("480 tokens/s at C=32, at your lengths")


def test_attainment_is_a_column_where_there_are_limits() -> None:
    rung = make_rung(
        32, 500.0, slo_attainment=0.992, slo_attainment_low=0.981, slo_attainment_high=0.997
    )
    results = [make_result(0, 500.0, rungs=(rung, *make_ladder(500.0)[1:]))]
    study = make_settings()
    stream = io.StringIO()
    print_report(results, study, stream)
    assert "99.2" in stream.getvalue()
    assert "SLO requests that meet every limit" in stream.getvalue()
    assert "<td>99.2 % (98.1 - 99.7)</td>" in html_page(results, study)
    stream = io.StringIO()
    print_report(SEARCHED, study, stream)
    assert "SLO" not in stream.getvalue()


def test_notes_of_rungs_are_told_once() -> None:
    noted = [make_result(n, 500.0, rungs=(make_rung(32, 500.0, notes=("odd",)),)) for n in (0, 1)]
    assert "Note: odd (#0, #1)." in verdict(noted, make_settings())
