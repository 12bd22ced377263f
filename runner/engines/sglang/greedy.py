"""The canary's prompts sent to one server, and its greedy answers read.

The prompts are requests of their own, some milliseconds apart: sent as one batch, a server with a
pipeline would take them all into one slot, and what goes wrong between slots would not show.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from runner.canary import PROMPTS, TOKENS, GreedyOutput, prompts_within
from runner.clock import Clock
from runner.engines.sglang.control import Control
from runner.errors import ServerFailed

GAP_S = 0.006


def greedy_outputs(
    url: str, log_path: str, clock: Clock, vocabulary: int | None, queue: int | None = None
) -> tuple[GreedyOutput, ...]:
    """Continue every prompt, all at a time; `vocabulary` is how many tokens the model has.

    A server that lets no more than `queue` requests wait is not sent more than these at a time.

    Raises ServerFailed when one is not answered, or not with all its tokens.
    """
    prompts = prompts_within(vocabulary)
    gap_wall_s = clock.wall_duration_s(GAP_S)

    def ask(number: int) -> GreedyOutput:
        time.sleep(number * gap_wall_s)
        control = Control(url, log_path)
        try:
            output = read_output(control.continue_greedily(prompts[number], TOKENS))
        finally:
            control.close()
        if len(output.tokens) != TOKENS:
            found = f"{len(output.tokens)} of {TOKENS} greedy tokens"
            raise ServerFailed(f"prompt {number} was answered with {found}", log_path)
        return output

    at_once = len(PROMPTS) if queue is None else max(1, min(queue, len(PROMPTS)))
    with ThreadPoolExecutor(max_workers=at_once, thread_name_prefix="canary") as pool:
        return tuple(pool.map(ask, range(len(PROMPTS))))


def read_output(answer: Mapping[str, object]) -> GreedyOutput:
    """The tokens of an answer of /generate, and their leads as far as it tells them.

    Versions that leave `output_ids` out tell the ids with the log-probabilities.
    """
    meta = answer.get("meta_info")
    told: Mapping[str, object] = meta if isinstance(meta, Mapping) else {}
    chosen = _sequence(told.get("output_token_logprobs"))
    ids = _sequence(answer.get("output_ids")) or [_pair(entry)[1] for entry in chosen]
    tokens = tuple(each for each in ids if isinstance(each, int) and not isinstance(each, bool))
    rivals = _sequence(told.get("output_top_logprobs"))
    leads = tuple(_lead(token, place, rivals) for place, token in enumerate(tokens))
    return GreedyOutput(tokens, leads)


def _lead(token: int, place: int, rivals: Sequence[object]) -> float | None:
    """How far a token is ahead of the best other one, in nats; None: not told."""
    pairs = [_pair(entry) for entry in _sequence(rivals[place])] if place < len(rivals) else []
    known = [(p, i) for p, i in pairs if isinstance(p, float)]
    own = [value for value, other in known if other == token]
    others = [value for value, other in known if other != token]
    lead = own[0] - max(others) if own and others else math.nan
    return lead if math.isfinite(lead) else None


def _pair(entry: object) -> tuple[object, object]:
    """Log-probability and id of SGLang's [log-probability, id, text]."""
    parts = _sequence(entry)
    return (parts[0], parts[1]) if len(parts) > 1 else (None, None)


def _sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()
