"""The canary: fixed prompts that every launch continues greedily, and what came of comparing.

Wrong tokens must not win: a setting that computes something else is fast for nothing. Standard
library only; frozen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from runner.kinds import Params

TOKENS = 20
"""Tokens that each prompt is continued by."""
_PROMPTS, _PROMPT_TOKENS = 16, 24


def _prompts() -> Iterator[tuple[int, ...]]:
    """Repeating patterns of small ids, which models go on with surely."""
    for number in range(_PROMPTS):
        period = 2 + number % 4
        yield tuple(11 + 61 * number + 7 * (place % period) for place in range(_PROMPT_TOKENS))


PROMPTS = tuple(_prompts())
PROMPTS_DIGEST = hashlib.sha256(repr((TOKENS, PROMPTS)).encode()).hexdigest()[:16]
"""Outputs can be compared where this is the same."""


def prompts_within(vocabulary: int | None) -> tuple[tuple[int, ...], ...]:
    """The prompts for a model with so many tokens (None: not known), with no id beyond them."""
    highest = max(map(max, PROMPTS))
    if vocabulary is None or vocabulary > highest:
        return PROMPTS
    return tuple(tuple(token % vocabulary for token in prompt) for prompt in PROMPTS)


class CanaryState(StrEnum):
    """What comparing came to."""

    FIRST = "first"  # there was nothing to compare with yet
    MATCHED = "matched"
    MISMATCHED = "mismatched"


@dataclass(frozen=True, slots=True)
class GreedyOutput:
    """How one prompt was continued.

    `leads_nats` has for each token its log-probability less that of the runner-up; None: the
    server does not tell.
    """

    tokens: tuple[int, ...]
    leads_nats: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class CanaryRecord:
    """What the servers of a launch said in one trial; `outputs` by replica, then by prompt.

    `numerics` are the parameters by which settings may differ on purpose (measure/canary.py).
    """

    trial: int
    launch: int
    numerics: Params
    outputs: tuple[tuple[GreedyOutput, ...], ...]
    prompts: str = PROMPTS_DIGEST


@dataclass(frozen=True, slots=True)
class CanaryReference:
    """What all launches with the same `numerics` are compared with: one server's outputs."""

    trial: int
    launch: int
    numerics: Params
    outputs: tuple[GreedyOutput, ...]
    prompts: str = PROMPTS_DIGEST


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """How a trial's outputs compare.

    `tokens` are those that were compared, of all replicas; `parted` counts outputs that went
    another way at a near tie, which is no mistake. `trial` is the one compared with, None where
    replicas were compared with each other only. `asked`: how many times the prompts were sent;
    `difference` is the (first) mismatch, in words, also when the second answer had none.
    """

    state: CanaryState
    tokens: int
    parted: int
    trial: int | None
    asked: int = 1
    difference: str | None = None

    @property
    def words(self) -> str:
        """`matched #0: 320 tokens, 2 near ties parted`."""
        against = "" if self.trial is None else f" #{self.trial}"
        ties = f", {self.parted} near ties parted" if self.parted else ""
        again = ", asked twice" if self.asked > 1 else ""
        return f"{self.state}{against}: {self.tokens} tokens{ties}{again}"
