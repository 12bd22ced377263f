"""From a study's settings to the program that each of its servers runs, and to its GPU sensor."""

from __future__ import annotations

import sys
from pathlib import Path

from runner.clock import Clock
from runner.engines.sglang.replica import ServerProgram
from runner.errors import ConfigError
from runner.machine.profile import load_profile
from runner.measure.power import GpuSensor
from runner.settings import EngineSettings, StudySettings
from runner.trial import EngineKind

START_DEADLINE_S = 1800.0
STALL_LIMIT_S = 600.0
# Time that no scale shortens: an emulated server's own start, on a busy machine.
WALL_ALLOWANCE_S = 60.0


def program_for(settings: StudySettings, machine_folder: Path) -> ServerProgram:
    """The program of every server of the study; `machine_folder` holds the emulated GPUs."""
    engine = settings.engine
    clock = Clock(engine.time_scale)
    allowance_s = WALL_ALLOWANCE_S * clock.scale if engine.kind is EngineKind.EMULATED else 0.0
    return ServerProgram(
        argv=_argv(engine, machine_folder),
        env=dict(engine.env),
        clock=clock,
        start_deadline_s=START_DEADLINE_S + allowance_s,
        stall_limit_s=STALL_LIMIT_S + allowance_s,
    )


def sensor_for(settings: StudySettings, machine_folder: Path) -> GpuSensor:
    """What reads the GPUs that the study's servers run on."""
    clock = Clock(settings.engine.time_scale)
    match settings.engine.kind:
        case EngineKind.EMULATED:
            from runner.engines.emulator.gpu import EmulatedGpus, create_machine

            create_machine(machine_folder, load_profile(_profile_name(settings.engine)))
            return EmulatedGpus(machine_folder, clock)
        case EngineKind.SGLANG if settings.engine.has_own_devices:
            from runner.measure.no_gpu import ProcessorSensor

            return ProcessorSensor(settings.hardware.gpus, clock)
        case EngineKind.SGLANG:
            from runner.measure.power import NvmlSensor

            return NvmlSensor(clock)
        case EngineKind.SIMULATED:
            raise ConfigError("simulated servers run on no GPU that could be read")


def _argv(engine: EngineSettings, machine_folder: Path) -> tuple[str, ...]:
    match engine.kind:
        case EngineKind.EMULATED:
            return (
                *(sys.executable, "-m", "runner.engines.emulator"),
                *("--profile", _profile_name(engine)),
                *("--time-scale", str(engine.time_scale)),
                *("--gpu-folder", str(machine_folder)),
            )
        case EngineKind.SGLANG:
            if engine.model is None:
                raise ConfigError("engine.model is missing; the sglang engine needs its path")
            python = engine.python or sys.executable
            return (python, "-m", "sglang.launch_server", "--model-path", engine.model)
        case EngineKind.SIMULATED:
            raise ConfigError("simulated servers are not started as programs")


def _profile_name(engine: EngineSettings) -> str:
    if engine.profile is None:
        raise ConfigError("engine.profile is missing; the emulated engine needs one")
    return engine.profile
