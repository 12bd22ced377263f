"""Canary and sharing through whole studies in this process, cut off at every event.

The servers are simulated ones that also say tokens and tell what they resolved to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec, patch

import pytest

from runner.canary import PROMPTS, CanaryState, GreedyOutput
from runner.clock import Clock
from runner.cluster.executor import Executor, LaunchReport, OnSight, RunningLaunch
from runner.config import dump, parse_study
from runner.engines.simulated import SimulatedServers
from runner.errors import Interrupted, ServerFailed
from runner.held_launch import HeldLaunch
from runner.insight.live import Event
from runner.launch import plan_launch
from runner.record.background import BackgroundTracker
from runner.record.canary_files import CanaryFiles
from runner.record.store import StudyStore
from runner.search.study import Search
from runner.settings import StudySettings
from runner.sharing import Sharing
from runner.trial import LaunchSpec, LoadPlan, LoadRun, Outcome, TrialResult
from runner.tune import Study, tune
from tests.search_samples import empty_database
from tests.studies import CPU

STUDY: dict[str, Any] = {
    **CPU,
    "name": "said",
    "engine": {**CPU["engine"], "args": {"pp_size": 2, "max_running_requests": 16}},
    "parameters": {
        "pp_async_batch_depth": {"choices": [0, 2]},
        "cuda_graph_max_bs": {"choices": [64, 128]},
        "fault": {"choices": ["none", "garbled-output"]},
    },
    "constraints": [
        "fault == 'none' or pp_async_batch_depth == 2",
        "fault == 'none' or cuda_graph_max_bs == 64",
    ],
    "baselines": [
        {"name": "plain", "pp_async_batch_depth": 0, "cuda_graph_max_bs": 64, "fault": "none"}
    ],
    "workload": {"prompt_tokens": 16, "output_tokens": 8, "concurrency": [1, 4]},
    "measure": {"precision": 0.2, "min_window_s": 2, "max_window_s": 8, "finalists": 1},
    "search": {"trials": 9, "seed": 0},
}
RIGHT, WRONG = GreedyOutput((5, 6), (4.0, 4.0)), GreedyOutput((5, 9), (4.0, 4.0))


class SayingServers(SimulatedServers):
    """Simulated servers that say tokens; `breaks` names the call that fails."""

    def __init__(self, settings: StudySettings, launch: LaunchSpec, breaks: str | None) -> None:
        args = {name: v for name, v in launch.server_args.items() if name != "fault"}
        super().__init__(settings, replace(launch, server_args=args))
        self._is_garbled = launch.server_args.get("fault") == "garbled-output"
        self._breaks = breaks

    @property
    def report(self) -> LaunchReport:
        return LaunchReport({}, (self.server_info(),), (), ())

    def greedy_outputs(self) -> tuple[tuple[GreedyOutput, ...], ...]:
        self._break("greedy")
        return ((WRONG if self._is_garbled else RIGHT,) * len(PROMPTS),)

    def run_load(self, plan: LoadPlan) -> LoadRun:
        self._break("drain")
        return super().run_load(plan)

    def _break(self, call: str) -> None:
        if call == self._breaks:
            raise ServerFailed(f"{call} failed, as the test wants it")


@dataclass
class SayingExecutor:
    """Runs them; `breaks` says which call of the first launch fails."""

    settings: StudySettings
    breaks: str | None = None
    calls: list[str] = field(default_factory=list)

    @contextmanager
    def launch(self, spec: LaunchSpec, folder: Path, on_sight: OnSight) -> Iterator[RunningLaunch]:
        del folder, on_sight
        self.calls.append(f"start {spec.number}")
        yield SayingServers(self.settings, spec, self.breaks if spec.number == 0 else None)
        self.calls.append(f"stop {spec.number}")

    def close(self) -> None:
        pass


@dataclass
class Watch:
    """A view that stops the session at its event number `last`."""

    last: int
    seen: int = 0

    def handle(self, event: Event) -> None:
        del event
        self.seen += 1
        if self.seen == self.last:
            raise Interrupted("as the test wants it")

    def close(self) -> None:
        pass


@dataclass
class Sessions:
    """Sessions of one study in one folder, without MLflow."""

    folder: Path
    document: dict[str, Any] = field(default_factory=lambda: STUDY)
    breaks: str | None = None
    calls: list[str] = field(default_factory=list)

    def run(self, last: int = -1) -> int:
        """One session, cut off at an event; how many events it had."""
        settings = parse_study(self.document)
        store, view = StudyStore(self.folder, settings.name), Watch(last)
        with store.lock():
            if not store.exists():
                store.create(dump(settings), {})
                (store.folder / "optuna.db").write_bytes(empty_database())
            search = Search(settings, store.optuna_url)
            executor = SayingExecutor(settings, self.breaks, self.calls)
            launches = HeldLaunch(lambda: _as_executor(executor), store, view, Clock())
            tracker = create_autospec(BackgroundTracker, instance=True)
            with closing(search), suppress(Interrupted), closing(launches):
                sharing = Sharing(settings, store)
                tune(Study(settings, store, search, tracker, launches, view, sharing))
        return view.seen

    def results(self) -> list[TrialResult]:
        """All results, launches and what they took aside."""
        store = StudyStore(self.folder, str(self.document["name"]))
        return [without_launches(result) for result in store.results()]


def without_launches(result: TrialResult) -> TrialResult:
    """A result without the numbers of launches, of which a study that was cut off needs more."""

    def neutral(words: str | None) -> str | None:
        return words and re.sub(r"launch \d+", "launch", words)

    canary = result.canary
    if canary is not None:
        canary = replace(canary, difference=neutral(canary.difference))
    reason = neutral(result.reason)
    return replace(result, launch=None, timing_s={}, reason=reason, canary=canary)


def _as_executor(executor: SayingExecutor) -> Executor:
    mock = create_autospec(Executor, instance=True)
    mock.launch, mock.close = executor.launch, executor.close
    return mock  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sessions, int]:
    sessions = Sessions(tmp_path_factory.mktemp("whole"))
    return sessions, sessions.run()


def search_trials(results: list[TrialResult]) -> list[TrialResult]:
    return [result for result in results if result.repeat_of is None]


def test_the_study_measures_each_server_once(whole: tuple[Sessions, int]) -> None:
    found = search_trials(whole[0].results())
    good = [result for result in found if result.params["fault"] == "none"]
    assert {result.outcome for result in good} == {Outcome.COMPLETE}
    by_depth = {depth: [r for r in good if r.params["pp_async_batch_depth"] == depth]
                for depth in (0, 2)}  # fmt: skip
    for first, same in by_depth.values():
        assert (first.shares, same.shares) == (None, first.number)
        assert (same.values, same.rungs) == (first.values, first.rungs)
    wrong = [result for result in found if result.params["fault"] != "none"]
    assert [result.outcome for result in wrong] == [Outcome.INVALID] * 2 + [Outcome.FAILED]
    states = [result.canary.state for result in found if result.canary is not None]
    assert states.count(CanaryState.MISMATCHED) == len(wrong)
    repeats = {result.repeat_of for result in whole[0].results()} - {None}
    assert repeats <= {first.number for first, _ in by_depth.values()}


def test_a_study_cut_off_at_any_event_ends_the_same(
    whole: tuple[Sessions, int], tmp_path: Path
) -> None:
    sessions, events = whole
    for last in range(1, events, 3):
        cut = Sessions(tmp_path / str(last))
        cut.run(last)
        cut.run()
        assert cut.results() == sessions.results(), f"cut off at event {last}"


def test_a_kill_before_outputs_became_the_reference_is_made_good(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    with patch.object(CanaryFiles, "adopt", side_effect=Interrupted("killed")):
        sessions.run()
    assert [result.outcome for result in sessions.results()] == [Outcome.COMPLETE]
    assert not (tmp_path / "studies" / "said" / "canary.json").exists()

    sessions.run()

    canaries = [result.canary for result in sessions.results()]
    assert {canary.trial for canary in canaries[1:] if canary is not None} >= {0}


def test_a_reference_that_is_gone_is_made_again_before_anything_is_compared(
    tmp_path: Path,
) -> None:
    sessions = Sessions(tmp_path)
    sessions.run(12)
    reference = tmp_path / "studies" / "said" / "canary.json"
    kept = reference.read_bytes()
    reference.unlink()
    sessions.run()
    assert reference.read_bytes() == kept


@pytest.mark.parametrize("breaks", ["greedy", "drain"])
def test_a_launch_that_cannot_be_asked_or_drained_is_given_up(tmp_path: Path, breaks: str) -> None:
    one = {**STUDY, "search": {"trials": 1, "seed": 0}, "measure": {**STUDY["measure"],
           "finalists": 0, "repeats": 1}}  # fmt: skip
    sessions = Sessions(tmp_path, one, breaks)
    sessions.run()

    first, again = search_trials(sessions.results())[:2]
    assert (first.outcome, first.reason) == (
        Outcome.FAILED,
        f"{breaks} failed, as the test wants it",
    )
    assert (again.outcome, again.retry_of) == (Outcome.COMPLETE, first.number)
    assert sessions.calls[:3] == ["start 0", "stop 0", "start 1"]


def test_a_launch_known_from_an_earlier_session_is_not_needed(
    whole: tuple[Sessions, int],
) -> None:
    sessions, _ = whole
    settings = parse_study(STUDY)
    store = StudyStore(sessions.folder, settings.name)
    sharing = Sharing(settings, store)
    first, same = (r for r in store.results() if r.params["pp_async_batch_depth"] == 0
                   and r.repeat_of is None)  # fmt: skip
    plan = plan_launch(settings, same.params)
    assert sharing.identity(plan, same.lengths) is None
    sharing.note_all()
    identity = sharing.identity(plan, same.lengths)
    assert identity == first.identity
    original = sharing.original(identity)
    assert original is not None
    assert original.number == first.number
