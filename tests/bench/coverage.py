"""Do the stated intervals hold the long-run throughput? Seeded measurements by the full protocol.

For each setting: the truth is the mean, over seeds, of the throughput over 50 mean request
durations after a gradual start. Then many measurements, each as a finalist is measured: restarts
and a probe until the rule of runner/measure/restarts.py has enough. Printed: the share of 95 %
intervals that hold the truth, with its own 95 % interval; their half-width; how far off the means
are; how many are called metastable; and what a measurement costs, in seconds of the servers' time.

The reference protocol (all requests at once, all tokens / wall of the slowest) is then repeated, by
the same seeds, until Student's interval of its bursts is as narrow: its cost stands beside ours.

With `--engine emulated` the same goes through real processes and HTTP, in time 40 times as fast as
real, with replies of 16 to 48 tokens to 16 streams, so that a measurement takes seconds.

    python tests/bench/coverage.py [--engine simulated] [--measurements 400] [--truths 48]
                                   [--settings "pp8 d8 cap64" ...] [--shards 1] [--minutes M]
                                   [--first-seed 0] [--save FILE] [--load FILE ...]

`--shards` measures each setting on so many servers side by side; `--minutes` stops early, reporting
what there is; `--save` keeps the measurements, and `--load` reports saved ones together.
"""

from __future__ import annotations

import argparse
import math
import pickle
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from runner.cluster.executor import RunningLaunch
from runner.cluster.inline import InlineExecutor
from runner.config import load_study
from runner.launch import plan_launch
from runner.measure.attainment import share_with_bounds
from runner.measure.restarts import RateClaim, claim, next_restart, output_rate
from runner.measure.student import student_t
from runner.plans import rung_plans
from runner.settings import StudySettings
from runner.trial import LaunchSpec, Lengths, LoadPlan, LoadProtocol, LoadRun, LoadStart

SETTINGS: dict[str, dict[str, Any]] = {
    "tp8": {"tp_size": 8, "pp_size": 1},
    "pp8 d0 cap8": {"tp_size": 1, "pp_size": 8, "pp_max_micro_batch_size": 8},
    "pp8 d0 cap4": {"tp_size": 1, "pp_size": 8, "pp_max_micro_batch_size": 4},
    "pp8 d8 cap64": {
        "tp_size": 1,
        "pp_size": 8,
        "pp_async_batch_depth": 8,
        "pp_max_micro_batch_size": 64,
    },
}
STUDY = "search_spaces/demo.yaml"
KINDS = ("truth", "full", "burst", "long burst")
LIVES = 50
BURSTS = 60
OVERRIDES = {
    "simulated": (
        "engine.kind=simulated",
        "measure.max_window_s=240",
        "measure.precision=0.01",
    ),
    "emulated": (
        "engine.kind=emulated",
        "engine.time_scale=40",
        "measure.max_window_s=240",
        "measure.precision=0.01",
        "measure.min_window_s=1",
        "workload.output_tokens={uniform: [16, 48]}",
        "workload.concurrency=[16]",
    ),
}


@dataclass(frozen=True)
class Job:
    engine: str
    setting: str
    kind: str
    seed: int


@dataclass(frozen=True)
class Measured:
    """One measurement: its claim, its restarts, and the servers' seconds it took."""

    claimed: RateClaim
    restarts: int
    cost_s: float


@dataclass(frozen=True)
class Done:
    """A job and what it measured."""

    job: Job
    measured: Measured


@contextmanager
def running(engine: str, setting: str) -> Iterator[tuple[StudySettings, RunningLaunch]]:
    """Servers of a setting, up and set."""
    settings = load_study(Path(STUDY), OVERRIDES[engine])
    params = {"cuda_graph": True, "attention_backend": "triton", **SETTINGS[setting]}
    plan = plan_launch(settings, params)
    spec = LaunchSpec(0, plan.key, plan.server_args, plan.replicas, plan.gpus_per_replica)
    with TemporaryDirectory() as name:
        folder = Path(name)
        executor = InlineExecutor(settings, folder / "machine", folder / "leases")
        (folder / "launch").mkdir()
        with executor.launch(spec, folder / "launch", lambda _: None) as servers:
            servers.set_live(plan.live)
            yield settings, servers


def cost_s(load: LoadRun) -> float:
    return load.window_end_s - load.started_s


def run(jobs: Sequence[Job], end_s: float) -> list[Done]:
    """Jobs of one setting, one after another on the same servers, until `end_s` of the wall."""
    done: list[Done] = []
    with running(jobs[0].engine, jobs[0].setting) as (settings, servers):
        for job in jobs:
            if time.time() >= end_s:
                break
            done.append(Done(job, run_one(job, settings, servers)))
    return done


def run_one(job: Job, settings: StudySettings, servers: RunningLaunch) -> Measured:
    plan = rung_plans(settings, job.seed, is_repeat=True)[0]
    if job.kind == "truth":
        plan = replace(plan, phase="rung-0-0", min_periods=LIVES, max_window_s=1e5)
        load = servers.run_load(plan)
        return Measured(RateClaim(output_rate(load), None, is_metastable=False), 1, cost_s(load))
    if job.kind in ("burst", "long burst"):
        return burst(servers, plan, is_long=job.kind == "long burst")
    loads: list[LoadRun] = []
    while (following := next_restart(plan, loads)) is not None:
        loads.append(servers.run_load(following))
    return Measured(claim(plan, loads), len(loads), sum(map(cost_s, loads)))


