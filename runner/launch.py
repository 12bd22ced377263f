"""From a point of the search space to a launch: which servers, and what is set on them live.

Pure. `pp_max_micro_batch_size` (the cap) is the only live parameter: SGLang changes it on a
running server within 1 .. max_running_requests // pp_size. So that every cap of the search space
can be set live, a launch gets room: max_running_requests = highest cap * pp_size, where the study
does not say otherwise. All settings that differ by such a cap only then share one launch.

A re-measurement confirms what a user will start: its servers get the cap as a flag, like all else.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from runner.errors import ConfigError
from runner.settings import Choices, StudySettings
from runner.trial import Params, ParamValue

CAP = "pp_max_micro_batch_size"
MAX_RUNNING = "max_running_requests"
WORLD = ("tp_size", "pp_size", "dp_size")  # ep_size divides the experts inside tp_size


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The launch a setting needs (without a number) and what to set on it once it runs."""

    key: str
    server_args: Params
    live: Params
    replicas: int
    gpus_per_replica: int


def as_int(value: ParamValue) -> int:
    """A size parameter as an integer; raises ConfigError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"a size must be a whole number, found {value!r}")
    return value


def world_size(args: Params) -> int:
    """GPUs of one server: tp_size * pp_size * dp_size, each 1 when absent."""
    size = 1
    for name in WORLD:
        size *= as_int(args.get(name, 1))
    return size


def plan_launch(settings: StudySettings, params: Params, *, is_repeat: bool = False) -> LaunchPlan:
    """Split a setting into launch arguments and live parameters, and count its replicas.

    For a re-measurement (`is_repeat`) nothing is live. A server stays on one node, so replicas are
    counted node by node. Raises ConfigError when a server needs more GPUs than a node has.
    """
    args: dict[str, ParamValue] = {**settings.engine.args, **params}
    hardware = settings.hardware
    world = world_size(args)
    if world > hardware.gpus:
        raise ConfigError(
            f"a server of {world} GPUs does not fit on the {hardware.gpus} of hardware.gpus"
        )
    pp_size = as_int(args.get("pp_size", 1))
    live: dict[str, ParamValue] = {}
    if CAP in args and pp_size == 1:
        del args[CAP]  # without a pipeline there are no micro-batches to cap
    elif CAP in args:
        args |= _room(settings, params, args, pp_size)
        limit = as_int(args.get(MAX_RUNNING, 0)) // pp_size
        if not is_repeat and 1 <= as_int(args[CAP]) <= limit:
            live[CAP] = args.pop(CAP)
    replicas = hardware.nodes * (hardware.gpus // world)
    return LaunchPlan(launch_key(args, replicas), args, live, replicas, world)


def launch_key(args: Params, replicas: int) -> str:
    """The identity of equal launches."""
    return _digest({"args": dict(args), "replicas": replicas})


def spec_hash(params: Params) -> str:
    """The identity of equal settings."""
    return _digest(dict(params))


def _room(settings: StudySettings, params: Params, args: Params, pp_size: int) -> Params:
    """The max_running_requests to add, so that every cap of the search space is live.

    Nothing where the study says it, where the cap is not searched, and for a baseline: what a
    baseline leaves out is left to SGLang.
    """
    highest = highest_cap(settings)
    is_baseline = any(baseline.params == params for baseline in settings.baselines)
    if MAX_RUNNING in args or highest is None or is_baseline:
        return {}
    return {MAX_RUNNING: highest * pp_size}


def highest_cap(settings: StudySettings) -> int | None:
    """The highest cap of the search space, None when it is not searched."""
    for parameter in settings.parameters:
        if parameter.name == CAP:
            values = parameter.values if isinstance(parameter, Choices) else (parameter.high,)
            return max(as_int(value) for value in values)
    return None


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
