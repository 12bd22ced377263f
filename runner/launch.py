"""From a point of the search space to a launch: which servers, and what is set on them live.

Pure. `pp_max_micro_batch_size` (the cap) is what SGLang changes on a running server, within
1 .. max_running_requests // pp_size. So that every cap of the search space can be set live, a
launch gets room: max_running_requests = highest cap * pp_size, where the study does not say
otherwise. Without a pipeline the cap bounds what runs at once, as max_running_requests does, so a
searched max_running_requests is set live as a cap, on servers with the highest one of the space.
All settings that differ by such a value only then share one launch.

A re-measurement confirms what a user will start: its servers get all flags as asked. So do those
of a baseline: what it leaves out is left to SGLang.
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
MOST_IN_A_ROW = 2
"""Settings of a search that one launch serves before another is started. A start costs minutes, a
live parameter nothing: two halve the starts and find settings as good as one does; with three, too
few launches are tried (12 seeds of the sampler's tests, 20 and 40 trials)."""

WORLD = ("tp_size", "pp_size", "dp_size")  # ep_size divides the experts inside tp_size


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The launch a setting needs (without a number) and what to set on it once it runs.

    `live_names`: the parameters that settings on the same servers may have otherwise.
    """

    key: str
    server_args: Params
    live: Params
    replicas: int
    gpus_per_replica: int
    live_names: frozenset[str] = frozenset()


def settings_in_a_row(settings: StudySettings) -> int:
    """Settings that a launch serves at most before another is started.

    Samplers whose draws are a sequence, or meant to be chance, are left alone.
    """
    return MOST_IN_A_ROW if settings.search.sampler in ("auto", "tpe") else 1


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
    is_baseline = any(baseline.params == params for baseline in settings.baselines)
    live: dict[str, ParamValue] = {}
    names: set[str] = set()
    if CAP in args:
        if not is_baseline:
            args |= _room(settings, args, pp_size)
        limit = as_int(args.get(MAX_RUNNING, 0)) // pp_size
        if not is_repeat and 1 <= as_int(args[CAP]) <= limit:
            live[CAP] = args.pop(CAP)
            names.add(CAP)
    elif MAX_RUNNING in params and _is_one_queue(args) and not is_repeat and not is_baseline:
        highest = highest_of(settings, MAX_RUNNING)
        asked = as_int(args[MAX_RUNNING])
        if highest is not None and 1 <= asked <= highest:
            names.add(MAX_RUNNING)
            args[MAX_RUNNING] = highest
            live = {MAX_RUNNING: asked} if asked < highest else {}
    replicas = hardware.nodes * (hardware.gpus // world)
    key = launch_key(args, replicas)
    return LaunchPlan(key, args, live, replicas, world, frozenset(names))


def live_cap(live: Params, own: int) -> int:
    """The cap to set on servers whose own one is `own`.

    max_running_requests is clipped to what they hold, as SGLang clips the flag; a cap is not.
    """
    if MAX_RUNNING in live:
        return min(as_int(live[MAX_RUNNING]), own)
    return as_int(live.get(CAP, own))


def _is_one_queue(args: Params) -> bool:
    """Whether all that a server runs is in one batch: no stages, no attention data parallelism."""
    return all(as_int(args.get(name, 1)) == 1 for name in ("pp_size", "attn_dp_size"))


def launch_key(args: Params, replicas: int) -> str:
    """The identity of equal launches."""
    return _digest({"args": dict(args), "replicas": replicas})


def spec_hash(params: Params) -> str:
    """The identity of equal settings."""
    return _digest(dict(params))


def _room(settings: StudySettings, args: Params, pp_size: int) -> Params:
    """The max_running_requests to add, so that every cap of the search space is live.

    Nothing where the study says it, or where the cap is not searched.
    """
    highest = highest_of(settings, CAP)
    if MAX_RUNNING in args or highest is None:
        return {}
    return {MAX_RUNNING: highest * pp_size}


def highest_of(settings: StudySettings, name: str) -> int | None:
    """The highest value of a size in the search space, None when it is not searched."""
    for parameter in settings.parameters:
        if parameter.name == name:
            values = parameter.values if isinstance(parameter, Choices) else (parameter.high,)
            return max(as_int(value) for value in values)
    return None


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
