"""Plan and predict say the same of a setting, though a plan simulates less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runner.forecast.plan import StudyPlan, make_plan
from runner.forecast.predict import predict
from runner.forecast.prediction import RungPrediction
from runner.forecast.ranking import Ranked
from runner.settings import Baseline, Choices
from runner.trial import Lengths
from tests.forecasting import CAP, DEPTH, small_study, with_workload

LEVEL = 16
BIAS = 0.02


def study(output_tokens: Lengths) -> StudyPlan:
    small = small_study(
        parameters=(
            Choices("tp_size", (4, 2)),
            Choices("pp_size", (2, 4)),
            Choices(DEPTH, (0, 2)),
            Choices(CAP, (4, 8)),
        ),
        baselines=(Baseline("tp8", {"tp_size": 8, "pp_size": 1}),),
    )
    objectives = (replace(small.objectives[0], concurrency=LEVEL),)
    loaded = with_workload(
        replace(small, objectives=objectives),
        prompt_tokens=Lengths.fixed(64),
        output_tokens=output_tokens,
        concurrency=(LEVEL,),
    )
    return make_plan(loaded, top=4)


def rows_with_predictions(plan: StudyPlan) -> list[tuple[Ranked, RungPrediction]]:
    rows = [*plan.ranking, *plan.baselines]
    return [(row, predict(plan.settings, row.planned.params).rungs[0]) for row in rows]


@pytest.mark.parametrize("output_tokens", [Lengths.fixed(48), Lengths("uniform", 32, 64)])
def test_a_plan_says_of_a_setting_what_predict_says(output_tokens: Lengths) -> None:
    """Equal replies, too: streams begin one after another in both, as in a study."""
    for row, predicted in rows_with_predictions(study(output_tokens)):
        (rung,) = row.rungs
        assert rung.p10 is not None
        assert rung.p90 is not None
        assert predicted.p10 is not None
        assert predicted.p90 is not None
        assert rung.p10 <= predicted.p90, row.planned.params
        assert predicted.p10 <= rung.p90, row.planned.params
        allowed = max(BIAS * row.objective, rung.p90 - rung.p10, predicted.p90 - predicted.p10)
        assert row.objective == pytest.approx(predicted.output_throughput, abs=allowed)


def test_a_plan_ranks_as_predict_does() -> None:
    pairs = rows_with_predictions(study(Lengths.fixed(48)))
    for better, its in pairs:
        for worse, others in pairs:
            if better.objective > (1 + BIAS) * worse.objective:
                assert its.output_throughput > others.output_throughput
