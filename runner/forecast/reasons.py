"""Why a setting is as fast as it is, in words. Pure."""

from __future__ import annotations

import math

from runner.forecast.prediction import RungPrediction
from runner.forecast.setting import PlannedSetting
from runner.machine.hardware import Profile
from runner.machine.shape import ServerShape, uses_graph, uses_prefill_graph
from runner.trial import LoadProtocol

NEARLY_ALL = 0.9
HALF = 0.5
BOTH = 2


def reason_words(
    profile: Profile, planned: PlannedSetting, rung: RungPrediction, protocol: LoadProtocol
) -> str:
    """For example `all 8 stages busy, 4 requests in each of 8 slots`."""
    shape = planned.shape
    parts = [_stage_words(planned, rung, protocol)]
    if shape.tp_size > 1:
        pipeline = "no pipeline: " if shape.pp_size == 1 else ""
        parts.append(f"{pipeline}2 all-reduces per layer over {shape.tp_size} GPUs")
    waiting = _waiting(planned, rung, protocol)
    if waiting:
        parts.append(f"{waiting} of {rung.level:g} requests wait")
    parts.append(_graph_words(profile, shape))
    if planned.engines > 1:
        parts.append(f"{planned.engines} servers")
    return "; ".join(part for part in parts if part) or "one GPU, no pipeline"


def _graph_words(profile: Profile, shape: ServerShape) -> str:
    """What runs without CUDA graphs; a pipeline never has them for prefills."""
    has_prefill = uses_prefill_graph(profile, shape)
    if not uses_graph(profile, shape):
        return "decode without CUDA graphs" if has_prefill else "no CUDA graphs"
    return "" if has_prefill or shape.pp_size > 1 else "prefill without CUDA graphs"


def _stage_words(planned: PlannedSetting, rung: RungPrediction, protocol: LoadProtocol) -> str:
    stages = planned.shape.pp_size
    if stages == 1:
        return ""
    every = "both" if stages == BOTH else f"all {stages}"
    is_full = rung.busy_stages >= NEARLY_ALL * stages
    words = f"{every} stages busy" if is_full else f"{rung.busy_stages:.1f} of {stages} stages busy"
    if protocol is LoadProtocol.OPEN_LOOP or rung.slots < HALF:
        return words
    filled = max(round(rung.slots), 1)
    each = max(_in_flight(planned, rung) / planned.engines / filled, 1.0)
    requests = "1 request" if f"{each:.2g}" == "1" else f"{each:.2g} requests"
    return f"{words}, {requests} in " + ("one slot" if filled == 1 else f"each of {filled} slots")


def _in_flight(planned: PlannedSetting, rung: RungPrediction) -> float:
    return min(rung.level, planned.engines * planned.most_running)


def _waiting(planned: PlannedSetting, rung: RungPrediction, protocol: LoadProtocol) -> int:
    if protocol is LoadProtocol.OPEN_LOOP:
        return 0
    return math.floor(rung.level - _in_flight(planned, rung))
