"""What is said of many settings at once: why some cannot run, what is wasted in others. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from runner.forecast.lengths import length_facts
from runner.forecast.setting import PlannedSetting
from runner.label import setting_label
from runner.launch import CAP
from runner.machine.hardware import Profile
from runner.machine.shape import highest_live_cap, slots, uses_graph
from runner.settings import StudySettings
from runner.trial import LoadProtocol, Params


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason that `count` settings share; `example` is the first of them in words."""

    reason: str
    count: int
    example: str


def group(found: Iterable[tuple[str, str]]) -> tuple[Finding, ...]:
    """Pairs of reason and example as one finding a reason, the most frequent first."""
    counts: dict[str, int] = {}
    examples: dict[str, str] = {}
    for reason, example in found:
        counts[reason] = counts.get(reason, 0) + 1
        examples.setdefault(reason, example)
    ordered = sorted(counts, key=lambda reason: -counts[reason])
    return tuple(Finding(reason, counts[reason], examples[reason]) for reason in ordered)


def refusal_example(params: Params, text: str) -> str:
    """A refused setting with its whole reason."""
    return f"{setting_label(params)}: {text}"


def most_per_engine(settings: StudySettings, planned: PlannedSetting) -> int | None:
    """The most requests one server is sent at a time; None for an open loop, which has no limit."""
    work = settings.workload
    if work.protocol is LoadProtocol.OPEN_LOOP:
        return None
    return math.ceil(max(work.concurrency) / planned.engines)


def wastes(
    settings: StudySettings, profile: Profile, planned: PlannedSetting
) -> Iterator[tuple[str, str]]:
    """What a setting that runs wastes at the highest rung, each with the setting as an example."""
    label = setting_label(planned.params)
    for reason, numbers in _wastes(settings, profile, planned):
        yield reason, f"{label}: {numbers}"


def _wastes(
    settings: StudySettings, profile: Profile, planned: PlannedSetting
) -> Iterator[tuple[str, str]]:
    shape, resolved, cap = planned.shape, planned.resolved, planned.cap
    if shape.cuda_graph and not uses_graph(profile, shape):
        reason = "the attention backend does not run in a CUDA graph: every step runs eager"
        yield reason, resolved.attention_backend
    if CAP in planned.launch.server_args:
        limit = highest_live_cap(resolved, shape)
        if cap > limit:
            reason = f"{CAP} cannot be set live (above max_running_requests // pp_size): "
            yield f"{reason}each value needs a launch of its own", f"{cap} > {limit}"
    sent = most_per_engine(settings, planned)
    if sent is not None:
        yield from _wasted_at(settings, profile, planned, sent)


def _wasted_at(
    settings: StudySettings, profile: Profile, planned: PlannedSetting, sent: int
) -> Iterator[tuple[str, str]]:
    """What is wasted when `sent` requests are in flight on each server."""
    shape, resolved = planned.shape, planned.resolved
    is_staged = shape.pp_size > 1
    rows = resolved.max_running_requests if is_staged else planned.most_running
    largest = min(planned.cap, sent, rows)
    if uses_graph(profile, shape) and resolved.cuda_graph_max_bs < largest:
        reason = "cuda_graph_max_bs is below the largest batch: larger batches run eager"
        yield reason, f"graphs up to {resolved.cuda_graph_max_bs}, batches up to {largest}"
    room = slots(shape) * planned.cap
    if is_staged and room < sent:
        reason = "slots x cap is below the concurrency: the rest waits"
        yield reason, f"{slots(shape)} x {planned.cap} < {sent}"
    if rows < sent:
        reason = "max_running_requests is below the concurrency: the rest waits"
        yield reason, f"{rows} < {sent}"
    work = settings.workload
    kept = length_facts(work.prompt_tokens).mean + length_facts(work.output_tokens).mean
    if resolved.max_total_tokens < sent * kept:
        reason = "the KV cache is smaller than what the concurrency needs: the rest waits"
        yield reason, f"{resolved.max_total_tokens} tokens < {sent} x {kept:.0f}"
    if is_staged and sent < shape.pp_size:
        reason = "fewer requests than stages: some stages are always idle"
        yield reason, f"{sent} requests, {shape.pp_size} stages"
    elif (
        is_staged
        and work.protocol is LoadProtocol.BURST
        and (shape.pp_size - 1) * planned.cap >= sent
    ):
        reason = "the burst fills fewer slots than there are stages: stages are idle"
        filled = math.ceil(sent / planned.cap)
        yield reason, f"{sent} requests fill {filled} of {shape.pp_size} stages' slots"
