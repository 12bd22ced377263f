"""What a server of a launch is told, the same for every executor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runner.engines.sglang.replica import ReplicaSpec, ServerProgram
from runner.errors import Infeasible
from runner.measure.power import GpuIdentity, GpuKind
from runner.measure.visible import visible_devices
from runner.trial import LaunchSpec


@dataclass(frozen=True, slots=True)
class LaunchPlace:
    """Where the servers of a launch come from and where they leave their traces."""

    program: ServerProgram
    folder: Path
    lease_folder: Path


def replica_spec(
    launch: LaunchSpec, index: int, gpus: tuple[GpuIdentity, ...], place: LaunchPlace
) -> ReplicaSpec:
    """One server of a launch, on these GPUs of its node; CUDA_VISIBLE_DEVICES names just them.

    Raises Infeasible for a server on several slices: CUDA shows a process one at most.
    """
    if len(gpus) > 1 and any(gpu.kind is GpuKind.SLICE for gpu in gpus):
        raise Infeasible(f"a server of {len(gpus)} GPUs cannot run on slices (MIG), only on one")
    return ReplicaSpec(
        index=index,
        launch_number=launch.number,
        server_args=launch.server_args,
        gpu_indices=tuple(gpu.index for gpu in gpus),
        visible_devices=visible_devices(gpus),
        program=place.program,
        log_path=place.folder / f"replica-{index}.log",
        lease_folder=place.lease_folder,
    )
