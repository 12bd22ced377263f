"""What one server of a launch is told: its command line, its environment, its lease."""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runner.clock import Clock
from runner.engines.lease import Driver, Lease, boot_id
from runner.engines.observation import observation_args
from runner.engines.processes import START_VARIABLE, ProcessGroup
from runner.engines.sglang.environment import ServerEnvironment
from runner.engines.sglang.flags import flag_of, render, variables
from runner.engines.sglang.jit_cache import cache_environment
from runner.engines.sglang.process import Command, inherited_environment
from runner.engines.sglang.start_limits import PHASE_LIMITS, PhaseLimit
from runner.trial import Params

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ServerProgram:
    """How servers are started, and how long each step may take (seconds of `clock`).

    `environment` is what the program offers; `cache_folder`: where they keep what they compile;
    None: they have a place of their own.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    clock: Clock
    environment: ServerEnvironment
    cache_folder: Path | None = None
    limits: Mapping[str, PhaseLimit] = field(default_factory=lambda: PHASE_LIMITS)
    drain_deadline_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One server of a launch. `gpu_indices` are the machine's own numbers, for the lease.

    `driver` is the process that makes this value, wherever the server is then started.
    """

    index: int
    launch_number: int
    server_args: Params
    gpu_indices: tuple[int, ...]
    visible_devices: str
    program: ServerProgram
    log_path: Path
    lease_folder: Path
    driver: Driver = field(default_factory=Driver.here)


def command_of(spec: ReplicaSpec, attempt: int, port: int, nccl_port: int) -> Command:
    """The command line; its GPU numbers count from 0 within CUDA_VISIBLE_DEVICES.

    Raises Infeasible for an argument that the program has no flag for.
    """
    own = ["--host", HOST, "--port", str(port), "--nccl-port", str(nccl_port)]
    program = spec.program
    words = render({**spec.server_args, **_observation(spec)}, program.environment)
    return Command(
        argv=(*program.argv, *words, *own, "--base-gpu-id", "0"),
        env={
            "PYTHONUNBUFFERED": "1",
            **inherited_environment(),
            **_own_environment(spec),
            START_VARIABLE: f"{spec.launch_number}/{spec.index}/{attempt}",
        },
        log_path=spec.log_path,
        token=uuid.uuid4().hex,
    )


def _observation(spec: ReplicaSpec) -> Params:
    """What the server is told so that it can be watched, as far as it has flags for that."""
    watching = observation_args(spec.server_args).items()
    return {name: v for name, v in watching if flag_of(name, spec.program.environment)}


def shown(spec: ReplicaSpec, command: Command) -> str:
    """What a person would type to start it again."""
    words = [f"{name}={shlex.quote(value)}" for name, value in _own_environment(spec).items()]
    return " ".join((*words, shlex.join(command.argv)))


def lease_of(spec: ReplicaSpec, group: ProcessGroup, port: int) -> Lease:
    """The lease of a server that is about to run."""
    return Lease(
        pid=group.leader.pid,
        start_time=group.leader.start_time,
        pgid=group.leader.pid,
        gpus=spec.gpu_indices,
        port=port,
        launch=spec.launch_number,
        replica=spec.index,
        driver_pid=spec.driver.process.pid,
        driver_start_time=spec.driver.process.start_time,
        driver_host=spec.driver.host,
        host=Driver.here().host,
        boot_id=boot_id(),
        token=group.token,
    )


def _own_environment(spec: ReplicaSpec) -> dict[str, str]:
    program = spec.program
    given = {**inherited_environment(), **program.env}
    folder = program.cache_folder
    return {
        **({} if folder is None else cache_environment(folder, given)),
        **program.env,
        **variables(spec.server_args),
        "CUDA_VISIBLE_DEVICES": spec.visible_devices,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
