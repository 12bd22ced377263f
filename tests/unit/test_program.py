"""Which program a study's servers run, and what reads their GPUs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runner.engines.program import program_for, sensor_for
from runner.errors import ConfigError
from runner.settings import EngineSettings, StudySettings
from runner.trial import EngineKind
from tests.samples import make_settings
from tests.server_flags import real_environment

MACHINE = Path("/studies/demo/machine")
EMULATED = EngineSettings(
    EngineKind.EMULATED, "cpu-blocking-pp2", 12.345678, None, None, {"tp_size": 1}, {"A": "b"}
)
OFFERED = real_environment("0.5.23")
SGLANG = EngineSettings(EngineKind.SGLANG, None, 1.0, "/models/m", "/opt/sglang/bin/python", {}, {})


def study(engine: EngineSettings) -> StudySettings:
    return make_settings(engine=engine)


def test_the_emulated_program_runs_on_the_studys_clock() -> None:
    program = program_for(study(EMULATED), MACHINE, OFFERED)
    assert program.argv == (
        *(sys.executable, "-m", "runner.engines.emulator", "--profile", "cpu-blocking-pp2"),
        *("--time-scale", "12.345678", "--gpu-folder", str(MACHINE)),
    )
    assert program.env == {"A": "b"}
    assert program.clock.scale == 12.345678


def test_the_sglang_program_runs_in_its_own_environment() -> None:
    program = program_for(study(SGLANG), MACHINE, OFFERED)
    assert program.argv == (
        *("/opt/sglang/bin/python", "-m", "sglang.launch_server", "--model-path", "/models/m"),
    )
    here = program_for(study(replace(SGLANG, python=None)), MACHINE, OFFERED)
    assert here.argv[0] == sys.executable


def test_a_fast_clock_still_leaves_an_emulated_server_a_minute_to_start() -> None:
    program = program_for(study(replace(EMULATED, time_scale=1000.0)), MACHINE, OFFERED)
    for limit in program.limits.values():
        assert program.clock.wall_duration_s(limit.most_s) > 60.0
        assert program.clock.wall_duration_s(limit.quiet_s) > 60.0


@pytest.mark.parametrize(
    ("engine", "missing"),
    [
        (replace(EMULATED, profile=None), "engine.profile is missing"),
        (replace(SGLANG, model=None), "engine.model is missing"),
        (replace(EMULATED, kind=EngineKind.SIMULATED), "not started as programs"),
    ],
)
def test_a_study_without_a_program_is_refused(engine: EngineSettings, missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        program_for(study(engine), MACHINE, OFFERED)


def test_simulated_servers_have_no_gpus() -> None:
    with pytest.raises(ConfigError, match="no GPU"):
        sensor_for(study(replace(EMULATED, kind=EngineKind.SIMULATED)), MACHINE)
