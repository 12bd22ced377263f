"""What is said of power: idle, at the best setting, against the limit, or unavailable."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from runner.clock import ClockAnchor
from runner.insight.page import html_page
from runner.insight.report import print_report, report_document
from runner.measure.idle import IdleGpu
from runner.record.run_content import TrialTimes, run_metrics, run_note
from runner.settings import Direction, Objective
from runner.trial import GpuEnergy, Measurement, Outcome, Stage, TrialResult
from runner.verdict import RungKeeper, TrialIdentity, conclude
from tests.samples import PARAMS, make_result, make_rung, make_settings

STUDY = make_settings()
IDLE = tuple(IdleGpu(n, f"GPU-{n}", "RTX PRO 6000", 60.0 + n, 600.0) for n in range(8))
BLIND = (*IDLE[:7], replace(IDLE[7], power_w=None))


def on_gpus(result: TrialResult, gpus: int, watts: float | None = 200.0) -> TrialResult:
    """The trial with its power spread over GPUs; `watts` None: the last one's is unavailable."""
    energies = [GpuEnergy(f"GPU-{n}", 4000.0, 200.0, 0.9, 1, False) for n in range(gpus)]
    changes: dict[str, float | None] = {"power_w": gpus * 200.0}
    if watts is None:
        energies[-1] = replace(energies[-1], energy_j=None, power_w=None)
        changes = dict.fromkeys(("power_w", "energy_j", "tokens_per_joule"))
    rungs = tuple(replace(rung, gpus=tuple(energies), **changes) for rung in result.rungs)  # type: ignore[arg-type]
    return replace(result, rungs=rungs)


def printed(results: Sequence[TrialResult], idle: Sequence[IdleGpu]) -> str:
    stream = io.StringIO()
    print_report(results, STUDY, stream, idle=idle)
    return " ".join(stream.getvalue().split())


def test_the_best_ones_power_is_a_share_of_its_gpus_limit() -> None:
    results = [on_gpus(make_result(0, 300.0), 8)]
    said = "Power of the best one's 8 GPUs: 1600 W, 33% of their limit of 4800 W; idle 508 W."
    assert said in printed(results, IDLE)
    assert said in html_page(results, STUDY, IDLE).replace("&#x27;", "'")
    power = json.loads(json.dumps(report_document(results, STUDY, IDLE)))["power"]
    assert power["idle_power_w"] == 508.0
    assert power["power_limit_w"] == 4800.0
    assert power["best_share_of_limit"] == pytest.approx(1 / 3)
    assert [gpu["uuid"] for gpu in power["gpus"]] == [gpu.uuid for gpu in IDLE]


def test_gpus_that_the_best_one_leaves_alone_do_not_count() -> None:
    said = "Power of the best one's 6 GPUs: 1200 W, 33% of their limit of 3600 W; idle 375 W."
    assert said in printed([on_gpus(make_result(0, 300.0), 6)], IDLE)


def test_a_study_without_a_best_one_tells_what_its_gpus_draw() -> None:
    said = "Power of the 8 GPUs: idle 508 W, limit 4800 W."
    assert said in printed([make_result(0, None)], IDLE)


def test_what_is_unavailable_is_called_that() -> None:
    results = [on_gpus(make_result(0, 300.0), 8, None)]
    text = printed(results, BLIND)
    assert "Power of the best one's 8 GPUs: unavailable, limit 4800 W; idle unavailable." in text
    assert "W - unavailable" in text
    assert " nan" not in text
    power = report_document(results, STUDY, BLIND)["power"]
    assert isinstance(power, dict)
    assert (power["idle_power_w"], power["best_power_w"]) == (None, None)


def test_a_gpu_that_was_in_use_is_named() -> None:
    used = (*IDLE[:3], replace(IDLE[3], pids=(41, 42)), *IDLE[4:])
    said = "GPU 3 was not free when its idle power was read: process 41, 42 used it."
    assert said in printed([], used)


def test_a_study_whose_gpus_were_never_read_says_nothing() -> None:
    assert "Power of" not in printed([on_gpus(make_result(0, 300.0), 8)], ())


def test_mlflow_has_the_word_in_its_note_and_no_number() -> None:
    result = on_gpus(make_result(0, 300.0), 8, None)
    rows = [row for row in run_note(result, None).splitlines() if row.startswith("| 32 ")]
    assert [row.count("unavailable") for row in rows] == [2]
    names = {point.key for point in run_metrics(result, times(), (), ())}
    assert "output_throughput" in names
    assert names.isdisjoint({"power_w", "energy_j", "tokens_per_joule", "joules_per_request"})


def times() -> TrialTimes:
    return TrialTimes(ClockAnchor(1.7e9, 0.0, 1.0), 1.7e9 + 100)


def test_a_trial_without_its_objective_says_which_gpu_is_blind() -> None:
    objective = Objective("tokens_per_joule", 32, Direction.MAXIMIZE)
    settings = make_settings(objectives=(objective,))
    blind = on_gpus(make_result(0, 300.0, rungs=(make_rung(32, 300.0),)), 8, None)
    keeper = RungKeeper(settings, (), lambda _: None, lambda *_: None, lambda _: None)
    keeper.rungs.extend(blind.rungs)
    identity = TrialIdentity(0, None, PARAMS, "hash", None, None)
    result = conclude(identity, Measurement({}, 1, stopped_early=False), keeper, 0)
    assert (result.outcome, result.stage) == (Outcome.INVALID, Stage.JUDGE)
    assert result.reason == (
        "tokens_per_joule at concurrency 32 is unavailable: the power of GPU GPU-7 could not be "
        "read"
    )
