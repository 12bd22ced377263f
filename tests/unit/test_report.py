from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.insight.ranking import rank
from runner.insight.report import choose_rungs, print_report, report_document
from runner.insight.summary import summarize
from runner.insight.words import format_number
from runner.record.store import StudyState
from runner.settings import Direction, Objective, StudySettings, Workload
from runner.trial import (
    EngineKind,
    Evidence,
    Lengths,
    LoadProtocol,
    Outcome,
    ParamValue,
    TrialResult,
)
from tests.samples import PARAMS, claimed_rung, make_ladder, make_result, make_rung, make_settings

STUDY = make_settings()
EMULATED = replace(STUDY.engine, kind=EngineKind.EMULATED)
BASELINE = {"tp_size": 1, "pp_size": 8, "pp_async_batch_depth": 0}
LONG_LADDER = (64, 48, 32, 16, 8, 1)


def some_results() -> list[TrialResult]:
    return [
        make_result(0, 200.0, name="pp8-auto", params=BASELINE),
        make_result(1, 500.0),
        make_result(2, None, outcome=Outcome.INFEASIBLE, reason="out of memory:\n 3 GB short"),
        make_result(3, 100.0, outcome=Outcome.PRUNED, values=(), rungs=make_ladder(100.0)[:1]),
        make_result(4, 499.0),
        make_result(5, 510.0, repeat_of=1),
        make_result(6, 210.0, repeat_of=0, name="pp8-auto", params=BASELINE),
    ]


def printed(
    results: list[TrialResult], settings: StudySettings = STUDY, state: StudyState | None = None
) -> str:
    stream = io.StringIO()
    print_report(results, settings, stream, state)
    return stream.getvalue()


def joined(text: str) -> str:
    """Without the breaks of lines."""
    return " ".join(text.split())


def lines_of(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip().startswith(start)]


def test_document_has_the_keys_of_the_contract() -> None:
    state = StudyState.INTERRUPTED
    document = json.loads(json.dumps(report_document(some_results(), STUDY, (), state)))
    study, noise = document.pop("study"), document.pop("noise")
    assert list(document) == ["best", "settings", "contenders", "baselines", "trials", "power"]
    said = {"name": "demo", "state": "interrupted", "engine": "simulated", "time_scale": 20.0}
    assert study == {**said, "profile": "rtx-pro-6000-x8-kimi-k2.6"}
    assert noise == rank(some_results(), STUDY).noise
    assert document["best"]["number"] == 1
    ranking = rank(some_results(), STUDY)
    for row, setting in zip(document["settings"], ranking.settings, strict=True):
        assert (row["number"], tuple(row["values"])) == (setting.number, setting.values)
        assert row["halfwidth"] == ranking.halfwidth(setting)
        assert row["measured_by"] == [each.number for each in setting.counted]
    assert document["contenders"] == [1, 4]
    assert [result["number"] for result in document["baselines"]] == [0]
    assert [result["number"] for result in document["trials"]] == list(range(7))


def test_servers_side_by_side_are_said() -> None:
    params = {"pp_size": 1, "tp_size": 2}
    text = joined(printed([make_result(0, 200.0, params=params)]))
    assert "Best: #0 tp2, 4 servers side by side: 200 tokens/s" in text


def test_document_of_an_empty_study() -> None:
    document = report_document([], STUDY)
    assert document.pop("power") is not None
    assert document.pop("study") is not None
    assert document.pop("noise") == STUDY.measure.precision
    assert document.pop("best") is None
    assert set(document) == {"settings", "contenders", "baselines", "trials"}
    assert not any(document.values())


def test_document_shows_a_baseline_that_failed_and_its_retry_when_that_worked() -> None:
    failed = make_result(0, None, name="pp8-auto")
    assert (
        report_document([failed], STUDY)["baselines"] == report_document([failed], STUDY)["trials"]
    )
    retry = make_result(1, 100.0, name="pp8-auto", retry_of=0)
    later_failure = make_result(2, None, name="pp8-auto", retry_of=1)
    baselines = report_document([later_failure, failed, retry], STUDY)["baselines"]
    assert isinstance(baselines, list)
    assert [result["number"] for result in baselines] == [1]


