"""Which GPUs the environment lets a study use: CUDA_VISIBLE_DEVICES, resolved to identities. Pure.

Stricter than CUDA, which lets its list end at the first name that it does not understand and then
runs on fewer GPUs than were asked for, or on none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runner.errors import ConfigError
from runner.measure.power import SLICE_PREFIX, GpuIdentity, GpuKind

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
BUS_ORDER = "PCI_BUS_ID"
END = "-1"
NOTHING = ("", "NoDevFiles", END)


def usable_gpus(
    gpus: Sequence[GpuIdentity], environment: Mapping[str, str]
) -> tuple[GpuIdentity, ...]:
    """The GPUs that a study may use, in the order in which the environment names them.

    Without CUDA_VISIBLE_DEVICES every whole GPU. Raises ConfigError when the variable names what
    is not there, names a GPU twice, or leaves none.
    """
    if not gpus:
        return ()
    value = environment.get(VARIABLE)
    if value is None:
        return _whole_gpus(gpus)
    names = [name.strip() for name in value.split(",")]
    if names[0] in NOTHING:
        raise ConfigError(
            f"{VARIABLE}={value!r} hides every GPU; unset it, or name the GPUs that the study may "
            f"use, e.g. {VARIABLE}=0,1"
        )
    if END in names:  # CUDA's own word for: the list ends here
        names = names[: names.index(END)]
    if any(name.isdecimal() for name in names):
        _check_order(gpus, environment.get(ORDER_VARIABLE))
    found = tuple(named_gpu(name, gpus) for name in names)
    for place, gpu in enumerate(found):
        if gpu in found[:place]:
            raise ConfigError(
                f"{VARIABLE}={value} names GPU {gpu.index} ({gpu.uuid}) twice, and CUDA then shows "
                "none; name each GPU once"
            )
    return found


def named_gpu(name: str, gpus: Sequence[GpuIdentity]) -> GpuIdentity:
    """The GPU or slice that one entry of CUDA_VISIBLE_DEVICES names: number, UUID or its beginning.

    Raises ConfigError when it names none, several, or a GPU that only its slices can be used of.
    """
    whole = [gpu for gpu in gpus if gpu.kind is not GpuKind.SLICE]
    if name.isdecimal():
        found = [gpu for gpu in whole if gpu.index == int(name)]
    else:
        found = [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]
        found = [gpu for gpu in found if gpu.uuid == name] or found
    if not found:
        raise ConfigError(
            f"{VARIABLE}: there is no GPU {name!r} here; expected a number from 0 to "
            f"{len(whole) - 1} or a UUID, as nvidia-smi -L prints them"
        )
    if len(found) > 1:
        names = ", ".join(gpu.uuid for gpu in found)
        raise ConfigError(f"{VARIABLE}: {name!r} names {names}; write more of the UUID")
    if found[0].kind is GpuKind.PARTITIONED:
        raise ConfigError(
            f"{VARIABLE}: GPU {found[0].index} is cut into slices (MIG); name one of them, "
            f"{SLICE_PREFIX}..., as nvidia-smi -L prints them"
        )
    return found[0]


def visible_devices(gpus: Sequence[GpuIdentity]) -> str:
    """CUDA_VISIBLE_DEVICES for these GPUs, to be read with CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    is_slice = GpuKind.SLICE
    return ",".join(gpu.uuid if gpu.kind is is_slice else str(gpu.index) for gpu in gpus)


def _whole_gpus(gpus: Sequence[GpuIdentity]) -> tuple[GpuIdentity, ...]:
    found = tuple(gpu for gpu in gpus if gpu.kind is GpuKind.WHOLE)
    if not found:
        raise ConfigError(
            f"every GPU here is cut into slices (MIG); name those that the study may use: "
            f"{VARIABLE}={SLICE_PREFIX}..., as nvidia-smi -L prints them"
        )
    return found


def _check_order(gpus: Sequence[GpuIdentity], order: str | None) -> None:
    """Numbers mean the driver's order only where CUDA counts like it, or all GPUs are equal."""
    if order == BUS_ORDER or len({gpu.name for gpu in gpus if gpu.kind is not GpuKind.SLICE}) == 1:
        return
    raise ConfigError(
        f"{VARIABLE} counts GPUs by number, CUDA numbers them fastest first, and they differ here; "
        f"set {ORDER_VARIABLE}={BUS_ORDER}, or name them by UUID"
    )
