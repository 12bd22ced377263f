"""What ending hopeless loads early saves, and whether it ever ends the wrong one.

Whole searches on the simulated engine, each twice with the same seed: as they are, and with every
load driven to the end of its window. Printed: the virtual time of the rungs' loads, the best
setting, and how near the best one comes which was cut short, once it is measured in full.

    python tests/bench/hopeless.py [--studies h200 kimi] [--seeds 3] [--trials 20]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from runner.config import parse_study
from runner.engines.simulated import SimulatedServers
from runner.errors import ConfigError, Infeasible
from runner.label import setting_label
from runner.launch import plan_launch
from runner.measure.restarts import output_rate
from runner.plans import rung_plans, warmup_plan
from runner.run_trial import run_trial
from runner.search.proposals import Proposal
from runner.search.study import Search
from runner.settings import StudySettings
from runner.trial import (
    Failure,
    LaunchSpec,
    LoadPlan,
    LoadRun,
    Outcome,
    Stage,
    TrialResult,
    TrialSpec,
)
from runner.verdict import RungKeeper, TrialIdentity, conclude
from tests.studies import DEMO

H200: dict[str, Any] = {
    "name": "h200",
    "engine": {"kind": "simulated", "profile": "h200-llama-3.1-8b"},
    "hardware": {"gpus": 1},
    "parameters": {
        "max_running_requests": {"choices": [8, 16, 32, 64, 128, 256]},
        "cuda_graph": {"choices": [True, False]},
        "attention_backend": {"choices": ["triton", "flashinfer", "fa3", "torch_native"]},
        "chunked_prefill_size": {"choices": [2048, 4096, 8192]},
    },
    "baselines": [{"name": "default"}],
    "workload": {"prompt_tokens": 256, "output_tokens": 256, "concurrency": [8, 32, 128]},
    "measure": {"min_window_s": 10, "max_window_s": 120, "finalists": 1},
}
KIMI: dict[str, Any] = {
    **DEMO,
    "name": "kimi",
    "parameters": {
        **DEMO["parameters"],
        "attention_backend": {"choices": ["triton", "flashinfer"]},
    },
    "baselines": [*DEMO["baselines"], {"name": "tp8", "tp_size": 8, "pp_size": 1}],
    "workload": {
        "prompt_tokens": 256,
        "output_tokens": {"uniform": [128, 384]},
        "concurrency": [1, 16, 64],
    },
    "measure": {"min_window_s": 10, "max_window_s": 120, "finalists": 1},
}
STUDIES = {"h200": H200, "kimi": KIMI}
NEAR = 0.7


@dataclass
class Found:
    """What one search came to. `cut` are loads that ended early, with their plans, by trial."""

    results: list[TrialResult] = field(default_factory=list)
    loads_s: float = 0.0
    cut: dict[int, tuple[LoadPlan, LoadRun]] = field(default_factory=dict)

    @property
    def best(self) -> TrialResult:
        complete = (each for each in self.results if each.outcome is Outcome.COMPLETE)
        return max(complete, key=lambda each: each.values[0])


class TimedServers(SimulatedServers):
    """Simulated servers that note how long the loads of rungs take."""

    def __init__(
        self, settings: StudySettings, launch: LaunchSpec, found: Found, trial: int
    ) -> None:
        super().__init__(settings, launch)
        self._found = found
        self._trial = trial

    def run_load(self, plan: LoadPlan) -> LoadRun:
        """As simulated servers do."""
        load = super().run_load(plan)
        if not plan.is_warmup:
            self._found.loads_s += length_s(load)
        if load.cut_below is not None:
            self._found.cut[self._trial] = plan, load
        return load


def length_s(load: LoadRun) -> float:
    return load.window_end_s - load.started_s


def search_of(settings: StudySettings, folder: Path, *, is_early: bool) -> Found:
    """One whole search, re-measurements left out."""
    found = Found()
    search = Search(settings, f"sqlite:///{folder}/{settings.search.seed}-{is_early}.db")
    while (proposal := search.ask()) is not None and proposal.repeat_of is None:
        result = search.settle(measured(settings, search, proposal, found, is_early=is_early))
        search.tell(result)
        found.results.append(result)
    search.close()
    return found


def measured(
    settings: StudySettings, search: Search, proposal: Proposal, found: Found, *, is_early: bool
) -> TrialResult:
    """One trial, as tune measures it."""
    number, params = proposal.number, proposal.params
    identity = TrialIdentity(
        number, proposal.name, params, proposal.spec_hash, proposal.retry_of, None
    )

    def should_stop(position: int, value: float, doubt: float) -> str | None:
        reason = search.should_stop(number, position, value, doubt)
        if reason or not doubt:
            search.report(number, position, value)
        return reason

    keeper = RungKeeper(
        settings=settings,
        plans=rung_plans(settings, number),
        keep=lambda _: None,
        should_stop=should_stop,
        on_judged=lambda _: None,
        worth=partial(search.worth, number) if is_early else lambda _: None,
    )
    try:
        plan = plan_launch(settings, params)
        spec = LaunchSpec(0, plan.key, plan.server_args, plan.replicas, plan.gpus_per_replica)
        servers = TimedServers(settings, spec, found, number)
    except (ConfigError, Infeasible) as error:
        failure = Failure(Stage.START, Outcome.INFEASIBLE, str(error))
        return conclude(identity, failure, keeper, launch=None)
    warmup = warmup_plan(settings, number)
    trial = TrialSpec(number, params, plan.live, tuple(keeper.plans), warmup, proposal.spec_hash)
    return conclude(identity, run_trial(trial, servers, keeper), keeper, launch=0)


def in_full(settings: StudySettings, plan: LoadPlan, result: TrialResult) -> LoadRun:
    """A load that ended early, driven to the end of its window."""
    launch = plan_launch(settings, result.params)
    spec = LaunchSpec(0, launch.key, launch.server_args, launch.replicas, launch.gpus_per_replica)
    servers = SimulatedServers(settings, spec)
    servers.set_live(launch.live)
    return servers.run_load(replace(plan, worth=None))


def report(name: str, settings: StudySettings, folder: Path) -> None:
    """Print what one seed of a study comes to."""
    early = search_of(settings, folder, is_early=True)
    whole = search_of(settings, folder, is_early=False)
    saved = 1 - early.loads_s / whole.loads_s
    say(
        f"{name} seed {settings.search.seed}: loads {early.loads_s:.0f} s instead of "
        f"{whole.loads_s:.0f} s ({saved:.0%} less), {len(early.cut)} of {len(early.results)} "
        "trials cut short"
    )
    for found, words in ((early, "early"), (whole, "whole")):
        best = found.best
        say(f"  best, {words}: {best.values[0]:.0f} tokens/s, {setting_label(best.params)}")
    for result in early.results:
        if result.number in early.cut:
            plan, load = early.cut[result.number]
            say(f"  {cut_words(settings, result, plan, load, early.best.values[0])}")


def cut_words(
    settings: StudySettings, result: TrialResult, plan: LoadPlan, load: LoadRun, best: float
) -> str:
    """One trial that was cut short, beside what it comes to in full."""
    full = in_full(settings, plan, result)
    near = output_rate(full) / best
    return (
        f"cut #{result.number} ({result.outcome}) after {length_s(load):.0f} s, in full "
        f"{length_s(full):.0f} s: {output_rate(load):.0f}, in full {output_rate(full):.0f} "
        f"tokens/s, {near:.0%} of the best{' TOO NEAR' if near >= NEAR else ''}: "
        f"{setting_label(result.params)}"
    )


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=20)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        for name in given.studies:
            for seed in range(given.seeds):
                search = {"trials": given.trials, "seed": seed}
                settings = parse_study({**STUDIES[name], "search": search})
                Path(folder, name).mkdir(exist_ok=True)
                report(name, settings, Path(folder, name))


if __name__ == "__main__":
    main()
