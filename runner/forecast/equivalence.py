"""Which settings are the same to measure. Pure.

Two settings are equivalent when their servers get equal flags after every default is filled in, or
when their simulations under the study's own protocol and lengths agree within `NEAR` at every rung
under every seed. Simulations of which the load meets no difference (a cap that no slot reaches,
rows that are never all taken) are the same computation to the last bit and need not be run to be
known equal. Parameters that the model does not know keep settings apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from runner.forecast.findings import most_per_engine
from runner.forecast.lengths import length_facts
from runner.forecast.setting import PlannedSetting, kept_apart
from runner.machine.hardware import Profile
from runner.machine.shape import stage_layers, uses_graph, uses_prefill_graph
from runner.settings import StudySettings
from runner.trial import Params

NEAR = 0.005
MARGIN = 2  # lengths are drawn from laws whose longest is known nearly only


class Sameness(StrEnum):
    """Why settings are equivalent."""

    FLAGS = "equal flags"
    COMPUTATION = "this load cannot tell them apart"
    SIMULATION = "within 0.5 % in simulation"


@dataclass(frozen=True, slots=True)
class Equivalent:
    """Settings that give the same; the first stands for all."""

    basis: Sameness
    settings: tuple[Params, ...]


def flag_key(profile: Profile, planned: PlannedSetting) -> Hashable:
    """Equal for settings whose servers get equal flags once every default is filled in."""
    shape, resolved = planned.shape, planned.resolved
    has_graph = uses_graph(profile, shape)
    return (
        _layout(profile, planned),
        (planned.cap, resolved.max_running_requests) if shape.pp_size > 1 else planned.most_running,
        resolved.chunked_prefill_size,
        resolved.attention_backend,
        resolved.mem_fraction_static,
        resolved.max_total_tokens,
        resolved.cuda_graph_max_bs if has_graph else 0,
        uses_prefill_graph(profile, shape),
        kept_apart(planned.launch.server_args),
    )


def load_key(settings: StudySettings, profile: Profile, planned: PlannedSetting) -> Hashable:
    """Equal for settings whose simulations under the study's load are the same computation."""
    sent = most_per_engine(settings, planned)
    if sent is None:
        return flag_key(profile, planned)
    shape, resolved, work = planned.shape, planned.resolved, settings.workload
    prompt = sent * MARGIN * length_facts(work.prompt_tokens).longest
    output = sent * MARGIN * length_facts(work.output_tokens).longest
    cap = min(planned.cap, sent)
    graph_bs = resolved.cuda_graph_max_bs if uses_graph(profile, shape) else 0
    return (
        _layout(profile, planned),
        cap,
        min(planned.most_running, sent),
        min(resolved.chunk_tokens, prompt),
        resolved.attention_backend,
        min(resolved.max_total_tokens, prompt + output),
        min(graph_bs, cap),
        graph_bs > 0,
        uses_prefill_graph(profile, shape),
        kept_apart(planned.launch.server_args),
    )


def _layout(profile: Profile, planned: PlannedSetting) -> Hashable:
    shape = planned.shape
    depth = shape.pp_async_batch_depth if shape.pp_size > 1 else 0
    sizes = (shape.tp_size, shape.pp_size, shape.ep_size, planned.dp_size, depth)
    return (*sizes, planned.launch.replicas, stage_layers(profile.model.layers, shape))


def same_computation(
    settings: StudySettings, profile: Profile, runnable: Iterable[PlannedSetting]
) -> list[list[PlannedSetting]]:
    """The settings in groups that the load cannot tell apart, in their order."""
    groups: dict[Hashable, list[PlannedSetting]] = {}
    for planned in runnable:
        groups.setdefault(load_key(settings, profile, planned), []).append(planned)
    return list(groups.values())


def equivalents(
    profile: Profile, groups: Sequence[Sequence[PlannedSetting]]
) -> tuple[Equivalent, ...]:
    """The groups of several settings, with the reason; the larger ones first."""
    found: list[Equivalent] = []
    for members in groups:
        if len(members) > 1:
            is_equal = len({flag_key(profile, member) for member in members}) == 1
            basis = Sameness.FLAGS if is_equal else Sameness.COMPUTATION
            found.append(Equivalent(basis, tuple(member.params for member in members)))
    return tuple(sorted(found, key=lambda each: -len(each.settings)))


def near(one: float, other: float) -> bool:
    """Whether two rates differ by less than `NEAR`."""
    return abs(one - other) < NEAR * max(one, other)


def may_be_near(one: PlannedSetting, other: PlannedSetting) -> bool:
    """Whether the model knows every difference of two settings."""
    return kept_apart(one.launch.server_args) == kept_apart(other.launch.server_args)
