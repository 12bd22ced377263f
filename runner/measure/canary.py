"""Whether servers say what they should: greedy outputs compared with those of another launch. Pure.

Layouts and kernels round differently, so greedy outputs part where two tokens are nearly tied. That
is no mistake, and what follows cannot be compared any more. A difference at a token that clearly
led is one.

`CLEAR_LEAD_NATS`: logits of 16 to 32 have steps of 0.125 in bfloat16 (8 bits of significand), and
sums in another order move a logit by a few of these: two together by some tenths of a nat. A
lead of 1 nat (2.7 times as likely as the runner-up) is out of the reach of rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runner.canary import CanaryReference, CanaryResult, CanaryState, GreedyOutput
from runner.trial import Params

CLEAR_LEAD_NATS = 1.0
MOST_UNKNOWN = 0.25
"""The share of outputs that may part where neither server tells its leads: near ties are rare."""
NUMERICS = frozenset(
    (
        "dtype",
        "quantization",
        "quantize_and_serve",
        "torchao_config",
        "kv_cache_dtype",
        "model_path",
        "model",
        "revision",
        "load_format",
        "json_model_override_args",
        "model_loader_extra_config",
        "enable_fp32_lm_head",
        "enable_double_sparsity",
    )
)
NUMERICS_PREFIXES = ("speculative_", "quantization_", "modelopt_", "lora_", "ds_", "hf_")
"""Parameters that change what a model says on purpose: such settings have their own references."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    """One server against another: tokens that were compared, ties parted, the first mismatch."""

    tokens: int
    parted: int
    difference: str | None


def numerics_of(args: Params) -> Params:
    """Those parameters that change what a model says on purpose, by name."""
    names = sorted(n for n in args if n in NUMERICS or n.startswith(NUMERICS_PREFIXES))
    return {name: args[name] for name in names}


def judge_outputs(
    reference: CanaryReference | None,
    replicas: Sequence[Sequence[GreedyOutput]],
    before: CanaryResult | None = None,
) -> CanaryResult:
    """Compare every replica with the reference; without one, with the first replica.

    `before` is what the same servers' previous answer came to.
    """
    base = replicas[0] if reference is None else reference.outputs
    where = "replica 0" if reference is None else _name(reference)
    skipped = 1 if reference is None else 0
    compared = [
        _compare(base, outputs, f"replica {index}", where)
        for index, outputs in enumerate(replicas)
        if index >= skipped
    ]
    wrong = next((each.difference for each in compared if each.difference is not None), None)
    fine = CanaryState.FIRST if reference is None else CanaryState.MATCHED
    result = CanaryResult(
        state=fine if wrong is None else CanaryState.MISMATCHED,
        tokens=sum(each.tokens for each in compared),
        parted=sum(each.parted for each in compared),
        trial=None if reference is None else reference.trial,
        difference=wrong,
    )
    if before is None:
        return result
    return replace(result, asked=before.asked + 1, difference=wrong or before.difference)


def _name(reference: CanaryReference) -> str:
    return f"launch {reference.launch} (trial {reference.trial})"


def _compare(
    base: Sequence[GreedyOutput], outputs: Sequence[GreedyOutput], who: str, where: str
) -> _Comparison:
    tokens, parted, unknown = 0, 0, 0
    for prompt, (expected, got) in enumerate(zip(base, outputs, strict=True)):
        place = _parting(expected.tokens, got.tokens)
        tokens += len(expected.tokens) if place is None else place
        if place is None:
            continue
        lead = _lead(expected, place)
        lead = _lead(got, place) if lead is None else lead
        unknown += lead is None
        is_clear = lead is not None and lead >= CLEAR_LEAD_NATS
        if is_clear or unknown > MOST_UNKNOWN * len(base):
            words = (
                f"wrong output: {who} continues prompt {prompt} with {_token(got, place)} as "
                f"token {place}, {where} with {_token(expected, place)}, {_lead_words(lead)}"
            )
            return _Comparison(tokens, parted, words)
        parted += 1
    return _Comparison(tokens, parted, None)


def _parting(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Where two outputs begin to differ, None where they do not."""
    both = enumerate(zip(expected, got, strict=False))
    differ = (place for place, (one, other) in both if one != other)
    shorter = min(len(expected), len(got))
    is_longer = len(expected) != len(got)
    return next(differ, shorter if is_longer else None)


def _lead(output: GreedyOutput, place: int) -> float | None:
    return output.leads_nats[place] if place < len(output.leads_nats) else None


def _token(output: GreedyOutput, place: int) -> str:
    return str(output.tokens[place]) if place < len(output.tokens) else "nothing"


def _lead_words(lead: float | None) -> str:
    if lead is None:
        return "whose lead over the next best is not known"
    return f"{lead:.2f} nats ahead of the next best (rounding moves less than {CLEAR_LEAD_NATS:g})"
