"""Backends that a GPU cannot run are not offered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.clock import Clock
from runner.engines.sglang.backends import impossible
from runner.measure.power import NvmlSensor
from runner.search.study import Search
from runner.settings import StudySettings
from tests.fake_nvml import FakeGpu, FakeNvml
from tests.studies import CPU, study

BACKENDS = ["triton", "fa3", "trtllm_mla"]
SGLANG: dict[str, Any] = {
    **CPU,
    "engine": {"kind": "sglang", "model": "/models/tiny"},
    "hardware": {"gpus": 1},
    "parameters": {"attention_backend": {"choices": BACKENDS}},
    "baselines": [],
}


def settings_of(**sections: object) -> StudySettings:
    return study(SGLANG, **sections)


def offered(settings: StudySettings, capability: tuple[int, int] | None, folder: Path) -> set[str]:
    folder.mkdir()
    search = Search(settings, f"sqlite:///{folder}/optuna.db")
    search.restrict(impossible(settings, [capability]))
    asked: set[str] = set()
    while len(asked) < len(BACKENDS) and (proposal := search.ask()) is not None:
        asked.add(str(proposal.params["attention_backend"]))
    search.close()
    return asked


def test_only_the_study_on_a_gpu_that_can_run_it_offers_a_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}
    for name, capability in (("H200", (9, 0)), ("RTX PRO 6000", (12, 0))):
        gpu = FakeGpu("GPU-a", name=name, capability=capability)
        monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeNvml([gpu]))
        (identity,) = NvmlSensor(Clock()).gpus()
        seen[name] = offered(settings_of(), identity.capability, tmp_path / name)
    assert seen == {"H200": {"triton", "fa3"}, "RTX PRO 6000": {"triton", "trtllm_mla"}}


def test_an_unknown_gpu_gets_them_all(tmp_path: Path) -> None:
    assert offered(settings_of(), None, tmp_path / "any") == set(BACKENDS)


def test_emulated_gpus_say_so_themselves() -> None:
    emulated = settings_of(engine=CPU["engine"], hardware={"gpus": 2})
    assert impossible(emulated, [(12, 0)]) == ()


def test_backends_of_a_phase_count_too() -> None:
    settings = settings_of(
        parameters={"decode_attention_backend": {"choices": ["flashinfer", "fa3", "intel_amx"]}}
    )
    texts = [each.text for each in impossible(settings, [(10, 0), (10, 0)])]
    assert texts == [
        "decode_attention_backend != 'fa3'",
        "decode_attention_backend != 'intel_amx'",
    ]