def test_table_has_one_row_per_setting_best_first_and_marks() -> None:
    text = printed(some_results())
    rows = [line for line in text.splitlines() if re.match(r"(best|~|slo|\s+)\s+#\d+ pp8", line)]
    assert [row.split()[:2] for row in rows[:2]] == [["best", "#1"], ["~", "#4"]]
    assert rows[2].split()[:4] == ["#0", "pp8", "d0", "[pp8-auto]"]
    assert rows[0].split()[-8:] == ["50.5", "202", "505", "1600", "0.316", "1.25", "71.5", "2"]


def test_table_names_what_failed_and_why() -> None:
    text = printed(some_results())
    assert lines_of(text, "#2") == [
        "   #2 infeasible pp8 d8 cap4 graph triton out of memory: 3 GB short"
    ]
    assert lines_of(text, "#3") == [
        "   #3 pruned     pp8 d8 cap4 graph triton clearly behind after C=32: 100 tokens/s"
    ]


def test_a_trial_that_was_cut_short_is_called_that_and_not_ranked() -> None:
    rung = replace(make_ladder(100.0)[0], valid=False, reasons=("cut short",), cut_below=400.0)
    pruned = make_result(3, 100.0, outcome=Outcome.PRUNED, rungs=(rung,))
    results = [make_result(0, 500.0), pruned]
    (line,) = lines_of(printed(results), "#3")
    assert line.endswith("cut short at C=32: hopelessly behind with 100 tokens/s")
    assert [setting.number for setting in rank(results, STUDY).settings] == [0]


def test_a_retried_trial_points_at_its_retry() -> None:
    text = printed([make_result(0, None), make_result(1, 100.0, retry_of=0)])
    assert "server exited with -9 (measured again as #1)" in text


def test_verdict_says_what_won_by_how_much_and_how_often_it_was_measured() -> None:
    text = printed(some_results())
    best = "Best: #1 pp8 d8 cap4 graph triton: 505 tokens/s at C=32, measured twice."
    ratio = "2.46 times baseline pp8-auto (#0: 205 tokens/s at C=32, measured twice)."
    assert best in text
    assert ratio in text
    assert "from 2 re-measurements" in text
    assert "Not to be told from the best: #4." in text


@pytest.mark.parametrize(
    ("again", "said"),
    [
        (None, "Noise of one measurement: 1.0 % (measure.precision; nothing was measured twice)"),
        (100.1, "1.0 % (measure.precision; 1 re-measurement differs by less)"),
        (105.0, " % (from 1 re-measurement)"),
    ],
)
def test_verdict_says_where_the_noise_comes_from(again: float | None, said: str) -> None:
    results = [make_result(0, 100.0), make_result(1, 90.0)]
    results += [] if again is None else [make_result(2, again, repeat_of=0)]
    assert said in " ".join(printed(results).split())


def test_verdict_of_a_study_in_which_nothing_worked() -> None:
    text = printed([make_result(0, None, name="pp8-auto")])
    assert "No setting was measured to its end" in text
    assert "Best:" not in text


def test_verdict_names_a_baseline_without_a_value() -> None:
    text = printed([make_result(0, None, name="tp8"), make_result(1, 100.0)])
    assert "Baseline tp8 has no value to compare with" in text


def test_verdict_doubts_a_lead_within_the_noise() -> None:
    text = printed([make_result(0, 100.0, name="tp8"), make_result(1, 100.5)])
    assert "1.00 times baseline tp8 (#0: 100 tokens/s at C=32, measured once), within" in text


