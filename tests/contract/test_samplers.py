"""What every sampler promises: the same study again after any cut, and no trial that is known."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from runner.expression import Expression
from runner.launch import as_int, plan_launch
from runner.search.history import Counts
from runner.search.proposals import Proposal
from runner.search.sampler import SAMPLERS
from runner.search.storage import TrialStorage
from runner.search.study import Search
from runner.settings import Choices, MeasureSettings, StudySettings
from runner.space import satisfies
from runner.trial import Outcome, TrialResult
from tests.search_samples import (
    CAP,
    DEPTH,
    PARAMETERS,
    bad,
    chosen,
    finish,
    on_real_servers,
    open_search,
    result_of,
    search_settings,
    throughput,
)

NO_REPEATS = MeasureSettings(0.01, 10.0, 120.0, 0, 0)
TRIALS = 8
ENDS = {2: Outcome.INFEASIBLE, 4: Outcome.FAILED, 6: Outcome.LOST, 7: Outcome.INVALID}


@dataclass(frozen=True)
class Run:
    """A study that was driven to its end without a cut."""

    settings: StudySettings
    asked: list[Proposal]
    counts: Counts


def mixed(proposal: Proposal) -> TrialResult:
    """Some trials end badly, by their numbers: the third infeasible, the fifth failed, ..."""
    outcome = ENDS.get(proposal.number)
    return result_of(proposal) if outcome is None else bad(proposal, outcome)


def run_whole(settings: StudySettings, folder: Path) -> Run:
    search = open_search(settings, folder)
    asked = finish(search, mixed)
    search.close()
    return Run(settings, asked, search.counts())


@pytest.fixture(
    scope="module",
    params=[name for name in SAMPLERS if name != "tpe"],  # today tpe is what auto is
)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demo's space under each sampler."""
    settings = search_settings(trials=TRIALS, sampler=request.param, measure=NO_REPEATS)
    return run_whole(settings, tmp_path_factory.mktemp("whole"))


def test_study_cut_before_and_after_every_tell_asks_for_the_same(
    whole: Run, tmp_path: Path
) -> None:
    asked: list[Proposal] = []
    while True:
        search = open_search(whole.settings, tmp_path)
        proposal = search.ask()
        search.close()
        if proposal is None:
            break
        search = open_search(whole.settings, tmp_path)
        assert search.running() == (proposal,)
        search.tell(mixed(proposal))
        search.close()
        asked.append(proposal)
    assert asked == whole.asked


def test_another_seed_asks_for_other_settings(whole: Run, tmp_path: Path) -> None:
    other = replace(whole.settings, search=replace(whole.settings.search, seed=1))
    assert chosen(run_whole(other, tmp_path).asked) != chosen(whole.asked)


def test_no_trial_is_refused_or_known(whole: Run) -> None:
    proposals = chosen(whole.asked)
    assert all(satisfies(whole.settings, p.params) for p in proposals)
    assert len({p.spec_hash for p in proposals}) == len(proposals)
    assert [p.retry_of for p in whole.asked if p.retry_of is not None] == [4, 6, 7]
    assert whole.counts.complete == TRIALS


def test_whole_grid_is_measured_once_although_cut_after_seven(whole: Run, tmp_path: Path) -> None:
    """Twelve points, one session of seven, then the rest."""
    grid = replace(
        on_real_servers(whole.settings),
        parameters=(
            Choices("tp_size", (1, 2, 4)),
            Choices("cuda_graph", (True, False)),
            Choices("attention_backend", ("triton", "flashinfer")),
        ),
        constraints=(),
        baselines=(),
        search=replace(whole.settings.search, trials=100),
    )
    first = open_search(grid, tmp_path)
    asked: list[Proposal] = []
    for _ in range(7):
        proposal = first.ask()
        assert proposal is not None
        asked.append(proposal)
        first.tell(result_of(proposal))
    first.close()
    asked += finish(open_search(grid, tmp_path))
    assert len(asked) == len({p.spec_hash for p in asked}) == 12


def test_auto_needs_few_draws_where_constraints_refuse_most_points(tmp_path: Path) -> None:
    """Three of four splits are refused; without telling TPE so it drew 37 times per proposal."""
    settings = search_settings(trials=20, measure=NO_REPEATS)
    finish(open_search(settings, tmp_path))
    storage = TrialStorage(settings, f"sqlite:///{tmp_path / 'optuna.db'}")
    drawn = [trial.drawn for trial in storage.read_all() if trial.drawn]
    assert len(drawn) == 18
    assert sum(drawn) / len(drawn) < 15


def test_auto_measures_several_settings_on_a_launch(tmp_path: Path) -> None:
    """A start costs minutes; one setting a launch would need 56 starts for these 60 trials."""
    starts = 0
    for seed in range(3):
        settings = search_settings(seed=seed, measure=NO_REPEATS)
        (folder := tmp_path / str(seed)).mkdir()
        asked = finish(open_search(settings, folder))
        keys = [plan_launch(settings, proposal.params).key for proposal in asked]
        starts += 1 + sum(one != other for one, other in pairwise(keys))
    assert starts < 42


@pytest.mark.parametrize("seed", range(3))
def test_auto_finds_the_cap_within_twenty_trials(seed: int, tmp_path: Path) -> None:
    """32 streams on 8 slots are fastest with a cap of 4."""
    settings = search_settings(
        seed=seed,
        parameters=tuple(p for p in PARAMETERS if p.name != DEPTH),
        constraints=(Expression("tp_size == 1"), Expression("pp_size == 8")),
        measure=NO_REPEATS,
    )
    asked = finish(open_search(settings, tmp_path))
    best = max(chosen(asked), key=lambda proposal: throughput(proposal.params))
    assert abs(as_int(best.params[CAP]) - 4) <= 1


ROOT = Path(__file__).parents[2]
DRIVER = """
import sys
from pathlib import Path
from tests.contract.test_samplers import killable, mixed, open_search
search = open_search(killable(), Path(sys.argv[1]))
for proposal in search.running():
    search.tell(mixed(proposal))
while (proposal := search.ask()) is not None:
    print(proposal.number, flush=True)
    search.tell(mixed(proposal))
"""


def killable() -> StudySettings:
    """A study that is killed again and again."""
    return search_settings(trials=11, measure=NO_REPEATS)


def run_driver(folder: Path, trials: int, hash_seed: int) -> None:
    """Drive the study in a process of its own and kill it when it has begun so many trials."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder)],
        stdout=subprocess.PIPE,
        env={"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)},
    ) as driver:
        assert driver.stdout is not None
        for _ in range(trials):
            driver.stdout.readline()
        driver.send_signal(signal.SIGKILL)


def test_killed_driver_leaves_whole_trials_and_the_next_goes_on_alike(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    expected = finish(open_search(killable(), whole), mixed)
    for hash_seed, trials in enumerate((3, 4), start=1):
        run_driver(tmp_path, trials, hash_seed)
    search = open_search(killable(), tmp_path)
    for proposal in search.running():
        search.tell(mixed(proposal))
    finish(search, mixed)
    assert trials_of(search) == [(p.number, p.spec_hash, p.retry_of) for p in expected]


def trials_of(search: Search) -> list[tuple[int, str, int | None]]:
    """What a study's trials measured."""
    return [(t.number, t.spec_hash, t.retry_of) for t in search._history]  # noqa: SLF001
