"""The GPUs of a session: read once each, told when a study moved, refused when of another model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from runner.cluster.executor import Executor
from runner.errors import ConfigError
from runner.insight.live import Event, Note
from runner.measure.idle import IdleGpu
from runner.measure.power import GpuIdentity
from runner.record.store import StudyStore
from runner.session_gpus import know_gpus
from runner.settings import StudySettings
from runner.trial import GpuEnergy, PowerSample, RungRecord, TrialResult
from tests.samples import make_result, make_settings

GIB = 1 << 30


def gpu(name: str, model: str = "H200", gib: int | None = 140, limit_w: float = 700.0) -> IdleGpu:
    memory = None if gib is None else gib * GIB
    return IdleGpu(0, f"GPU-{name}", model, 78.0, limit_w, (), None, memory)


A, B, C, D = (gpu(name) for name in "abcd")


@dataclass
class Machine:
    """An executor's GPUs, and a view that keeps what it is told."""

    has: tuple[IdleGpu, ...]
    read: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def gpus(self) -> tuple[GpuIdentity, ...]:
        return tuple(
            GpuIdentity(0, each.uuid, each.name, each.memory_bytes or 0, each.power_limit_w)
            for each in self.has
        )

    def idle_gpus(self, gpus: tuple[GpuIdentity, ...]) -> tuple[IdleGpu, ...]:
        uuids = [each.uuid for each in gpus]
        self.read += uuids
        return tuple(each for each in self.has if each.uuid in uuids)

    def handle(self, event: Event) -> None:
        assert isinstance(event, Note)
        self.notes.append(event.text)

    def close(self) -> None:
        pass


def on(number: int, *gpus: IdleGpu) -> TrialResult:
    """A complete trial that was measured on these GPUs."""
    result = make_result(number, 300.0)
    energies = tuple(GpuEnergy(each.uuid, 4000.0, 200.0, 0.9, 1, False) for each in gpus)
    return replace(result, rungs=tuple(replace(rung, gpus=energies) for rung in result.rungs))


def wanting(gpus: int, finalists: int = 3) -> StudySettings:
    plain = make_settings()
    return replace(
        plain,
        hardware=replace(plain.hardware, gpus=gpus),
        measure=replace(plain.measure, finalists=finalists),
    )


def session(
    store: StudyStore, *gpus: IdleGpu, wanted: int | None = None, finalists: int = 3
) -> tuple[Machine, list[str]]:
    """One session on these GPUs: its machine, and the names of the GPUs it says are its own."""
    machine = Machine(gpus)
    settings = wanting(wanted or len(gpus), finalists)
    own = know_gpus(cast("Executor", machine), settings, store, machine)
    return machine, [each.uuid for each in own]


def kept(store: StudyStore) -> list[tuple[str, int]]:
    return [(each.uuid, each.reading) for each in store.read_idle() or ()]


@pytest.fixture
def store(tmp_path: Path) -> StudyStore:
    return StudyStore(tmp_path, "demo")


def test_gpus_are_read_once(store: StudyStore) -> None:
    first, own = session(store, A, B)
    store.write_result(on(0, A, B))
    again, still = session(store, A, B)
    assert (first.read, again.read) == (["GPU-a", "GPU-b"], [])
    assert own == still == ["GPU-a", "GPU-b"]
    assert first.notes + again.notes == []


def test_other_gpus_are_read_too_and_those_of_earlier_trials_stay(store: StudyStore) -> None:
    session(store, A, B)
    store.write_result(on(0, A, B))
    machine, own = session(store, C, D)
    assert machine.read == own == ["GPU-c", "GPU-d"]
    assert kept(store) == [("GPU-a", 0), ("GPU-b", 0), ("GPU-c", 1), ("GPU-d", 1)]
    (note,) = machine.notes
    assert note == (
        "this study continues on GPUs that none of its trials ran on: GPU-c and 1 other (H200); "
        "before: GPU-a and 1 other. Values of different cards of one model differ by a few "
        "percent, so let the finalists' re-measurement decide"
    )
    store.write_result(on(1, C, D))
    for back in ((A, B), (C, D)):
        assert session(store, *back)[0] == Machine(back)  # nothing read, nothing said