def test_a_setting_that_gave_something_else_when_it_was_measured_again_is_named() -> None:
    unlike = [make_result(0, 88.0), make_result(1, 220.0, repeat_of=0)]
    text = " ".join(printed(unlike).split())
    assert "#0 gave 88 then 220 when it was measured again" in text.replace("88.0,", "88")
    assert "Noise of one measurement: above 100 %" in text
    alike = [make_result(0, 100.0), make_result(1, 102.0, repeat_of=0)]
    assert "measured again: settings alone" not in " ".join(printed(alike).split())


def test_what_the_search_saw_ahead_and_could_not_measure_again_is_named() -> None:
    sure = make_result(2, 400.0, repeat_of=0, launch=7, rungs=(claimed_rung(400.0, 5.0),))
    results = [
        make_result(0, 410.0),
        make_result(1, 500.0, params={"pp_size": 4}, spec_hash="other"),
        sure,
        make_result(3, 480.0, repeat_of=1, outcome=Outcome.INVALID, spec_hash="other"),
    ]
    text = " ".join(printed(results).split())
    assert "Best: #0 pp8 d8 cap4 graph triton: 400 tokens/s at C=32 (95 %: +- 5" in text
    assert "command line" not in text
    stream = io.StringIO()
    print_report(results, replace(STUDY, engine=EMULATED), stream)
    assert "Its command line: launches/0007/launch.json" in stream.getvalue()
    assert "#1 had 500 tokens/s at C=32 in the search and is not confirmed: measured" in text
    assert "again it was invalid (#3)" in text
    assert "not confirmed" not in " ".join(printed(results[:1] + results[2:3]).split())


def test_settings_that_miss_a_limit_are_marked() -> None:
    results = [make_result(0, 300.0, constraints=(0.4,)), make_result(1, 100.0, constraints=(0.0,))]
    text = printed(results)
    assert [row.split()[0] for row in text.splitlines() if " pp8 d8" in row][:2] == ["best", "slo"]
    assert "slo misses a latency limit" in text
    alone = printed(results[:1])
    assert "No setting keeps every latency limit" in alone


def test_head_counts_trials() -> None:
    text = printed(some_results(), state=StudyState.INTERRUPTED)
    head = "demo: 4 of 20 trials: 3 complete, 1 pruned; 2 re-measurements, 1 infeasible"
    assert text.splitlines()[0] == f"{head} (interrupted)"


@pytest.mark.parametrize(
    ("state", "is_resumable"),
    [(StudyState.INTERRUPTED, True), (StudyState.STOPPED, True), (StudyState.FINISHED, False)],
)
def test_next_steps_are_commands(state: StudyState, is_resumable: bool) -> None:
    stream = io.StringIO()
    print_report(some_results(), STUDY, stream, state, home_option=" --home /data")
    assert "runner ui demo --home /data\n" in stream.getvalue()
    assert ("runner resume demo --home /data\n" in stream.getvalue()) == is_resumable


def test_numbers_of_a_model_are_called_that() -> None:
    assert "simulated rtx-pro-6000-x8-kimi-k2.6: a model's numbers; closed_loop" in printed([])


def test_unavailable_power_is_a_dash_not_a_zero() -> None:
    rungs = (make_rung(32, 100.0, power_w=None, tokens_per_joule=None, ttft_s=None),)
    text = printed([make_result(0, 100.0, rungs=rungs)])
    row = next(line for line in text.splitlines() if line.startswith("best"))
    assert row.split()[-6:] == ["100", "-", "-", "-", "71.5", "1"]


def test_an_objective_without_a_column_gets_one() -> None:
    objective = Objective("e2e_s.p90", 8, Direction.MINIMIZE)
    settings = make_settings(objectives=(objective,))
    text = printed([make_result(0, 100.0, values=(3.25,))], settings)
    assert next(line for line in text.splitlines() if line.startswith("best")).endswith(" 3.25")
    assert "e2e_s.p90 3.25 at C=8" in text


