"""What a server of a launch is told, the same for every executor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runner.engines.sglang.server import ReplicaSpec, ServerProgram
from runner.trial import LaunchSpec


@dataclass(frozen=True, slots=True)
class LaunchPlace:
    """Where the servers of a launch come from and where they leave their traces."""

    program: ServerProgram
    folder: Path
    lease_folder: Path


def replica_spec(
    launch: LaunchSpec, index: int, gpu_indices: tuple[int, ...], place: LaunchPlace
) -> ReplicaSpec:
    """One server of a launch, on these GPUs of its node; CUDA_VISIBLE_DEVICES names just them."""
    return ReplicaSpec(
        index=index,
        launch_number=launch.number,
        server_args=launch.server_args,
        gpu_indices=gpu_indices,
        visible_devices=visible_devices(gpu_indices),
        program=place.program,
        log_path=place.folder / f"replica-{index}.log",
        lease_folder=place.lease_folder,
    )


def visible_devices(gpu_indices: tuple[int, ...]) -> str:
    """CUDA_VISIBLE_DEVICES for these GPUs."""
    return ",".join(str(index) for index in gpu_indices)
