"""Hardware profiles: the shipped ones load, and every mistake names its place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.errors import ConfigError
from runner.machine.profile import FOLDER, load_profile, parse_profile, profile_names


def document() -> dict[str, Any]:
    text = (FOLDER / "cpu-blocking-pp2.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def test_the_shipped_profiles() -> None:
    assert profile_names() == (
        "cpu-blocking-pp2",
        "h200-llama-3.1-8b",
        "h200-qwen3-30b-a3b",
        "rtx-pro-6000-x8-kimi-k2.6",
    )


@pytest.mark.parametrize("name", profile_names())
def test_a_shipped_profile_loads_under_its_own_name(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert not set(profile.backends) & set(profile.refused_backends)


def test_the_model_of_the_reference_deployment_weighs_548_gb() -> None:
    model = load_profile("rtx-pro-6000-x8-kimi-k2.6").model
    assert model.weight_bytes == pytest.approx(548e9, rel=0.005)


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**document(), "name": "mine"}), encoding="utf-8")
    assert load_profile(str(path)).name == "mine"


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="choose one of cpu-blocking-pp2, h200"):
        load_profile("rtx-5090")


def test_names_do_not_leave_the_folder() -> None:
    with pytest.raises(ConfigError, match="no hardware profile"):
        load_profile("../profiles/cpu-blocking-pp2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"a: [1", "not a YAML file"),
        (b"\xff\xfe\xfa", "not a YAML file"),
        (b"", "the document"),
        (b"- 1", "the document"),
    ],
)
def test_a_file_that_is_no_profile(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "bad.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_profile(str(path))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("gpu.colour", "green", "gpu.colour: unknown key"),
        ("gpu.idle_w", "cold", "gpu.idle_w: .*valid number, found 'cold'"),
        ("gpu.idle_w", -1.0, "gpu.idle_w: found -1, expected a number from 0 to"),
        ("gpu.idle_w", float("nan"), "gpu.idle_w: .*finite"),
        ("gpus", 0, "gpus: found 0, expected a number from 1 to"),
        ("gpu.bandwidth_bytes_per_s", 1e-300, "gpu.bandwidth_bytes_per_s: found 1e-300"),
        ("gpu.power_limit_w", 0.0, "gpu.power_limit_w: found 0"),
        ("gpu.power_limit_w", 2.0, "gpu.server_idle_w: .* above gpu.power_limit_w"),
        ("model.experts_per_token", 400, "model.experts_per_token: 400 is above model.experts"),
        ("model.kv_bytes_per_token_layer", 0.0, "kv_bytes_per_token_layer: found 0"),
        ("model.routing_overlap", 5.0, "model.routing_overlap: found 5"),
        ("model.attention_heads", 0, "model.attention_heads: found 0"),
        ("defaults.mem_fraction_static", 1e300, "found 1e\\+300, expected a number from 0.01 to 1"),
        ("host.http_s", 1e20, "host.http_s: found 1e\\+20"),
        ("noise.stage", 5.0, "noise.stage: found 5"),
        ("start.load_bytes_per_s", 1e-300, "start.load_bytes_per_s: found 1e-300"),
        ("backends.triton.kv_factor", -5.0, "backends.triton.kv_factor: found -5"),
        ("gpus", True, "gpus: .*valid integer"),
        ("model.layers", 4.5, "model.layers: .*valid integer"),
        ("backends.triton.speed", 2.0, "backends.triton.speed: unknown key"),
        ("defaults.attention_backend", "fa9", "'fa9' is not one of backends"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(place: str, value: object, message: str) -> None:
    wrong = copy.deepcopy(document())
    *path, last = place.split(".")
    target = wrong
    for key in path:
        target = target[key]
    target[last] = value
    with pytest.raises(ConfigError, match=message):
        parse_profile(wrong, "here")


def test_a_missing_value_is_named_with_its_place() -> None:
    wrong = document()
    del wrong["host"]["schedule_s"]
    with pytest.raises(ConfigError, match=r"here: host\.schedule_s: missing"):
        parse_profile(wrong, "here")