def test_trials_on_gpus_that_nobody_knows_any_more_are_told(store: StudyStore) -> None:
    session(store, A, B)
    store.write_result(on(0, A, B))
    (store.machine_folder / "idle.json").unlink()
    machine, _ = session(store, C)
    assert "ran on GPU-a and 1 more, which machine/idle.json does not know" in machine.notes[0]
    (store.machine_folder / "idle.json").unlink()
    assert session(store, A, B)[0].notes == []  # they are here, and read again


def test_a_card_that_was_replaced_is_told_alone(store: StudyStore) -> None:
    session(store, A, B)
    store.write_result(on(0, A, B))
    machine, own = session(store, A, C)
    assert (machine.read, own) == (["GPU-c"], ["GPU-a", "GPU-c"])
    assert "none of its trials ran on: GPU-c (H200); before: GPU-a and 1 other." in machine.notes[0]


def test_a_session_that_measured_nothing_there_is_told_again(store: StudyStore) -> None:
    session(store, A)
    store.write_result(on(0, A))
    for _ in range(2):
        assert len(session(store, B)[0].notes) == 1


def test_a_study_that_measured_nothing_is_at_home_anywhere(store: StudyStore) -> None:
    session(store, A)
    machine, _ = session(store, gpu("x", "RTX PRO 6000"))
    assert machine.notes == []
    assert [uuid for uuid, _ in kept(store)] == ["GPU-x"]


def test_launches_smaller_than_the_machine_move_nothing(store: StudyStore) -> None:
    session(store, A, B, C, wanted=1)
    store.write_result(on(0, B))
    machine, _ = session(store, A, B, C, wanted=1)
    assert machine == Machine((A, B, C))
    # One more in a cluster's node, while the GPUs that the study knows are enough.
    assert session(store, A, B, C, D, wanted=3)[0].notes == []


def test_a_study_that_comes_back_finds_its_machine_as_it_was(store: StudyStore) -> None:
    session(store, A, B)
    store.write_result(on(0, A))
    session(store, C, D)
    store.write_result(on(1, C))
    assert session(store, A, B)[0] == Machine((A, B))
    assert kept(store) == [("GPU-a", 0), ("GPU-b", 0), ("GPU-c", 1), ("GPU-d", 1)]


def test_what_a_trial_in_progress_was_measured_on_counts(store: StudyStore) -> None:
    session(store, A)
    sample = PowerSample(1.0, A.uuid, 200.0, 1.0, 0.9, 1, 1900.0, False)
    store.write_rung(0, RungRecord(0, 1, (), (sample,)))
    machine, _ = session(store, B)
    assert len(machine.notes) == 1
    assert kept(store) == [("GPU-a", 0), ("GPU-b", 1)]


def test_another_power_limit_and_no_finalists_are_said(store: StudyStore) -> None:
    session(store, A)
    store.write_result(on(0, A))
    machine, _ = session(store, gpu("b", limit_w=500.0), finalists=0)
    (note,) = machine.notes
    assert "before: GPU-a; power limit 700 W before, 500 W now." in note
    assert note.endswith(
        "a few percent, and with measure.finalists: 0 no setting is measured again to tell"
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (gpu("x", "H100"), "ran on H200 (140 GiB) (GPU-a), here it would run on H100 (140 GiB)"),
        (gpu("x", gib=70), "ran on H200 (140 GiB) (GPU-a), here it would run on H200 (70 GiB)"),
    ],
)
def test_another_model_is_refused_and_nothing_changes(
    store: StudyStore, other: IdleGpu, said: str
) -> None:
    session(store, A)
    store.write_result(on(0, A))
    with pytest.raises(ConfigError) as refused:
        session(store, other)
    assert said in str(refused.value)
    assert "start a study under another name here; what it measured is kept" in str(refused.value)
    assert kept(store) == [("GPU-a", 0)]
    assert session(store, A)[0].notes == []


@pytest.mark.parametrize("gib", [None, 142])
def test_a_little_more_memory_or_none_told_is_the_same_model(
    store: StudyStore, gib: int | None
) -> None:
    session(store, A)
    store.write_result(on(0, A))
    assert len(session(store, gpu("b", gib=gib))[0].notes) == 1


def test_trials_that_never_ran_are_of_that_model_too(store: StudyStore) -> None:
    session(store, A)
    store.write_result(make_result(0, None))
    with pytest.raises(ConfigError, match="ran on H200"):
        session(store, gpu("x", "H100"))
