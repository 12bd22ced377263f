"""What a study ran on: versions, machine, GPUs. No secrets, no environment variables."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from runner.clock import Clock
from runner.errors import RunnerError
from runner.measure.power import GpuIdentity, NvmlSensor
from runner.record.codec import Json, encode

LIBRARIES = ("ray", "optuna", "mlflow", "numpy", "pyarrow")
DRIVER_VERSION = Path("/sys/module/nvidia/version")
CPU_INFO = Path("/proc/cpuinfo")


def describe_environment() -> dict[str, Json]:
    """The facts that a result depends on, ready for JSON."""
    return {
        "runner": _version("sglang-runner"),
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "kernel": platform.release(),
        "cpu": {"model": _cpu_model(), "count": os.cpu_count()},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "nvidia_driver": _driver_version(),
        "gpus": [encode(gpu) for gpu in find_gpus()],
    }


def find_gpus() -> tuple[GpuIdentity, ...]:
    """The GPUs that NVIDIA's driver reports; none where there is no driver."""
    try:
        sensor = NvmlSensor(Clock())
    except RunnerError:
        return ()
    try:
        return sensor.gpus()
    finally:
        sensor.close()


def changed(old: Mapping[str, Json], new: Mapping[str, Json]) -> list[str]:
    """What differs, a line each: `libraries.ray: 2.59.0 -> 2.60.0`."""
    before, after = _flat(old), _flat(new)
    names = [*before, *(name for name in after if name not in before)]
    return [
        f"{name}: {_shown(before.get(name))} -> {_shown(after.get(name))}"
        for name in names
        if before.get(name) != after.get(name)
    ]


def _flat(value: Json | Mapping[str, Json], where: str = "") -> dict[str, Json]:
    match value:
        case Mapping() if value:
            parts = {f"{where}.{key}" if where else key: item for key, item in value.items()}
        case list() if value:
            parts = {f"{where}[{index}]": item for index, item in enumerate(value)}
        case _:
            return {where: value} if isinstance(value, bool | int | float | str) else {}
    return {name: leaf for key, item in parts.items() for name, leaf in _flat(item, key).items()}


def _shown(value: Json) -> str:
    return "none" if value is None else str(value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    return DRIVER_VERSION.read_text().strip() if DRIVER_VERSION.exists() else None


def _cpu_model() -> str | None:
    if not CPU_INFO.exists():
        return None
    lines = (line.partition(":") for line in CPU_INFO.read_text().splitlines())
    names = (value.strip() for key, _, value in lines if key.strip() in ("model name", "Model"))
    return next(names, platform.machine())
