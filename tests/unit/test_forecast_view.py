"""What a person sees of a prediction and a plan."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from runner.forecast.plan import make_plan
from runner.forecast.predict import Progress, predict
from runner.forecast.prediction import (
    Basis,
    Prediction,
    RungPrediction,
    prediction_document,
)
from runner.insight.forecast_view import ProgressLine, print_prediction
from runner.insight.plan_view import print_plan
from runner.settings import Baseline, Choices, Direction, IntRange, Objective, SloLimit
from runner.trial import EngineKind, Lengths, LoadProtocol, Params
from tests.forecasting import CAP, small_study, with_workload

STUDY = small_study()
PP8: Params = {"pp_size": 8, "max_running_requests": 64}


class Terminal(io.StringIO):
    """A stream that can be overwritten."""

    def isatty(self) -> bool:
        return True


def rung(level: float, rate: float, *, low: float | None, high: float | None) -> RungPrediction:
    return RungPrediction(level, rate, 0.5, 0.05, 3.2, 4.0, 2000.0, Basis.SIMULATION, low, high)


def test_a_prediction_names_protocol_lengths_and_spread() -> None:
    rungs = (rung(1, 20.0, low=None, high=None), rung(6, 100.0, low=90.0, high=115.0))
    prediction = Prediction(
        LoadProtocol.CLOSED_LOOP, 12, Basis.SIMULATION, rungs, seeds=5, is_cut_off=True
    )
    settings = with_workload(STUDY, output_tokens=Lengths("uniform", 8, 16))
    stream = io.StringIO()
    print_prediction(prediction, settings, PP8, stream)
    text = stream.getvalue()
    assert "demo: pp8 run64" in text
    assert "Closed loop: prompt 16 tokens, output 8 - 16 tokens." in text
    assert "5 seeds" in text
    assert "25.0% (at 6)" in text
    assert "90.0 - 115" in text
    assert "cut off before they ended" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(("together", "is_told"), [(None, False), (105.0, False), (140.0, True)])
def test_a_load_that_remembers_its_start_is_told(together: float | None, is_told: bool) -> None:
    rungs = (replace(rung(6, 100.0, low=None, high=None), together=together),)
    prediction = Prediction(LoadProtocol.CLOSED_LOOP, 12, Basis.SIMULATION, rungs, seeds=5)
    stream = io.StringIO()
    print_prediction(prediction, STUDY, PP8, stream)
    words = "At C=6 it depends on how the load began: 140 tokens/s where all streams begin together"
    assert (words in " ".join(stream.getvalue().split())) is is_told
    document = prediction_document(prediction)["rungs"]
    assert isinstance(document, list)
    assert document[0].get("output_throughput_together") == together


def test_a_refused_setting_is_explained() -> None:
    stream = io.StringIO()
    print_prediction(predict(STUDY, {"tp_size": 1}), STUDY, {"tp_size": 1}, stream)
    assert "cannot run: out of memory" in stream.getvalue()


def test_one_seed_says_so_and_an_open_loop_has_rates() -> None:
    prediction = Prediction(
        LoadProtocol.OPEN_LOOP, 12, Basis.SIMULATION, (rung(0.5, 6.0, low=None, high=None),)
    )
    settings = with_workload(STUDY, protocol=LoadProtocol.OPEN_LOOP, rate=(0.5,), concurrency=())
    stream = Terminal()
    print_prediction(prediction, settings, PP8, stream)
    assert "rate/s" in stream.getvalue()
    assert "--seeds" in stream.getvalue()


def test_a_plan_shows_every_part() -> None:
    caps, backends = IntRange(CAP, 1, 8), Choices("attention_backend", ("triton", "fa3"))
    settings = replace(
        STUDY,
        engine=replace(STUDY.engine, kind=EngineKind.EMULATED),
        parameters=(Choices("pp_size", (8,)), caps, backends),
        baselines=(Baseline("tp8", {"tp_size": 8}), Baseline("tp1", {"tp_size": 1})),
        slo=(SloLimit("tpot_s", "p99", 1e-9),),
    )
    stream = io.StringIO()
    print_plan(make_plan(settings, top=2), stream)
    text = stream.getvalue()
    for words in (
        "16 settings, 8 can run",
        "Cannot run",
        "attention backend refused",
        "baseline tp1: out of memory",
        "Runs, but wastes",
        "fewer requests than stages",
        "pp8 triton: cap 6 - 8, 3 settings (this load cannot tell them apart)",
        "output_throughput at C=6",
        "of 8 stages busy",
        "tp8 [tp8]",
        "misses the limit tpot_s p99 1e-09 s",
        "re-measurements in about",
        "at time scale 20",
        "kWh",
    ):
        assert words in " ".join(text.split()), words
    assert max(map(len, text.splitlines())) <= 100


def test_an_objective_that_falls_is_shown_lowest_first() -> None:
    objective = Objective("tpot_s.p99", 6, Direction.MINIMIZE)
    settings = replace(STUDY, objectives=(objective, *STUDY.objectives))
    stream = io.StringIO()
    print_plan(make_plan(settings, top=3), stream)
    text = stream.getvalue()
    assert "tpot_s.p99 at C=6 (the first objective)" in text
    rows = text.partition("best first")[2].splitlines()[2:]
    values = [float(row.split()[0]) for row in rows if row[:1].isdigit()][:3]
    assert values == sorted(values)


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_progress_is_shown_from_its_second_second_on(stream: io.StringIO) -> None:
    now_s = 0.0
    line = ProgressLine(stream, "planning", now=lambda: now_s)
    line(Progress(0.0, 10.0))
    now_s = 0.9
    line(Progress(1.0, 10.0))
    assert stream.getvalue() == ""
    now_s = 2.0
    line(Progress(2.0, 10.0))
    assert "planning: 20%, about 8 s left" in stream.getvalue()
    line(Progress(3.0, 10.0))
    assert "30%" not in stream.getvalue(), "not more often than can be read"
    line.close()
    assert stream.getvalue()[-1] in "\r\n"
