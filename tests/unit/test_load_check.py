from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from runner.cluster.executor import OnSight, RunningLaunch
from runner.engines.sglang.environment import ServerEnvironment
from runner.errors import LoadFailed
from runner.insight.live import Event, Note
from runner.load.self_check import LoadCheck
from runner.load_check import BOOT_ID, FILE, check_load
from runner.measure.idle import IdleGpu
from runner.measure.power import GpuIdentity
from runner.record.files import read_json, write_json
from runner.record.store import StudyStore
from runner.trial import LaunchSpec
from tests.studies import CPU, DEMO, study

GOOD = LoadCheck(
    streams=4, tokens_per_s=199.0, cpu_us=10.0, cpu_share=0.02, max_lag_s=0.001, server_late_s=0.001
)
SETTINGS = study(CPU)


class Machine:
    """An executor of which nothing but its generators is asked; and the view."""

    def __init__(self, *checks: LoadCheck, error: LoadFailed | None = None) -> None:
        self._checks = checks
        self._error = error
        self.asked: list[int] = []
        self.notes: list[str] = []

    def check_load(self, streams: int) -> tuple[LoadCheck, ...]:
        self.asked.append(streams)
        if self._error is not None:
            raise self._error
        return self._checks

    def handle(self, event: Event) -> None:
        assert isinstance(event, Note)
        self.notes.append(event.text)

    def launch(
        self, spec: LaunchSpec, folder: Path, on_sight: OnSight
    ) -> AbstractContextManager[RunningLaunch]:
        raise NotImplementedError

    def server_environment(self) -> ServerEnvironment | None:
        raise AssertionError

    def check_gpus(self) -> None:
        raise NotImplementedError

    def gpus(self) -> tuple[GpuIdentity, ...]:
        raise NotImplementedError

    def idle_gpus(self, gpus: tuple[GpuIdentity, ...]) -> tuple[IdleGpu, ...]:
        raise NotImplementedError

    def interrupt(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


@pytest.fixture
def store(tmp_path: Path) -> StudyStore:
    return StudyStore(tmp_path, "tiny")


def test_a_generator_that_keeps_up_is_told_in_one_line_and_kept(store: StudyStore) -> None:
    machine = Machine(GOOD)
    check_load(machine, SETTINGS, store, machine)
    assert machine.asked == [4]  # the highest rung
    (note,) = machine.notes
    assert note == (
        "load generator: 4 streams of a token per 20 ms need 2% of a core (10 us per token); "
        "it can serve at least about 1800 such streams"
    )
    kept = read_json(store.machine_folder / FILE, "")
    assert (kept["streams"], kept["passed"], kept["problems"]) == (4, True, [])
    assert kept["generators"] == [
        {
            "streams": 4,
            "tokens_per_s": 199.0,
            "cpu_us": 10.0,
            "cpu_share": 0.02,
            "max_lag_s": 0.001,
            "server_late_s": 0.001,
        }
    ]


def test_it_is_not_tried_again_until_the_machine_starts_anew(store: StudyStore) -> None:
    machine = Machine(GOOD)
    check_load(machine, SETTINGS, store, machine)
    check_load(machine, SETTINGS, store, machine)
    assert machine.asked == [4]
    path = store.machine_folder / FILE
    kept = read_json(path, "")
    assert kept["boot"] == BOOT_ID.read_text().strip()
    for changed in ({"boot": "another"}, {"streams": 3}, {"passed": False}):
        write_json(path, {**kept, **changed})
        check_load(machine, SETTINGS, store, machine)
    path.write_text("{")
    check_load(machine, SETTINGS, store, machine)
    assert machine.asked == [4] * 5


@pytest.mark.parametrize(
    ("check", "problem"),
    [
        (replace(GOOD, cpu_share=0.95), "it used 95% of a core (at most 90%)"),
        (replace(GOOD, max_lag_s=0.08), "it ran 80 ms late (at most 50 ms)"),
        (replace(GOOD, server_late_s=0.03), "the server it was tried against ran 30 ms late"),
        (replace(GOOD, tokens_per_s=150.0), "it read 150 of 200 tokens/s"),
    ],
)
def test_a_generator_that_cannot_keep_up_is_a_warning(
    check: LoadCheck, problem: str, store: StudyStore
) -> None:
    machine = Machine(GOOD, check)
    check_load(machine, SETTINGS, store, machine)
    (note,) = machine.notes
    assert note == (
        "warning: the load generator did not keep up with 4 streams of a token per 20 ms on this "
        f"machine: {problem}; leave it more CPU time or lower workload.concurrency: rungs that it "
        "limits are judged invalid"
    )
    assert read_json(store.machine_folder / FILE, "")["passed"] is False


def test_several_generators_add_up(store: StudyStore) -> None:
    machine = Machine(GOOD, replace(GOOD, cpu_us=20.0, cpu_share=0.3))
    check_load(machine, SETTINGS, store, machine)
    (note,) = machine.notes
    assert note == (
        "load generator: 4 streams of a token per 20 ms need 30% of a core by each of 2 generators "
        "(20 us per token); it can serve at least about 2700 such streams"
    )


def test_a_check_that_fails_stops_nothing(store: StudyStore) -> None:
    machine = Machine(error=LoadFailed("the null server did not start"))
    check_load(machine, SETTINGS, store, machine)
    (note,) = machine.notes
    assert note == ("warning: the load generator could not be tried: the null server did not start")
    assert not (store.machine_folder / FILE).exists()


def test_a_simulated_study_has_no_generator_to_try(store: StudyStore) -> None:
    machine = Machine(GOOD)
    check_load(machine, study(DEMO), store, machine)
    assert machine.asked == []
    assert machine.notes == []