def burst(servers: RunningLaunch, plan: LoadPlan, *, is_long: bool) -> Measured:
    lengths = Lengths("uniform", 1300, 3000) if is_long else plan.output_tokens
    plan = replace(
        plan,
        phase="rung-0-0",
        protocol=LoadProtocol.BURST,
        start=LoadStart.TOGETHER,
        output_tokens=lengths,
        max_window_s=1e4,
    )
    load = servers.run_load(plan)
    return Measured(RateClaim(output_rate(load), None, is_metastable=False), 1, cost_s(load))


def bursts_for(halfwidth: float, rates: Sequence[float]) -> int:
    """How many bursts give an interval as narrow, by their standard deviation."""
    deviation = statistics.stdev(rates) / statistics.fmean(rates)
    count = 2
    while count < 10_000:
        if student_t(count - 1) * deviation / math.sqrt(count) <= halfwidth:
            return count
        count += 1
    return count


def report(
    setting: str,
    truths: list[Measured],
    found: list[Measured],
    bursts: list[Measured],
    long: list[Measured],
) -> str:
    truth = statistics.fmean(each.claimed.mean for each in truths)
    error = statistics.stdev(each.claimed.mean for each in truths) / math.sqrt(len(truths))
    hits = sum(abs(each.claimed.mean - truth) <= (each.claimed.halfwidth or 0.0) for each in found)
    held = share_with_bounds(hits, len(found))
    low, high = (held.low, held.high) if held else (0.0, 1.0)
    widths = sorted((each.claimed.halfwidth or 0.0) / each.claimed.mean for each in found)
    offs = [each.claimed.mean / truth - 1 for each in found]
    width, cost = statistics.median(widths), statistics.fmean(each.cost_s for each in found)
    tenth, ninth = widths[len(widths) // 10], widths[-1 - len(widths) // 10]
    metastable = sum(each.claimed.is_metastable for each in found)
    restarts = statistics.fmean(each.restarts for each in found)
    lines = [
        f"{setting}: truth {truth:.1f} +- {1.96 * error:.1f} tokens/s over {len(truths)} seeds",
        f"  covered {hits} of {len(found)} = {hits / len(found):.1%} ({low:.1%} - {high:.1%})",
        f"  half-width median {width:.2%}, 10 - 90 %: {tenth:.2%} - {ninth:.2%}",
        f"  mean off by {statistics.fmean(offs):+.2%}, sd {statistics.pstdev(offs):.2%}",
        f"  metastable {metastable}, restarts {restarts:.2f}, cost {cost:.0f} s",
    ]
    references = [("as long replies", bursts), ("1,300 - 3,000 tokens", long)]
    for name, repeats in references if bursts else []:
        rates = [each.claimed.mean for each in repeats]
        count = bursts_for(width, rates)
        each_s = statistics.fmean(each.cost_s for each in repeats)
        lines.append(
            f"  bursts of {name}: {statistics.fmean(rates):.1f} tokens/s, sd "
            f"{statistics.stdev(rates) / statistics.fmean(rates):.2%}, {each_s:.0f} s each: "
            f"{count} are as precise = {count * each_s:.0f} s, {count * each_s / cost:.2f} x"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=list(OVERRIDES), default="simulated")
    parser.add_argument("--measurements", type=int, default=400)
    parser.add_argument("--truths", type=int, default=48)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path, nargs="+", default=[])
    arguments = parser.parse_args()
    done = [each for path in arguments.load for each in pickle.loads(path.read_bytes())]
    if not done:
        done = measure(arguments)
    if arguments.save:
        arguments.save.write_bytes(pickle.dumps(done))
    for name in arguments.settings:
        parts = [
            [each.measured for each in done if (each.job.setting, each.job.kind) == (name, kind)]
            for kind in KINDS
        ]
        if len(parts[0]) > 1 and parts[1]:
            sys.stdout.write(report(name, *parts) + "\n")


def measure(arguments: argparse.Namespace) -> list[Done]:
    end_s = time.time() + 60 * arguments.minutes
    is_simulated = arguments.engine == "simulated"
    workers = None if is_simulated else len(arguments.settings) * arguments.shards
    with ProcessPoolExecutor(workers) as pool:
        futures = [
            pool.submit(run, batch, end_s)
            for name in arguments.settings
            for batch in batches_of(arguments, name)
        ]
        return [each for future in futures for each in future.result()]


def batches_of(arguments: argparse.Namespace, setting: str) -> list[list[Job]]:
    """All jobs of a setting: small batches, or one for each server that has to be started."""
    engine, first = arguments.engine, arguments.first_seed
    counts = (arguments.truths, arguments.measurements, BURSTS, BURSTS // 4)
    jobs = [
        Job(engine, setting, kind, 100_000 * place + first + seed)
        for place, (kind, count) in enumerate(zip(KINDS, counts, strict=True))
        for seed in range(count if engine == "simulated" or "burst" not in kind else 0)
    ]
    batches = len(jobs) if engine == "simulated" else arguments.shards
    return [jobs[start::batches] for start in range(batches)]


if __name__ == "__main__":
    main()