def long_study() -> tuple[list[TrialResult], StudySettings]:
    work = Workload(
        LoadProtocol.BURST, Lengths("uniform", 100, 300), Lengths.fixed(128), LONG_LADDER, (), 0.0
    )
    objective = Objective("output_throughput", 64, Direction.MAXIMIZE)
    settings = make_settings(workload=work, objectives=(objective,))
    rungs = tuple(make_rung(c, 1234.5 * c / 64, position=n) for n, c in enumerate(LONG_LADDER))
    params = {**PARAMS, "pp_max_micro_batch_size": 64, "attention_backend": "flashinfer"}
    return [make_result(n, 1234.5, rungs=rungs, params=params) for n in range(120)], settings


def test_a_wide_study_fits_a_page_and_says_what_is_left_out() -> None:
    text = printed(*long_study())
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "C=1  C=16  C=32  C=48  C=64" in text
    assert "no room for C=8" in " ".join(text.split())
    assert "and 107 more." in text


def test_plain_text_carries_no_colour_and_no_blanks_at_line_ends() -> None:
    text = printed(some_results())
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    stream = FakeTerminal()
    print_report(some_results(), STUDY, stream)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert plain != stream.getvalue()
    assert max(len(line) for line in plain.splitlines()) <= 80


@given(st.sets(st.integers(1, 512), min_size=1), st.integers(-3, 20), st.data())
def test_the_rung_of_the_objective_is_always_shown(
    ladder: set[int], room: int, data: st.DataObject
) -> None:
    objective = data.draw(st.sampled_from(sorted(ladder)))
    shown = choose_rungs(sorted(ladder), objective, room)
    assert objective in shown
    assert list(shown) == sorted(set(shown))
    assert len(shown) == max(1, min(room, len(ladder)))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.0004, "0.000"),
        (0.1234, "0.123"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (123.4, "123"),
        (123456.7, "123457"),
        (-5.0, "-5.00"),
    ],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert format_number(value) == text


def test_values_of_a_setting_are_means_of_its_measurements() -> None:
    results = [
        make_result(0, 100.0, rungs=make_ladder(100.0)),
        make_result(1, 200.0, rungs=make_ladder(200.0)[:1], repeat_of=0),
    ]
    row = summarize(results, STUDY).rows[0]
    assert row.throughput == (10.0, 40.0, 150.0)
    assert row.objective == 150.0


def test_the_best_value_stands_with_its_interval() -> None:
    claimed = make_result(2, 590.0, repeat_of=0, rungs=(claimed_rung(590.0, 8.6),))
    text = printed([make_result(0, 612.0), claimed])
    assert "590 tokens/s at C=32 (95 %: +- 8.60, from 3 restarts of its load)" in joined(text)
    assert "metastable" not in text


def test_a_setting_that_depends_on_its_start_is_called_metastable() -> None:
    rung = claimed_rung(315.0, 12.0, probe=271.0)
    text = printed([make_result(0, 312.0), make_result(1, 315.0, repeat_of=0, rungs=(rung,))])
    words = (
        "#0 is metastable: at C=32 271 tokens/s begun together, 315 to 315 begun one after another."
    )
    assert words in joined(text)


@pytest.mark.parametrize(
    ("law", "advised"),
    [
        (Lengths.fixed(128), "{uniform: [64, 192]}"),
        (Lengths.fixed(1), "{uniform: [1, 2]}"),
        (Lengths("uniform", 120, 136), "{uniform: [64, 192]}"),
        (Lengths("uniform", 64, 192), None),
    ],
)
def test_who_has_equal_replies_is_told_that_uneven_ones_forget_their_start(
    law: Lengths, advised: str | None
) -> None:
    rung = claimed_rung(315.0, 12.0, probe=271.0)
    results = [make_result(0, 312.0), make_result(1, 315.0, repeat_of=0, rungs=(rung,))]
    settings = replace(STUDY, workload=replace(STUDY.workload, output_tokens=law))
    text = joined(printed(results, settings))
    assert "is metastable" in text
    assert ("Replies of like length" in text) is (advised is not None)
    assert f"workload.output_tokens: {advised}." in text or advised is None


