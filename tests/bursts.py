"""Bursts on the pipeline model, as a person with a script measures a server.

Two warm-up calls of 16 tokens, then all requests at once; the throughput is all tokens over the
time until the slowest request has ended. Virtual time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runner.engines.virtual_load import SEND_GAP_S
from runner.machine.hardware import REQUEST_S, Profile
from runner.pipeline import Pipeline, PipelineRequest, ServerShape

WARMUPS = 2
WARMUP_TOKENS = 16
PAUSE_S = 1.0
PROMPT_TOKENS = 64
PERIODS = 4  # of a closed loop: the first fills the slots, the others count


@dataclass(frozen=True)
class Burst:
    """What came out. Per GPU: mean watts and busy share; `slots`: the most requests of each."""

    tokens_per_s: float
    power_w: tuple[float, ...]
    busy: tuple[float, ...]
    slots: Mapping[int, int]


def spread_lengths(count: int, low: float, high: float, seed: int) -> list[int]:
    """The middles of `count` equal parts of [low, high], in a seeded order."""
    lengths = [max(round(low + (high - low) * (i + 0.5) / count), 1) for i in range(count)]
    random.Random(seed).shuffle(lengths)
    return lengths


def run_burst(
    profile: Profile,
    shape: ServerShape,
    lengths: Sequence[int],
    *,
    seed: int = 1,
    gap_s: float = SEND_GAP_S,
) -> Burst:
    """Warm up, send one request per length, `gap_s` after each other, and wait for the slowest."""
    pipeline = Pipeline(profile, shape, seed)
    start_s = _warm_up(pipeline)
    before = pipeline.gpu_activity(start_s)
    for place, tokens in enumerate(lengths):
        sent_s = start_s + place * gap_s
        pipeline.submit(PipelineRequest(f"r{place}", PROMPT_TOKENS, tokens), sent_s + REQUEST_S)
    end_s = start_s
    slots: dict[int, int] = {}
    while pipeline.next_step_s() is not None:
        step = pipeline.step()
        for batch in step.batches:
            if not batch.is_prefill:
                slots[batch.slot] = max(slots.get(batch.slot, 0), batch.running)
        if step.tokens:
            end_s = step.tokens[-1].time_s
    wall_s = end_s - start_s
    gpus = list(zip(before, pipeline.gpu_activity(end_s), strict=True))
    return Burst(
        tokens_per_s=sum(lengths) / wall_s,
        power_w=tuple((new.energy_j - old.energy_j) / wall_s for old, new in gpus),
        busy=tuple((new.busy_s - old.busy_s) / wall_s for old, new in gpus),
        slots=dict(sorted(slots.items())),
    )


def run_closed_loop(
    profile: Profile, shape: ServerShape, lengths: Sequence[int], *, seed: int = 1
) -> float:
    """Tokens/s of a closed loop of `len(lengths)` streams, after its first period."""
    pipeline = Pipeline(profile, shape, seed)
    start_s = _warm_up(pipeline)
    draws = random.Random(seed)
    streams = len(lengths)
    sent = 0

    def send(now_s: float) -> None:
        nonlocal sent
        tokens = lengths[sent] if sent < streams else draws.choice(lengths)
        pipeline.submit(PipelineRequest(f"r{sent}", PROMPT_TOKENS, tokens), now_s + REQUEST_S)
        sent += 1

    for place in range(streams):
        send(start_s + place * SEND_GAP_S)
    finished, counted = 0, 0
    opened_s = now_s = start_s
    while finished < PERIODS * streams:
        for token in pipeline.step().tokens:
            now_s = token.time_s
            counted += 1
            if token.is_last:
                finished += 1
                send(now_s)
                if finished == streams:
                    opened_s, counted = now_s, 0
    return counted / (now_s - opened_s)


def _warm_up(pipeline: Pipeline) -> float:
    """Two calls one after another; returns when the burst may start."""
    now_s = 0.0
    for place in range(WARMUPS):
        request = PipelineRequest(f"warm-up-{place}", PROMPT_TOKENS, WARMUP_TOKENS)
        pipeline.submit(request, now_s)
        while pipeline.next_step_s() is not None:
            for token in pipeline.step().tokens:
                now_s = token.time_s
    return now_s + PAUSE_S
