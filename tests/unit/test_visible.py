"""CUDA_VISIBLE_DEVICES, resolved to the GPUs that a study may use, or refused in words."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runner.clock import Clock
from runner.cluster.placement import assign_gpus, study_gpus
from runner.cluster.replica import LaunchPlace, replica_spec
from runner.engines.program import program_for
from runner.errors import ConfigError, Infeasible, StudyError
from runner.measure.power import GpuIdentity, GpuKind, NvmlSensor
from runner.measure.visible import named_gpu, usable_gpus, visible_devices
from runner.settings import EngineSettings, StudySettings
from runner.trial import EngineKind, LaunchSpec
from tests.fake_nvml import FakeGpu, FakeNvml
from tests.samples import make_settings
from tests.server_flags import real_environment

UUIDS = tuple(f"GPU-{letter}0000000-0000-0000-0000-00000000000{n}" for n, letter in
              enumerate("abcdefab"))  # fmt: skip
EIGHT = tuple(
    GpuIdentity(index, uuid, "NVIDIA H200", 141 << 30, 700.0, f"00000000:{index:02X}:00.0")
    for index, uuid in enumerate(UUIDS)
)
CUT = replace(EIGHT[0], kind=GpuKind.PARTITIONED)
SLICES = tuple(
    replace(EIGHT[0], uuid=f"MIG-{n}111", power_limit_w=None, kind=GpuKind.SLICE) for n in (1, 2)
)
PIECES = (CUT, *SLICES, *EIGHT[1:])


def indices(value: str | None, order: str | None = None) -> list[int]:
    environment = {"CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": order}
    given = {name: each for name, each in environment.items() if each is not None}
    return [gpu.index for gpu in usable_gpus(EIGHT, given)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, list(range(8))),
        ("6,2", [6, 2]),
        (" 6, 2 ", [6, 2]),
        (UUIDS[3], [3]),
        (UUIDS[3][:6], [3]),
        (f"{UUIDS[3]},1", [3, 1]),
        ("4,5,-1,6", [4, 5]),
    ],
)
def test_what_is_named_is_used_in_that_order(value: str | None, expected: list[int]) -> None:
    assert indices(value) == expected


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "hides every GPU; unset it, or name the GPUs"),
        ("-1", "hides every GPU"),
        ("NoDevFiles", "hides every GPU"),
        ("0,0", r"names GPU 0 \(GPU-a.*\) twice"),
        (f"1,{UUIDS[1]}", "names GPU 1 .* twice"),
        ("8", "there is no GPU '8' here; expected a number from 0 to 7 or a UUID"),
        ("0,x", "there is no GPU 'x' here"),
        ("0,,1", "there is no GPU '' here"),
        ("0;1", "there is no GPU '0;1' here"),
        ("-2", "there is no GPU '-2' here"),
        ("GPU-9999", "there is no GPU 'GPU-9999' here"),
        ("MIG-9999", "there is no GPU 'MIG-9999' here"),
        ("GPU-a", f"'GPU-a' names {UUIDS[0]}, {UUIDS[6]}; write more"),
    ],
)
def test_what_cannot_be_used_is_refused(value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        indices(value)


def test_numbers_mean_the_bus_order_only_where_cuda_counts_so() -> None:
    mixed = (*EIGHT[:7], replace(EIGHT[7], name="NVIDIA L4"))
    fastest = {"CUDA_VISIBLE_DEVICES": "6,2", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    for environment in (fastest, {"CUDA_VISIBLE_DEVICES": "6,2"}):
        with pytest.raises(ConfigError, match="set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name them by"):
            usable_gpus(mixed, environment)
    by_bus = {**fastest, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert [gpu.index for gpu in usable_gpus(mixed, by_bus)] == [6, 2]
    by_uuid = {**fastest, "CUDA_VISIBLE_DEVICES": UUIDS[7]}
    assert [gpu.index for gpu in usable_gpus(mixed, by_uuid)] == [7]
    assert indices("6,2", "FASTEST_FIRST") == [6, 2]  # equal GPUs: CUDA counts along the bus


def test_a_slice_is_named_by_its_uuid() -> None:
    (piece,) = usable_gpus(PIECES, {"CUDA_VISIBLE_DEVICES": "MIG-2111"})
    assert piece == SLICES[1]
    assert visible_devices((piece,)) == "MIG-2111"
    with pytest.raises(ConfigError, match="GPU 0 is cut into slices"):
        usable_gpus(PIECES, {"CUDA_VISIBLE_DEVICES": "0"})
    assert [gpu.index for gpu in usable_gpus(PIECES, {})] == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(ConfigError, match="every GPU here is cut into slices"):
        usable_gpus(PIECES[:3], {})


def test_no_gpus_at_all_are_for_the_study_to_miss() -> None:
    assert usable_gpus((), {"CUDA_VISIBLE_DEVICES": "0"}) == ()


def study(**changes: object) -> StudySettings:
    engine = EngineSettings(EngineKind.SGLANG, None, 1.0, "/m", None, {}, {})
    return make_settings(engine=replace(engine, **changes))  # type: ignore[arg-type]


def test_the_study_files_own_environment_counts() -> None:
    settings = study(env={"CUDA_VISIBLE_DEVICES": "5"})
    assert study_gpus(settings, EIGHT, {"CUDA_VISIBLE_DEVICES": "1"}) == (EIGHT[5],)


def test_emulated_gpus_do_not_care_for_the_environment() -> None:
    settings = study(kind=EngineKind.EMULATED, profile="cpu-blocking-pp2")
    assert study_gpus(settings, EIGHT, {"CUDA_VISIBLE_DEVICES": ""}) == EIGHT


def test_servers_get_the_named_gpus_and_their_power_is_theirs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvml = FakeNvml(
        [FakeGpu(gpu.uuid, power_mw=1000 * (100 + gpu.index)) for gpu in EIGHT],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    sensor = NvmlSensor(Clock())
    gpus = study_gpus(study(), sensor.gpus(), {"CUDA_VISIBLE_DEVICES": f"6,2,{UUIDS[7]}"})
    place = LaunchPlace(
        program_for(study(), tmp_path, real_environment("0.5.23")), tmp_path, tmp_path
    )
    launch = LaunchSpec(0, "key", {}, 3, 1)
    placed = assign_gpus(launch, gpus)
    specs = [replica_spec(launch, index, each, place) for index, each in enumerate(placed)]
    assert [spec.visible_devices for spec in specs] == ["6", "2", "7"]
    assert [spec.gpu_indices for spec in specs] == [(6,), (2,), (7,)]
    watts = [sensor.read(gpu.uuid).power_w for each in placed for gpu in each]
    assert watts == [106.0, 102.0, 107.0]


def test_a_server_cannot_run_on_two_slices(tmp_path: Path) -> None:
    place = LaunchPlace(
        program_for(study(), tmp_path, real_environment("0.5.23")), tmp_path, tmp_path
    )
    launch = LaunchSpec(0, "key", {}, 1, 2)
    with pytest.raises(Infeasible, match="a server of 2 GPUs cannot run on slices"):
        replica_spec(launch, 0, SLICES, place)


def test_rays_own_names_are_entries_of_the_variable() -> None:
    names = ("6", UUIDS[2], "MIG-1111")
    assert [named_gpu(name, PIECES).uuid for name in names] == [UUIDS[6], UUIDS[2], "MIG-1111"]


def test_ray_is_shown_the_gpus_of_the_study_by_our_own_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from runner.cluster.ray_executor import show_gpus

    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu(uuid) for uuid in UUIDS]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"6,{UUIDS[2]},5,-1")
    settings = study()
    two = replace(settings, hardware=replace(settings.hardware, gpus=2))
    show_gpus(two, tmp_path)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,2"
    with pytest.raises(StudyError, match="asks for 8 GPUs, 2 found here with CUDA_VISIBLE_DEV"):
        show_gpus(settings, tmp_path)
    show_gpus(study(kind=EngineKind.EMULATED, profile="cpu-blocking-pp2"), tmp_path)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
