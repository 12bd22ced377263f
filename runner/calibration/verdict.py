"""What the data can tell of each parameter, in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from runner.calibration.fit import Knowledge
from runner.calibration.parameters import RANKS_FACTOR, Parameter
from runner.calibration.points import Evidence, Quantity

IDENTIFIED, NOT_IDENTIFIED = 0.5, 0.9
"""Posterior over prior deviation: below the first a parameter is known, above the second not."""

TOGETHER = 0.95  # a correlation at which two parameters are one
OF_PIPELINES = frozenset({"link.hop_s", "host.message_s", "host.exchange_s", "host.empty_slot_s"})
OF_TENSOR_PARALLEL = frozenset(
    {"link.ring_step_s", "link.bandwidth_bytes_per_s", "host.collective_s"}
)
OF_SEVERAL_GPUS = frozenset({"gpu.communication_w", RANKS_FACTOR})
OF_EAGER = frozenset(
    {"eager_layer_s", "eager_factor", "request_s", "eager_ranks_factor", "collective_s"}
)
HIDDEN = "nothing measured reacts to it: something slower hides it"
WEAK = "what was measured hardly depends on it"


class Verdict(StrEnum):
    """How well the data knows a parameter."""

    IDENTIFIED = "identified"
    PARTLY = "partly"
    NOT_IDENTIFIED = "not identified"


def verdicts(known: Knowledge) -> tuple[Verdict, ...]:
    """One for each parameter, from the data alone."""
    return tuple(
        _verdict(float(deviation), reacts=bool(reacts))
        for deviation, reacts in zip(known.deviations, known.reacts, strict=True)
    )


def known_together(
    parameters: Sequence[Parameter], known: Knowledge, found: Sequence[Verdict]
) -> tuple[tuple[str, ...], ...]:
    """Groups of parameters of which only a combination is known, none of them by itself."""
    open_places = [at for at, verdict in enumerate(found) if verdict is not Verdict.IDENTIFIED]
    groups: list[set[int]] = []
    for one in open_places:
        near = {
            other
            for other in open_places
            if other != one and abs(float(known.correlations[one, other])) > TOGETHER
        }
        if near:
            joined = {one, *near}
            touching = [group for group in groups if group & joined]
            groups = [group for group in groups if not group & joined]
            groups.append(joined.union(*touching))
    return tuple(tuple(parameters[at].name for at in sorted(group)) for group in groups)


def reason_of(parameter: Parameter, evidence: Evidence, *, reacts: bool) -> str:
    """Why a parameter is not identified, in plain words."""
    if reacts:
        return WEAK
    shapes = [setting.planned.shape for setting in evidence.settings]
    is_staged = any(shape.pp_size > 1 for shape in shapes)
    is_split = any(shape.tp_size > 1 for shape in shapes)
    missing = (
        (
            parameter.section == "gpu" and parameter.field.endswith("_w"),
            _has(evidence, Quantity.POWER),
            "no power was measured",
        ),
        (parameter.name in OF_TENSOR_PARALLEL, is_split, "no tensor parallelism was measured"),
        (parameter.name in OF_PIPELINES, is_staged, "no pipeline (pp_size > 1) was measured"),
        (
            parameter.name in OF_SEVERAL_GPUS,
            is_split or is_staged,
            "no server of several GPUs was measured",
        ),
        (parameter.name == "kernels.split_cost", is_split, "no tensor parallelism was measured"),
        (
            parameter.field in OF_EAGER,
            not all(shape.cuda_graph for shape in shapes),
            "no setting without CUDA graphs was measured",
        ),
        (
            parameter.name == "host.graph_launch_s",
            any(shape.cuda_graph for shape in shapes),
            "no setting with CUDA graphs was measured",
        ),
    )
    return next((words for is_its, is_there, words in missing if is_its and not is_there), HIDDEN)


def _verdict(deviation: float, *, reacts: bool) -> Verdict:
    if not reacts or deviation > NOT_IDENTIFIED:
        return Verdict.NOT_IDENTIFIED
    return Verdict.IDENTIFIED if deviation < IDENTIFIED else Verdict.PARTLY


def _has(evidence: Evidence, quantity: Quantity) -> bool:
    return any(point.quantity is quantity for point in evidence.points)
