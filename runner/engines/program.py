"""From a study's settings to the program that each of its servers runs, and to its GPU sensor."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from runner.clock import Clock
from runner.engines.sglang.environment import ServerEnvironment
from runner.engines.sglang.installation import read_installed
from runner.engines.sglang.jit_cache import cache_folder, driver_version
from runner.engines.sglang.replica import ServerProgram
from runner.engines.sglang.start_limits import PHASE_LIMITS, with_allowance
from runner.errors import ConfigError
from runner.machine.profile import load_profile
from runner.measure.power import GpuIdentity, GpuSensor
from runner.settings import EngineSettings, StudySettings
from runner.trial import EngineKind

# Time that no scale shortens: an emulated server's own start, on a busy machine.
WALL_ALLOWANCE_S = 60.0


def environment_for(engine: EngineSettings) -> ServerEnvironment:
    """What the servers of the engine offer, asked for on this machine.

    Raises ConfigError when there is no such server here, see `read_installed`.
    """
    match engine.kind:
        case EngineKind.EMULATED:
            from runner.engines.emulator.flags import emulated_environment

            return emulated_environment()
        case EngineKind.SGLANG:
            return read_installed(engine.python or sys.executable, engine.env)
        case EngineKind.SIMULATED:
            raise ConfigError("simulated servers have no command line")


def program_for(
    settings: StudySettings, machine_folder: Path, environment: ServerEnvironment
) -> ServerProgram:
    """The program of every server of the study; `machine_folder` holds the emulated GPUs."""
    engine = settings.engine
    clock = Clock(engine.time_scale)
    allowance_s = WALL_ALLOWANCE_S * clock.scale if engine.kind is EngineKind.EMULATED else 0.0
    return ServerProgram(
        argv=_argv(engine, machine_folder),
        env=dict(engine.env),
        clock=clock,
        environment=environment,
        limits=with_allowance(PHASE_LIMITS, allowance_s),
    )


def with_cache(
    program: ServerProgram, settings: StudySettings, gpus: Sequence[GpuIdentity]
) -> ServerProgram:
    """The program with a place for what its servers compile on these GPUs, for later servers too.

    As it was where the servers are not SGLang's, and where the user has said where.
    """
    if settings.engine.kind is not EngineKind.SGLANG or not gpus:
        return program
    environment = {**os.environ, **program.env}
    version = program.environment.version
    folder = cache_folder(version, gpus[0].name, driver_version(), environment)
    return replace(program, cache_folder=folder)


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
