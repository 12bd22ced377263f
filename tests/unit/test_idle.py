"""What the GPUs of a study draw before it begins, and studies that ask for power there is not."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from runner.clock import Clock
from runner.cluster.executor import Executor
from runner.cluster.inline import InlineExecutor
from runner.engines.emulator.gpu import EmulatedGpus, create_machine, plant_power_offset
from runner.errors import ClusterLost, StudyError
from runner.insight.terminal import view_for
from runner.machine.profile import load_profile
from runner.measure.idle import IdleGpu, read_idle, require_power
from runner.measure.power import GpuIdentity, NvmlSensor
from runner.record.store import StudyStore
from runner.session import SessionRequest, open_machine
from runner.settings import StudySettings
from runner.trial import EngineKind, GpuEnergy, TrialResult
from tests.fake_nvml import FakeGpu, FakeNvml
from tests.fake_python import FakePython
from tests.samples import make_result, make_settings
from tests.server_flags import help_text, real_environment
from tests.studies import CPU, study

FAST = Clock(100.0)
SEES = IdleGpu(0, "GPU-a", "H200", 78.7, 700.0)
BLIND = replace(SEES, index=1, uuid="MIG-b", power_w=None, power_limit_w=None)


def test_idle_power_of_nvidias_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [FakeGpu("GPU-a", power_mw=78_700), FakeGpu("GPU-b", slices=[FakeGpu("MIG-b")])]
    gpus[0].processes = [SimpleNamespace(pid=41, usedGpuMemory=None)]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpus))
    sensor = NvmlSensor(FAST)
    first, _, piece = sensor.gpus()
    taken = read_idle(sensor, (first, piece), FAST)
    # The fake's counter stands still, so its power counts.
    assert [gpu.power_w for gpu in taken] == [pytest.approx(78.7), None]
    assert [gpu.power_limit_w for gpu in taken] == [600.0, None]
    assert [gpu.pids for gpu in taken] == [(41,), ()]


def test_a_gpu_that_is_lost_while_its_idle_power_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [FakeGpu("GPU-a")]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpus))
    sensor = NvmlSensor(FAST)
    found = sensor.gpus()
    gpus[0].is_lost = True
    with pytest.raises(ClusterLost, match="GPU is lost"):
        read_idle(sensor, found, FAST)


def test_idle_power_of_emulated_gpus(tmp_path: Path) -> None:
    profile = load_profile("cpu-blocking-pp2")
    create_machine(tmp_path, profile)
    plant_power_offset(tmp_path, 1, 50.0)
    sensor = EmulatedGpus(tmp_path, FAST)
    idle_w = profile.gpu.idle_w
    taken = read_idle(sensor, sensor.gpus(), FAST)
    assert [gpu.power_w for gpu in taken[:2]] == pytest.approx([idle_w, idle_w + 50.0])
    assert {gpu.power_limit_w for gpu in taken} == {profile.gpu.power_limit_w}


def test_idle_power_of_simulated_gpus_is_the_profiles(tmp_path: Path) -> None:
    settings = study(CPU, engine={"kind": "simulated", "profile": "cpu-blocking-pp2"})
    executor = InlineExecutor(settings, tmp_path, tmp_path)
    taken = executor.idle_gpus(executor.gpus())
    assert len(taken) == settings.hardware.gpus
    assert {gpu.power_w for gpu in taken} == {load_profile("cpu-blocking-pp2").gpu.idle_w}


def test_it_is_kept_with_the_study(tmp_path: Path) -> None:
    store = StudyStore(tmp_path, "demo")
    assert store.read_idle() is None
    store.write_idle([SEES, BLIND])
    assert StudyStore(tmp_path, "demo").read_idle() == (SEES, BLIND)


@pytest.mark.parametrize(
    "metric", ["power_w", "energy_j", "tokens_per_joule", "joules_per_request"]
)
def test_an_objective_on_power_that_is_not_told_is_refused(metric: str) -> None:
    objective = replace(make_settings().objectives[0], metric=metric)
    settings = make_settings(objectives=(objective,))
    require_power(settings, [SEES])
    said = rf"objective {metric} needs the power .* 1 of 2 is unavailable \(GPU 1, MIG-b;"
    with pytest.raises(StudyError, match=said):
        require_power(settings, [SEES, BLIND])


def test_a_budget_of_energy_needs_it_too() -> None:
    plain = make_settings()
    require_power(plain, [BLIND])
    settings = make_settings(search=replace(plain.search, energy_j=1e6))
    with pytest.raises(StudyError, match=r"search\.energy_j needs the power"):
        require_power(settings, [BLIND])


def test_the_inline_executor_uses_only_what_is_visible(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvml = FakeNvml([FakeGpu(f"GPU-{number}") for number in range(4)])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    settings = make_settings()
    python = FakePython(tmp_path / "env")
    python.install("0.5.23", help_text(real_environment("0.5.23")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    engine = replace(
        settings.engine, kind=EngineKind.SGLANG, model="/m", time_scale=100.0, python=python.path
    )
    hardware = replace(settings.hardware, gpus=1)
    one = replace(settings, engine=engine, hardware=hardware)
    assert [gpu.uuid for gpu in InlineExecutor(one, tmp_path, tmp_path).gpus()] == ["GPU-3"]
    two = replace(one, hardware=replace(hardware, gpus=2))
    with pytest.raises(StudyError, match="2 GPUs, 1 found here with CUDA_VISIBLE_DEVICES=3;"):
        InlineExecutor(two, tmp_path, tmp_path)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


class FakeExecutor:
    """Its machine's GPUs; notes how often they are read, and whether it was closed."""

    def __init__(self, gpus: tuple[IdleGpu, ...]) -> None:
        self.found = gpus
        self.reads = 0
        self.refusal: StudyError | None = None
        self.is_closed = False

    def server_environment(self) -> None:
        """Its servers have no flags."""

    def check_gpus(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def gpus(self) -> tuple[GpuIdentity, ...]:
        return tuple(GpuIdentity(g.index, g.uuid, g.name, 0, g.power_limit_w) for g in self.found)

    def idle_gpus(self, gpus: tuple[GpuIdentity, ...]) -> tuple[IdleGpu, ...]:
        self.reads += 1
        wanted = {gpu.uuid for gpu in gpus}
        return tuple(gpu for gpu in self.found if gpu.uuid in wanted)

    def close(self) -> None:
        self.is_closed = True


def open_on(executor: FakeExecutor, store: StudyStore, settings: StudySettings) -> object:
    def opened(*_: object) -> Executor:
        return cast("Executor", executor)

    request = SessionRequest(settings, store.folder, opened, "", "", False)
    return open_machine(request, store, view_for(sys.stderr))


def test_a_study_reads_its_idle_power_once(tmp_path: Path) -> None:
    store, executor = StudyStore(tmp_path, "demo"), FakeExecutor((SEES, BLIND))
    for _ in range(3):
        assert open_on(executor, store, make_settings()) is executor
    assert executor.reads == 1
    assert not executor.is_closed
    store.start_anew()
    open_on(executor, store, make_settings())
    assert executor.reads == 2


def test_a_study_on_power_that_is_not_told_ends_before_its_first_launch(tmp_path: Path) -> None:
    store, executor = StudyStore(tmp_path, "demo"), FakeExecutor((SEES, BLIND))
    objective = replace(make_settings().objectives[0], metric="tokens_per_joule")
    with pytest.raises(StudyError, match="is unavailable"):
        open_on(executor, store, make_settings(objectives=(objective,)))
    assert executor.is_closed


def test_a_study_on_power_asks_the_gpus_of_this_session_only(tmp_path: Path) -> None:
    store, executor = StudyStore(tmp_path, "demo"), FakeExecutor((BLIND,))
    open_on(executor, store, make_settings())
    store.write_result(on_gpu(BLIND.uuid))
    objective = replace(make_settings().objectives[0], metric="tokens_per_joule")
    asking = make_settings(objectives=(objective,))
    executor.found = (SEES,)
    assert open_on(executor, store, asking) is executor
    assert store.read_idle() == (BLIND, replace(SEES, reading=1))
    executor.found = (BLIND,)
    with pytest.raises(StudyError, match="of 1 of 1 is unavailable"):
        open_on(executor, store, asking)


def on_gpu(uuid: str) -> TrialResult:
    result = make_result(0, 300.0)
    energies = (GpuEnergy(uuid, None, None, None, None, None),)
    return replace(result, rungs=tuple(replace(rung, gpus=energies) for rung in result.rungs))


def test_gpus_that_others_use_end_it_before_their_idle_power_is_believed(tmp_path: Path) -> None:
    store, executor = StudyStore(tmp_path, "demo"), FakeExecutor((SEES,))
    executor.refusal = StudyError("process 41 uses GPU 0")
    with pytest.raises(StudyError, match="process 41 uses GPU 0"):
        open_on(executor, store, make_settings())
    assert executor.reads == 0
    assert store.read_idle() is None
    assert executor.is_closed