def test_restarts_that_differ_by_themselves_are_not_blamed_on_their_start() -> None:
    claimed = claimed_rung(315.0, 12.0, probe=300.0)
    rates = (271.0, 300.0, 330.0, 310.0)  # the second is the one whose streams began together
    pairs = zip(claimed.restarts, rates, strict=True)
    restarts = tuple(replace(each, output_throughput=rate) for each, rate in pairs)
    again = make_result(1, 315.0, repeat_of=0, rungs=(replace(claimed, restarts=restarts),))
    text = joined(printed([make_result(0, 312.0), again]))
    assert "#0 is metastable: at C=32 its restarts made 271 to 330 tokens/s, further apart" in text
    assert "Replies of like length" not in text


def test_every_claimed_setting_stands_with_its_interval() -> None:
    results = [
        make_result(0, 600.0),
        make_result(1, 560.0),
        make_result(2, 577.0, repeat_of=0, rungs=(claimed_rung(577.0, 52.0),)),
        make_result(3, 555.0, repeat_of=1, rungs=(claimed_rung(555.0, 12.0),)),
    ]
    words = "Measured from restarts (tokens/s at C=32, 95 %): #0 577 +- 52.0, #1 555 +- 12.0."
    assert words in joined(printed(results))


def test_shared_measurements_and_other_values_than_asked_are_marked() -> None:
    other = {"attention_backend": ("fa3", "triton")}
    results = [make_result(0, 500.0), make_result(1, 500.0, shares=0, differences=other)]
    text = printed(results)
    assert lines_of(text, "= #0")[0].split()[:3] == ["=", "#0", "#1"]
    said = joined(text)
    assert "= #N same servers as #N, not measured again" in said
    assert "Note: attention_backend fa3 was asked for, triton runs (#1)." in said
    assert "nothing was measured twice" in said
    assert report_document(results, STUDY)["contenders"] == [0]


def told(number: int, throughput: float, evidence: Evidence, **resolved: ParamValue) -> TrialResult:
    rung = make_rung(32, throughput, evidence=evidence, achieved_concurrency=32.0)
    return make_result(number, throughput, rungs=(rung,), resolved={**PARAMS, **resolved})


def test_the_inside_of_the_best_ones_servers_is_told() -> None:
    evidence = Evidence(1.0, batch_mean=3.96, batch_max=4, queue_mean=0.0, schedulers=1)
    text = joined(printed([told(0, 500.0, evidence), told(1, 400.0, Evidence())]))
    assert (
        "Inside the servers of #0 at C=32: 100 % of decode passes in a CUDA graph, 4.0 requests a "
        "micro-batch (at most 4), 0 waiting on average." in text
    )
    assert "CUDA graphs are on" not in text


def test_nothing_is_said_of_the_inside_where_nothing_is_known() -> None:
    text = printed(some_results())
    assert "Inside" not in text
    assert "queue" not in text


def test_what_is_wrong_inside_is_one_sentence_for_each_kind_worst_ones_counted() -> None:
    little = Evidence(graph_share=0.12, batch_max=9)
    queue = Evidence(graph_share=1.0, queue_mean=12.0, schedulers=1)
    lost = Evidence(retractions=3)
    results = [told(n, 500.0 - n, little, cuda_graph_max_bs=8) for n in range(6)]
    results += [told(6, 300.0, queue, pp_max_micro_batch_size=1), told(7, 200.0, lost)]
    text = joined(printed(results))
    each = "at C=32 only 12 % in one (batches up to 9, graphs up to 8)"
    settings = "; ".join(f"#{number} {each}" for number in range(4))
    assert (
        f"CUDA graphs are on, but many decode passes ran without: {settings}; 2 more settings."
        in text
    )
    assert (
        "Requests waited in the servers' queue: #6 at C=32 12 on average (32 in flight, room for "
        "16: 16 slots of at most 1)." in text
    )
    assert "lost their place and waited again: #7 at C=32 3 of them." in text
