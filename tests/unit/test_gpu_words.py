"""What a report says of a study whose trials ran on different GPUs, and when it says nothing."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest

from runner.insight.gpu_words import moved_words
from runner.insight.page import html_page
from runner.insight.ranking import rank
from runner.insight.report import print_report, report_document
from runner.measure.idle import IdleGpu
from runner.trial import GpuEnergy, TrialResult
from tests.samples import make_result, make_settings

STUDY = make_settings()


def gpu(name: str, reading: int, idle_w: float = 70.0, limit_w: float = 700.0) -> IdleGpu:
    return IdleGpu(0, f"GPU-{name}", "H200", idle_w, limit_w, reading=reading)


A, B = gpu("a", 0), gpu("b", 0)
C, D = gpu("c", 1, 90.0, 500.0), gpu("d", 1, 90.0, 500.0)
IDLE = (A, B, C, D)


def on(
    number: int, *gpus: str, throughput: float | None = 300.0, repeat_of: int | None = None
) -> TrialResult:
    result = make_result(number, throughput, repeat_of=repeat_of)
    energies = tuple(GpuEnergy(f"GPU-{name}", 4000.0, 200.0, 0.9, 1, False) for name in gpus)
    power_w = 200.0 * len(gpus)
    rungs = tuple(replace(rung, gpus=energies, power_w=power_w) for rung in result.rungs)
    return replace(result, rungs=rungs)


def said(results: Sequence[TrialResult], idle: Sequence[IdleGpu] = IDLE) -> list[str]:
    return list(moved_words(rank(results, STUDY), idle))


def printed(results: Sequence[TrialResult]) -> str:
    stream = io.StringIO()
    print_report(results, STUDY, stream, idle=IDLE)
    return " ".join(stream.getvalue().split())


def test_a_study_that_moved_says_which_trials_ran_where() -> None:
    results = [
        on(0, "a", "b"),
        on(1, "a", "b"),
        on(2, "a"),
        on(3, "c", "d"),
        on(5, "c"),
        on(6, "d"),
    ]
    words = (
        "Measured on different GPUs (H200): #0-#2 on GPU-a and 1 other; #3, #5, #6 on GPU-c and 1 "
        "other. Cards of one model differ by a few percent: closer values are told apart only "
        "where both were measured on the same ones."
    )
    assert said(results) == [words]
    assert words in printed(results)
    assert words in html_page(results, STUDY, IDLE)


def test_a_card_that_was_replaced_counts_with_its_launch() -> None:
    (words,) = said([on(0, "a", "b"), on(1, "a", "c")])
    assert "#0 on GPU-a and 1 other; #1 on GPU-c. " in words


@pytest.mark.parametrize(
    "results",
    [
        [on(0, "a"), on(1, "b"), on(2, "a", "b")],  # places on one machine
        [on(0, "c"), on(1, "d")],
        [on(0, "a"), on(1, "c", throughput=None)],  # not ranked
        [on(0, "a"), on(1, "spare")],  # never read: it took the place of one in quarantine
        [on(0, "a"), on(1)],
    ],
)
def test_normal_placement_says_nothing(results: Sequence[TrialResult]) -> None:
    assert said(results) == []


def test_a_study_whose_gpus_were_never_read_says_nothing() -> None:
    assert said([on(0, "a"), on(1, "c")], ()) == []


def test_power_is_that_of_the_gpus_of_each_measurement() -> None:
    here, there = on(0, "a", "b"), on(0, "c", "d")
    power = report_document([here], STUDY, IDLE)["power"]
    assert isinstance(power, dict)
    assert (power["idle_power_w"], power["power_limit_w"]) == (140.0, 1400.0)
    power = report_document([there], STUDY, IDLE)["power"]
    assert isinstance(power, dict)
    assert (power["idle_power_w"], power["power_limit_w"]) == (180.0, 1000.0)
    assert power["best_share_of_limit"] == 0.4
    assert "best one's 2 GPUs: 400 W, 40% of their limit of 1000 W; idle 180 W." in printed([there])


def test_a_setting_measured_again_on_other_gpus_counts_none_twice() -> None:
    results = [on(0, "a", "b"), on(1, "c", "d", repeat_of=0)]
    said_of_power = "best one's 2 GPUs: 400 W, 33% of their limit of 1200 W; idle 160 W."
    assert said_of_power in printed(results)


def test_without_a_best_one_it_is_the_latest_gpus_that_are_told() -> None:
    pruned = [replace(on(n, *g), values=()) for n, g in enumerate(("ab", "cd"))]
    assert "Power of the 2 GPUs: idle 180 W, limit 1000 W." in printed(pruned)
