"""Compares the closed form of steady decode with the simulation, over random settings.

python tests/bench/closed_form.py [--settings 200] [--seed 0]

Settings are drawn from the space of Kimi K2.6 on 8 GPUs. For each protocol and concurrency: the
rank correlation (Spearman) of throughput, the median and the worst disagreement.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from runner.config import load_study
from runner.forecast.estimate import Estimator
from runner.forecast.setting import PlannedSetting, plan_setting, study_profile
from runner.forecast.simulate import Effort, Job, make_job, run_jobs
from runner.label import setting_label
from runner.settings import StudySettings
from runner.trial import Lengths, LoadProtocol, LoadStart, Params

STUDY = Path(__file__).parents[2] / "search_spaces" / "kimi-k2.6-8x-rtx-pro-6000.yaml"
EFFORT = Effort(lives=1.0, most_work=0.5e6, start=LoadStart.GRADUAL)
LADDER = (8, 32)
LENGTHS = {"256 tokens": Lengths.fixed(256), "128 - 384 tokens": Lengths("uniform", 128, 384)}


def draw(draws: random.Random) -> Params:
    """One setting of 8 GPUs."""
    pp_size = draws.choice([1, 2, 4, 8])
    params: dict[str, bool | int | float | str] = {"tp_size": 8 // pp_size, "pp_size": pp_size}
    if pp_size > 1:
        params["pp_async_batch_depth"] = draws.randint(0, 8)
        params["pp_max_micro_batch_size"] = round(2 ** draws.uniform(0, 6))
    params["cuda_graph"] = draws.random() < 0.5
    params["attention_backend"] = draws.choice(["triton", "flashinfer"])
    return params


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """The correlation of ranks."""
    return statistics.correlation(ranks(one), ranks(other))


def ranks(values: Sequence[float]) -> list[float]:
    """Places in ascending order; equals share their mean place."""
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in set(values)}
    count = {value: ordered.count(value) for value in first}
    return [first[value] + (count[value] - 1) / 2 for value in values]


def compare(settings: StudySettings, drawn: Sequence[Params], words: str) -> None:
    """One line for each rung of the study."""
    estimator = Estimator(settings, study_profile(settings))
    planned = [
        each
        for params in drawn
        if isinstance(each := plan_setting(settings, estimator.profile, params), PlannedSetting)
    ]
    for level in settings.workload.ladder:
        jobs: list[Job] = [
            make_job(settings, estimator, each, level, 0, EFFORT) for each in planned
        ]
        simulated = [sample.output_throughput for sample in run_jobs(jobs)]
        closed = [estimator.rung(each, level).output_throughput for each in planned]
        errors = [mine / true - 1 for mine, true in zip(closed, simulated, strict=True)]
        worst = max(range(len(errors)), key=lambda at: abs(errors[at]))
        print(  # noqa: T201 - the figures are the product
            f"{words}, C={level:g}: Spearman {spearman(closed, simulated):.3f}, "
            f"median {statistics.median(abs(error) for error in errors):.1%}, "
            f"p90 {sorted(abs(error) for error in errors)[len(errors) * 9 // 10]:.1%}, worst "
            f"{errors[worst]:+.0%} at {setting_label(planned[worst].params)} "
            f"({closed[worst]:.0f} against {simulated[worst]:.0f} tok/s)",
            flush=True,
        )


def main() -> None:
    """Both protocols, equal and uneven lengths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draws = random.Random(args.seed)
    drawn = [draw(draws) for _ in range(args.settings)]
    study = load_study(STUDY)
    for protocol in (LoadProtocol.CLOSED_LOOP, LoadProtocol.BURST):
        for name, lengths in LENGTHS.items():
            work = replace(
                study.workload, protocol=protocol, output_tokens=lengths, concurrency=LADDER
            )
            compare(replace(study, workload=work), drawn, f"{protocol}, {name}")


if __name__ == "__main__":
    main()
