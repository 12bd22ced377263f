"""Small valid words for tests: a study, rungs and results, each with what the test cares about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.settings import (
    Baseline,
    Choices,
    Direction,
    EngineSettings,
    HardwareSettings,
    MeasureSettings,
    Objective,
    SearchSettings,
    StudySettings,
    Workload,
)
from runner.trial import (
    Distribution,
    EngineKind,
    Lengths,
    LoadProtocol,
    LoadStart,
    Outcome,
    ParamValue,
    RestartResult,
    RungResult,
    TrialResult,
)

PARAMS: Mapping[str, ParamValue] = {
    "tp_size": 1,
    "pp_size": 8,
    "pp_async_batch_depth": 8,
    "pp_max_micro_batch_size": 4,
    "cuda_graph": True,
    "attention_backend": "triton",
}


def make_settings(**changes: Any) -> StudySettings:  # noqa: ANN401 - any field of StudySettings
    """The demo study, with fields replaced."""
    fields: dict[str, Any] = {
        "name": "demo",
        "engine": EngineSettings(
            kind=EngineKind.SIMULATED,
            profile="rtx-pro-6000-x8-kimi-k2.6",
            time_scale=20.0,
            model=None,
            python=None,
            args={},
            env={},
        ),
        "hardware": HardwareSettings(gpus=8, nodes=1, isolation="exclusive"),
        "parameters": (Choices("tp_size", (1, 8)), Choices("pp_size", (1, 8))),
        "constraints": (),
        "baselines": (Baseline("pp8-auto", {"tp_size": 1, "pp_size": 8}),),
        "workload": Workload(
            protocol=LoadProtocol.CLOSED_LOOP,
            prompt_tokens=Lengths.fixed(256),
            output_tokens=Lengths.fixed(128),
            concurrency=(1, 8, 32),
            rate=(),
            shared_prefix=0.0,
        ),
        "objectives": (Objective("output_throughput", 32, Direction.MAXIMIZE),),
        "slo": (),
        "search": SearchSettings("auto", 20, 0, None, None, None, None),
        "measure": MeasureSettings(0.01, 10.0, 120.0, 1, 3),
        "storage": None,
        "tracking_uri": None,
    }
    return StudySettings(**{**fields, **changes})


def make_rung(concurrency: int, output_throughput: float, **changes: Any) -> RungResult:  # noqa: ANN401
    """One valid rung whose other numbers follow from its throughput."""
    fields: dict[str, Any] = {
        "position": 0,
        "concurrency": concurrency,
        "valid": True,
        "reasons": (),
        "window_start_s": 0.0,
        "window_s": 20.0,
        "output_throughput": output_throughput,
        "output_throughput_halfwidth": None,
        "total_throughput": 3.0 * output_throughput,
        "request_throughput": output_throughput / 128,
        "goodput": None,
        "achieved_concurrency": float(concurrency),
        "requests": 100,
        "errors": 0,
        "ttft_s": Distribution(0.5, 0.4, 0.8, 1.25),
        "tpot_s": Distribution(0.05, 0.05, 0.06, 0.0715),
        "itl_s": None,
        "e2e_s": None,
        "power_w": 1600.0,
        "energy_j": 32000.0,
        "tokens_per_joule": output_throughput / 1600.0,
        "joules_per_request": None,
    }
    return RungResult(**{**fields, **changes})


def make_result(number: int, throughput: float | None, **changes: Any) -> TrialResult:  # noqa: ANN401
    """A trial of the demo study: complete with `throughput` at 32 and less below, or failed."""
    rungs = () if throughput is None else make_ladder(throughput)
    fields: dict[str, Any] = {
        "number": number,
        "name": None,
        "params": PARAMS,
        "resolved": PARAMS,
        "outcome": Outcome.FAILED if throughput is None else Outcome.COMPLETE,
        "reason": "server exited with -9" if throughput is None else None,
        "retry_of": None,
        "repeat_of": None,
        "spec_hash": f"{number:016x}",
        "launch": number,
        "stage": None,
        "values": () if throughput is None else (throughput,),
        "constraints": (),
        "rungs": rungs,
    }
    return TrialResult(**{**fields, **changes})


def claimed_rung(throughput: float, halfwidth: float, probe: float | None = None) -> RungResult:
    """The objective's rung of a re-measurement: three restarts and a probe, which may differ."""
    starts = [LoadStart.GRADUAL, LoadStart.TOGETHER, LoadStart.GRADUAL, LoadStart.GRADUAL]
    restarts = tuple(
        RestartResult(
            start,
            counts=start is LoadStart.GRADUAL,
            window_start_s=100.0 * place,
            window_s=20.0,
            output_throughput=throughput if probe is None or place != 1 else probe,
        )
        for place, start in enumerate(starts)
    )
    return make_rung(
        32,
        throughput,
        output_throughput_halfwidth=halfwidth,
        restarts=restarts,
        metastable=probe is not None,
    )


def make_ladder(throughput: float) -> tuple[RungResult, ...]:
    """Rungs 32, 8, 1 in measured order."""
    shares = ((32, 1.0), (8, 0.4), (1, 0.1))
    return tuple(
        make_rung(concurrency, share * throughput, position=position)
        for position, (concurrency, share) in enumerate(shares)
    )
