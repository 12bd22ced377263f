"""Small studies whose forecasts take no time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runner.settings import (
    Baseline,
    Choices,
    Direction,
    IntRange,
    MeasureSettings,
    Objective,
    StudySettings,
    Workload,
)
from runner.trial import Lengths, LoadProtocol
from tests.samples import make_settings

DEPTH, CAP = "pp_async_batch_depth", "pp_max_micro_batch_size"


def small_study(**changes: Any) -> StudySettings:  # noqa: ANN401 - any field of StudySettings
    """Kimi on 8 GPUs, 1 and 6 requests of 12 tokens, pipelines of 8 stages only."""
    fields: dict[str, Any] = {
        "parameters": (Choices("pp_size", (8,)), Choices(DEPTH, (0, 4)), IntRange(CAP, 1, 8)),
        "baselines": (Baseline("tp8", {"tp_size": 8, "pp_size": 1}),),
        "workload": Workload(
            protocol=LoadProtocol.CLOSED_LOOP,
            prompt_tokens=Lengths.fixed(16),
            output_tokens=Lengths.fixed(12),
            concurrency=(1, 6),
            rate=(),
            shared_prefix=0.0,
        ),
        "objectives": (Objective("output_throughput", 6, Direction.MAXIMIZE),),
        "measure": MeasureSettings(0.05, 0.5, 2.0, 1, 3),
    }
    return make_settings(**{**fields, **changes})


def with_workload(settings: StudySettings, **changes: Any) -> StudySettings:  # noqa: ANN401
    """The study with fields of its workload replaced."""
    return replace(settings, workload=replace(settings.workload, **changes))
