"""A made-up study on disk: trials with rungs, power of eight GPUs, launches and their logs."""

from __future__ import annotations

import math
from dataclasses import replace

from runner.clock import ClockAnchor
from runner.cluster.executor import LaunchReport
from runner.record.store import StudyStore
from runner.settings import StudySettings
from runner.trial import (
    ClientHealth,
    LaunchSpec,
    Lengths,
    LoadPlan,
    LoadProtocol,
    LoadRun,
    Outcome,
    Params,
    PowerSample,
    RequestRecord,
    RequestStatus,
    RungRecord,
    RungResult,
    TrialResult,
    TrialSpec,
)
from tests.samples import make_result, make_rung

GPUS = tuple(f"GPU-{index:08x}-feed" for index in range(8))
START_S = 1_764_000_000.0
SCALE = 20.0
LADDER = (32, 8, 1)
WINDOW_S = 20.0


def write_trial(store: StudyStore, result: TrialResult, samples_per_gpu: int = 24) -> None:
    """Put a trial with all its files into the store, result last."""
    anchor = ClockAnchor(START_S + 60 * result.number, 1000.0 * result.number, SCALE)
    if result.launch is not None:
        write_launch(store, result.launch, result.params)
    store.write_spec(trial_spec(result), None, anchor)
    for rung in result.rungs:
        share = samples_per_gpu // len(result.rungs)
        store.write_rung(result.number, raw_rung(rung, share))
    store.write_result(result)


def write_launch(store: StudyStore, number: int, params: Params) -> None:
    """A launch that came up, with one server log."""
    spec = LaunchSpec(number, f"{number:016x}", params, 1, 8)
    command = "python -m sglang.launch_server --model-path /models/Kimi-K2.6 --pp-size 8"
    store.write_launch(spec, LaunchReport({"load_weights": 12.5}, ({},), (command,), GPUS))
    log = store.launch_folder(number) / "replica-0.log"
    log.write_text("[2026-01-01 00:00:00] The server is fired up and ready to roll!\n")


def trial_spec(result: TrialResult) -> TrialSpec:
    """The spec that such a result would come from."""
    plan = LoadPlan(
        "rung-0", LoadProtocol.CLOSED_LOOP, 32, Lengths.fixed(256), Lengths.fixed(128), seed=0
    )
    return TrialSpec(
        number=result.number,
        params=result.params,
        live={},
        rungs=tuple(replace(plan, concurrency=level) for level in LADDER),
        warmup=plan,
        spec_hash=result.spec_hash,
        name=result.name,
    )


def raw_rung(rung: RungResult, samples: int) -> RungRecord:
    """The record of a judged rung: one request, and power that swings around its mean."""
    start_s, end_s = rung.window_start_s, rung.window_start_s + rung.window_s
    request = RequestRecord(
        "r-0", 0, start_s, start_s + 1, end_s, (start_s + 1, end_s), 256, 2, 2, 0, RequestStatus.OK
    )
    power = tuple(
        PowerSample(
            time_s=start_s + rung.window_s * n / max(1, samples - 1),
            gpu_uuid=uuid,
            power_w=(rung.power_w or 0) / 8 + 5 * gpu + 20 * math.sin(n / 4),
            energy_j=100.0 * n,
            utilization=0.5 + 0.4 * math.sin(n / 5 + gpu),
            memory_used_bytes=90_000_000_000,
            sm_clock_mhz=2400.0,
            throttled=False,
        )
        for n in range(samples)
        for gpu, uuid in enumerate(GPUS)
    )
    load = LoadRun((request,), start_s, start_s, end_s, True, ClientHealth(0.2, 0.002))
    return RungRecord(rung.position, rung.concurrency, (load,), power)


def complete_trial(
    number: int, throughput: float, params: Params, name: str | None = None
) -> TrialResult:
    """A complete trial whose rungs follow each other on its own clock."""
    shares = dict(zip(LADDER, (1.0, 0.45, 0.1), strict=True))
    rungs = tuple(
        make_rung(
            level,
            share * throughput,
            position=position,
            window_start_s=1000.0 * number + 30 + 40 * position,
            window_s=WINDOW_S,
            power_w=900.0 + 1400.0 * share,
            energy_j=WINDOW_S * (900.0 + 1400.0 * share),
            tokens_per_joule=share * throughput / (900.0 + 1400.0 * share),
        )
        for position, (level, share) in enumerate(shares.items())
    )
    resolved = {**params, "max_running_requests": 256, "mem_fraction_static": 0.88}
    return make_result(
        number, throughput, name=name, params=params, resolved=resolved, rungs=rungs, launch=number
    )


def demo_trials() -> list[TrialResult]:
    """Ten trials as a study would have them: baselines, better, worse, failed and pruned ones."""

    def params(depth: int, cap: int | None, backend: str = "triton") -> Params:
        made: dict[str, bool | int | float | str] = {
            "tp_size": 1,
            "pp_size": 8,
            "pp_async_batch_depth": depth,
            "cuda_graph": True,
            "attention_backend": backend,
        }
        return made if cap is None else made | {"pp_max_micro_batch_size": cap}

    trials = [
        complete_trial(0, 310, {"tp_size": 8, "pp_size": 1}, "tp8"),
        complete_trial(1, 210, {"tp_size": 1, "pp_size": 8}, "pp8-auto"),
    ]
    tried = [(0, 64), (8, 16), (4, 5), (0, 4), (8, 4), (2, 3)]
    for number, (depth, cap) in enumerate(tried, start=2):
        value = 530 - 30 * abs(cap - 4) ** 0.5 - 4 * depth
        trials.append(complete_trial(number, value, params(depth, cap)))
    trials[3] = replace(
        trials[3],
        outcome=Outcome.PRUNED,
        reason="far from the best at concurrency 32",
        rungs=trials[3].rungs[:1],
    )
    reason = "out of memory while capturing CUDA graphs; lower mem_fraction_static"
    trials.append(
        make_result(
            8, None, params=params(0, 8, "flashinfer"), outcome=Outcome.INFEASIBLE, reason=reason
        )
    )
    trials.append(make_result(9, None, params=params(1, 8), launch=9, reason="exited with -9"))
    return trials


def write_study(
    store: StudyStore, settings: StudySettings, samples_per_gpu: int = 24
) -> list[TrialResult]:
    """The demo trials, on disk."""
    store.create({"name": settings.name}, {"python": "3.11.2"})
    trials = demo_trials()
    for result in trials:
        write_trial(store, result, samples_per_gpu)
    return trials
