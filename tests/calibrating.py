"""A machine that is not quite as its profile says, and small studies that were measured on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from runner.calibration.parameters import with_values
from runner.config import parse_study
from runner.forecast.estimate import Estimator
from runner.forecast.predict import predict
from runner.forecast.prediction import RungPrediction
from runner.forecast.setting import PlannedSetting, plan_setting
from runner.machine.hardware import Profile
from runner.machine.profile import load_profile, profile_text
from runner.plans import levels
from runner.settings import StudySettings
from runner.trial import Distribution, Params, RungResult, TrialResult
from tests.samples import make_result, make_rung

START = load_profile("h200-qwen3-30b-a3b")
CHANGES: Mapping[str, float] = {
    "gpu.bandwidth_bytes_per_s": 0.8,
    "host.eager_layer_s": 1.5,
    "gpu.memory_bound_w": 1.15,
}
TRUTH = replace(
    with_values(
        START,
        {
            name: factor * getattr(getattr(START, name.split(".")[0]), name.split(".")[1])
            for name, factor in CHANGES.items()
        },
    ),
    name="truth",
)
DOCUMENT: Mapping[str, Any] = {
    "name": "one-gpu",
    "engine": {"kind": "simulated", "profile": "h200-qwen3-30b-a3b"},
    "hardware": {"gpus": 1},
    "parameters": {
        "attention_backend": {"choices": ["triton", "flashinfer"]},
        "cuda_graph": {"choices": [True, False]},
        "max_running_requests": {"choices": [24, 256]},
    },
    "workload": {
        "prompt_tokens": 64,
        "output_tokens": {"uniform": [16, 48]},
        "concurrency": [1, 8, 32],
    },
    "search": {"trials": 8, "seed": 0, "sampler": "random"},
    "measure": {"precision": 0.05, "min_window_s": 1, "max_window_s": 4, "finalists": 1},
}
SETTINGS: tuple[Params, ...] = tuple(
    {"attention_backend": backend, "cuda_graph": graph}
    for backend in ("triton", "flashinfer", "fa3")
    for graph in (True, False)
)


@cache
def small_study() -> StudySettings:
    """Two rungs, which is enough where settings are made up."""
    work = {**DOCUMENT["workload"], "concurrency": [1, 32]}
    return parse_study({**DOCUMENT, "workload": work})


def write_profile(folder: Path, profile: Profile = TRUTH) -> Path:
    path = folder / f"{profile.name}.yaml"
    path.write_text(profile_text(profile), encoding="utf-8")
    return path


def measured_rungs(params: Params, profile: Profile = TRUTH) -> tuple[RungResult, ...]:
    """What a machine of this profile gives by the closed form: quick, and without noise."""
    study = small_study()
    estimator = Estimator(study, profile)
    setting = plan_setting(study, profile, params)
    assert isinstance(setting, PlannedSetting)
    return rungs_of([estimator.rung(setting, level) for level in levels(study)])


def simulated_rungs(params: Params, profile_path: Path) -> tuple[RungResult, ...]:
    """What a machine of this profile gives by simulation, as it would be measured."""
    study = small_study()
    study = replace(study, engine=replace(study.engine, profile=str(profile_path)))
    found = {rung.level: rung for rung in predict(study, params, seeds=1).rungs}
    return rungs_of([found[level] for level in levels(study)])


def rungs_of(predictions: Sequence[RungPrediction]) -> tuple[RungResult, ...]:
    """Predictions as if they had been measured."""
    return tuple(
        make_rung(
            int(each.level),
            each.output_throughput,
            position=position,
            ttft_s=Distribution(*[each.ttft_s] * 4),
            tpot_s=Distribution(*[each.tpot_s] * 4),
            power_w=each.power_w,
        )
        for position, each in enumerate(predictions)
    )


def measured_trial(
    number: int,
    params: Params,
    **changes: Any,  # noqa: ANN401 - any field of TrialResult
) -> TrialResult:
    rungs = changes.pop("rungs", None) or measured_rungs(params)
    fields = {"params": params, "resolved": params, "rungs": rungs, **changes}
    return make_result(number, rungs[0].output_throughput, **fields)


def measured_trials() -> list[TrialResult]:
    return [measured_trial(number, params) for number, params in enumerate(SETTINGS)]


def slower(rung: RungResult, factor: float) -> RungResult:
    """The same rung on a machine that was disturbed."""
    assert rung.tpot_s is not None
    return replace(
        rung,
        output_throughput=rung.output_throughput / factor,
        tpot_s=Distribution(*[rung.tpot_s.mean * factor] * 4),
    )
