"""A filled pipeline stays as it was started, as on two real H200s (docs/results/h200-pp.md).

64 streams of 256 tokens in and 128 out. Streams that begin together are prefilled together and end
together; those that begin one after another are prefilled one by one, each prefill without a CUDA
graph, and fall into step only slowly. Measured: tokens/s in 5 s pieces from the moment on at which
all streams run.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from runner.config import parse_study
from runner.engines.simulated import SimulatedServers
from runner.launch import plan_launch
from runner.plans import rung_plans
from runner.trial import LaunchSpec, LoadRun, LoadStart, Params

DENSE, EXPERTS = "h200-llama-3.1-8b", "h200-qwen3-30b-a3b"
PIECE_S = 5.0


def run(profile: str, params: Params, start: LoadStart, most_s: float = 16) -> LoadRun:
    """A load of 64 streams on one server of two GPUs."""
    settings = parse_study(
        {
            "name": "filled",
            "engine": {
                "kind": "simulated",
                "profile": profile,
                "args": {"attention_backend": "fa3", "max_running_requests": 128},
            },
            "hardware": {"gpus": 2},
            "parameters": {name: {"choices": [value]} for name, value in params.items()},
            "workload": {"prompt_tokens": 256, "output_tokens": 128, "concurrency": [64]},
            "measure": {"min_window_s": most_s - 2, "max_window_s": most_s},
        }
    )
    plan = plan_launch(settings, params)
    servers = SimulatedServers(settings, LaunchSpec(0, plan.key, plan.server_args, 1, 2))
    servers.set_live(plan.live)
    return servers.run_load(replace(rung_plans(settings, 0)[0], start=start))


def rates(load: LoadRun) -> list[float]:
    """Tokens/s in pieces of 5 s, from the moment on at which all streams run."""
    sends_s = sorted(record.send_s for record in load.records)
    from_s, until_s = sends_s[63], sends_s[-1]
    times_s = [time_s for record in load.records for time_s in record.token_s]
    pieces = int((until_s - from_s) // PIECE_S)
    starts_s = [from_s + piece * PIECE_S for piece in range(pieces)]
    return [
        sum(start_s < time_s <= start_s + PIECE_S for time_s in times_s) / PIECE_S
        for start_s in starts_s
    ]


def pipeline(depth: int, cap: int | None = None) -> Params:
    params: Params = {"tp_size": 1, "pp_size": 2, "pp_async_batch_depth": depth}
    return params if cap is None else {**params, "pp_max_micro_batch_size": cap}


@pytest.mark.parametrize(
    ("params", "first", "later", "together"),
    [
        (pipeline(0), (2070, 2971), (2411, 3693), (4004, 4048)),
        (pipeline(0, cap=32), (2091, 2698), (2387, 3122), (4041, 4401)),
        (pipeline(1), (1881, 2185), (2151, 3002), (3374, 3805)),
        (pipeline(2), (1664, 1664), (2301, 2450), None),
        (pipeline(2, cap=16), (1790, 1790), (2165, 2366), None),
    ],
)  # each the least and the most of all pieces that were measured
def test_the_start_of_a_load_decides_how_fast_a_pipeline_runs(
    params: Params,
    first: tuple[float, float],
    later: tuple[float, float],
    together: tuple[float, float] | None,
) -> None:
    gradual = rates(run(DENSE, params, LoadStart.GRADUAL))
    assert lies(gradual[0], first, 0.15)
    assert lies(fmean(gradual[1:4]), later, 0.15)
    if together is not None:
        assert lies(fmean(rates(run(DENSE, params, LoadStart.TOGETHER))), together, 0.1)


def test_experts_fall_into_step_for_most_of_a_minute() -> None:
    """Measured: 948, 1076, 1185, 1281, 1384, 1374, 1491, 1483, 1642; once more 867 to 1465."""
    found = rates(run(EXPERTS, pipeline(0), LoadStart.GRADUAL, most_s=60))
    assert lies(fmean(found[:3]), (969, 1070), 0.1)
    assert lies(fmean(found[3:6]), (1259, 1346), 0.1)
    assert lies(fmean(found[6:9]), (1465, 1539), 0.1)


def test_a_cap_of_half_the_streams_keeps_slots_of_experts_from_falling_into_step() -> None:
    """Measured: 777, 874, 1064, 1198, 1100, 1033, 1113, 1119."""
    found = rates(run(EXPERTS, pipeline(0, cap=32), LoadStart.GRADUAL, most_s=60))
    assert lies(fmean(found[3:8]), (1113, 1113), 0.1)
    assert lies(fmean(found[8:12]), (1113, 1113), 0.15)


def lies(found: float, measured: tuple[float, float], off: float) -> bool:
    """Between the least and the most that was measured, or not further off than this."""
    return (1 - off) * measured[0] < found < (1 + off) * measured[1]
