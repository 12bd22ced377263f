"""Which GPUs each replica of a launch gets. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from runner.errors import ConfigError
from runner.measure.power import GpuIdentity
from runner.measure.visible import usable_gpus
from runner.settings import StudySettings
from runner.trial import LaunchSpec

Gpu = TypeVar("Gpu")


def study_gpus(
    settings: StudySettings, gpus: tuple[GpuIdentity, ...], environment: Mapping[str, str]
) -> tuple[GpuIdentity, ...]:
    """The GPUs of this machine that the study may use; `engine.env` counts as environment.

    Emulated GPUs, and places on a CPU, are the study's own. Raises ConfigError, see `usable_gpus`.
    """
    if settings.engine.has_own_devices:
        return gpus
    return usable_gpus(gpus, {**environment, **settings.engine.env})


def assign_gpus(launch: LaunchSpec, gpus: tuple[Gpu, ...]) -> tuple[tuple[Gpu, ...], ...]:
    """Deal neighbouring GPUs to the replicas, in order.

    Neighbours share switches and links more often than not, so a replica gets a contiguous run.
    Raises ConfigError when the launch needs more GPUs than there are.
    """
    needed = launch.replicas * launch.gpus_per_replica
    if needed > len(gpus):
        raise ConfigError(
            f"the launch needs {needed} GPUs ({launch.replicas} servers of "
            f"{launch.gpus_per_replica}), {len(gpus)} are there"
        )
    size = launch.gpus_per_replica
    return tuple(gpus[replica * size : (replica + 1) * size] for replica in range(launch.replicas))
