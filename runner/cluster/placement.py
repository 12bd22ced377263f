"""Which GPUs each replica of a launch gets. Pure."""

from __future__ import annotations

from runner.errors import ConfigError
from runner.trial import LaunchSpec


def assign_gpus(launch: LaunchSpec, gpu_indices: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Deal neighbouring GPUs to the replicas, in order.

    Neighbours share switches and links more often than not, so a replica gets a contiguous run.
    Raises ConfigError when the launch needs more GPUs than there are.
    """
    needed = launch.replicas * launch.gpus_per_replica
    if needed > len(gpu_indices):
        raise ConfigError(
            f"the launch needs {needed} GPUs ({launch.replicas} servers of "
            f"{launch.gpus_per_replica}), {len(gpu_indices)} are there"
        )
    size = launch.gpus_per_replica
    return tuple(
        gpu_indices[replica * size : (replica + 1) * size] for replica in range(launch.replicas)
    )
