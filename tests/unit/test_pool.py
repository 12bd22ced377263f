"""Which GPUs a launch gets: strangers are refused, dirty GPUs left out, late memory awaited."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from runner.clock import Clock
from runner.cluster.pool import MEMORY_DEADLINE_S, GpuPool
from runner.errors import Interrupted, StudyError
from runner.measure.power import GpuIdentity
from runner.measure.use import GpuHolder, GpuUse

GIB = 1 << 30
GPUS = tuple(GpuIdentity(n, f"GPU-{n}", "H200", 141 * GIB, 700.0) for n in range(4))
TRAINER = GpuHolder(41, "python train.py", 30 * GIB)
WHY = "the memory of a server was not given back"


class Machine:
    """Four GPUs; `used` and `holders` by index, `frees` are emptied at the look of that number."""

    def __init__(self) -> None:
        self.used: dict[int, int | None] = {}
        self.holders: dict[int, GpuHolder] = {}
        self.frees: Mapping[int, int] = {}
        self.looks = 0
        self.notes: list[str] = []
        self.stop = threading.Event()

    def look(self, gpus: tuple[GpuIdentity, ...]) -> tuple[GpuUse, ...]:
        self.looks += 1
        if self.looks in self.frees:
            self.used.pop(self.frees[self.looks])
        return tuple(
            GpuUse(
                gpu,
                self.used.get(gpu.index, 600 << 20),
                (self.holders[gpu.index],) if gpu.index in self.holders else (),
            )
            for gpu in gpus
        )

    def pool(self, wanted: int) -> GpuPool:
        return GpuPool(GPUS, wanted, self.look, Clock(1000.0), self.stop)

    def take(self, pool: GpuPool) -> list[int]:
        return [gpu.index for gpu in pool.take(self.notes.append)]


def test_free_gpus_are_taken_in_order() -> None:
    machine = Machine()
    assert machine.take(machine.pool(2)) == [0, 1]
    assert machine.notes == []


@pytest.mark.parametrize("used", [None, 1 << 30, int(1.4 * GIB)])
def test_a_little_memory_is_nobodys_business(used: int | None) -> None:
    machine = Machine()
    machine.used, machine.holders = {0: used}, {0: TRAINER}
    assert machine.take(machine.pool(1)) == [0]


def test_somebody_elses_process_is_refused_at_once_with_what_to_do() -> None:
    machine = Machine()
    machine.used, machine.holders = {1: 30 * GIB}, {1: TRAINER}
    with pytest.raises(StudyError) as error:
        machine.take(machine.pool(2))
    assert machine.looks == 1
    assert str(error.value) == (
        "the study needs 2 free GPUs, and of its own are in use:\n"
        "  GPU 1 (GPU-1): 30.0 GiB in use, by process 41 (python train.py) with 30.0 GiB\n"
        "end what uses them (or wait for it), then run the same command again; or use GPUs that "
        "are free: CUDA_VISIBLE_DEVICES=0,2"
    )


def test_no_other_gpus_are_offered_where_there_are_too_few() -> None:
    machine = Machine()
    machine.used, machine.holders = {1: 30 * GIB}, {1: TRAINER}
    with pytest.raises(StudyError, match=r"run the same command again$"):
        machine.take(machine.pool(4))


def test_gpus_that_the_study_does_not_use_may_be_anybodys() -> None:
    machine = Machine()
    machine.used, machine.holders = {2: 30 * GIB}, {2: TRAINER}
    assert machine.take(machine.pool(2)) == [0, 1]


def test_memory_of_a_process_that_is_gone_is_awaited() -> None:
    machine = Machine()
    machine.used, machine.frees = {0: 100 * GIB}, {4: 0}
    assert machine.take(machine.pool(1)) == [0]
    assert machine.looks == 4


def test_memory_whose_owner_cannot_be_seen_is_refused_in_the_end() -> None:
    machine = Machine()
    machine.used = {0: 100 * GIB}
    with pytest.raises(StudyError, match=r"100\.0 GiB in use, by no process that can be seen from"):
        machine.take(machine.pool(1))
    assert machine.looks > 2


def test_waiting_ends_with_an_interruption() -> None:
    machine = Machine()
    machine.used = {0: 100 * GIB}
    machine.stop.set()
    with pytest.raises(Interrupted):
        machine.take(machine.pool(1))


def test_a_gpu_in_quarantine_is_replaced_until_its_memory_is_back() -> None:
    machine = Machine()
    pool = machine.pool(2)
    machine.used = {0: 100 * GIB}
    pool.quarantine({"GPU-0": WHY})
    assert machine.take(pool) == [1, 2]
    assert machine.notes == [f"GPU 0 is in quarantine: {WHY}"]
    assert [gpu.index for gpu in pool.gpus] == [1, 2]
    machine.used = {}
    assert machine.take(pool) == [0, 1]
    assert machine.notes[1:] == ["GPU 0 is out of quarantine: its memory is back"]


def test_a_spare_that_is_in_use_is_passed_over() -> None:
    machine = Machine()
    pool = machine.pool(2)
    machine.used, machine.holders = {0: 100 * GIB, 2: 30 * GIB}, {2: TRAINER}
    pool.quarantine({"GPU-0": WHY})
    assert machine.take(pool) == [1, 3]


def test_quarantine_without_a_spare_names_the_gpu_and_why() -> None:
    machine = Machine()
    pool = machine.pool(4)
    machine.used = {3: 100 * GIB}
    pool.quarantine({"GPU-3": WHY})
    with pytest.raises(StudyError, match=f"GPU 3 .*100.0 GiB in use, .*; in quarantine: {WHY}"):
        machine.take(pool)
    machine.frees = {machine.looks + 2: 3}
    assert machine.take(pool) == [0, 1, 2, 3]


def test_gpus_that_somebody_else_chose_are_not_replaced() -> None:
    machine = Machine()
    pool = machine.pool(2)
    machine.used, machine.holders = {0: 100 * GIB}, {0: TRAINER}
    pool.quarantine({"GPU-0": WHY})
    pool.require(GPUS[1:3], machine.notes.append)
    with pytest.raises(StudyError, match="GPU 0 "):
        pool.require(GPUS[:2], machine.notes.append)
    assert MEMORY_DEADLINE_S > 8.0
