"""Greedy outputs compared: where rounding may part them, and where it may not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runner.canary import PROMPTS, CanaryReference, CanaryState, GreedyOutput
from runner.measure.canary import CLEAR_LEAD_NATS, judge_outputs, numerics_of
from runner.trial import Params

TOKENS = (5, 6, 7, 8)
CLEAR, NEAR = 3.0, 0.25


def said(*tokens: int, leads: tuple[float | None, ...] = (CLEAR,) * 4) -> GreedyOutput:
    return GreedyOutput(tokens or TOKENS, leads)


def reference(*outputs: GreedyOutput) -> CanaryReference:
    return CanaryReference(trial=2, launch=1, numerics={}, outputs=outputs)


def test_the_prompts_differ_and_suit_any_vocabulary() -> None:
    assert len(PROMPTS) == len(set(PROMPTS)) >= 8
    assert {len(prompt) for prompt in PROMPTS} == {24}
    assert all(3 <= token <= 1000 for prompt in PROMPTS for token in prompt)


def test_equal_outputs_match_on_every_replica() -> None:
    result = judge_outputs(reference(said(), said()), [(said(), said())] * 3)
    assert (result.state, result.tokens, result.parted) == (CanaryState.MATCHED, 24, 0)
    assert (result.trial, result.difference, result.asked) == (2, None, 1)
    assert result.words == "matched #2: 24 tokens"


def test_a_near_tie_may_part_and_ends_the_comparison_of_its_prompt() -> None:
    tied = said(leads=(CLEAR, NEAR, CLEAR, CLEAR))
    result = judge_outputs(reference(tied, said()), [(said(5, 9, 9, 9), said())])
    assert (result.state, result.tokens, result.parted) == (CanaryState.MATCHED, 5, 1)
    assert result.words == "matched #2: 5 tokens, 1 near ties parted"


def test_a_difference_at_a_clear_lead_is_named() -> None:
    result = judge_outputs(reference(said(), said()), [(said(), said(5, 6, 9, 8))])
    assert result.state is CanaryState.MISMATCHED
    assert result.difference == (
        "wrong output: replica 0 continues prompt 1 with 9 as token 2, launch 1 (trial 2) with 7, "
        "3.00 nats ahead of the next best (rounding moves less than 1)"
    )


def test_the_tolerance_itself_is_a_clear_lead() -> None:
    at = said(leads=(CLEAR_LEAD_NATS,) * 4)
    below = said(leads=(CLEAR_LEAD_NATS - 0.01,) * 4)
    other = said(5, 6, 7, 9)
    assert judge_outputs(reference(at), [(other,)]).state is CanaryState.MISMATCHED
    assert judge_outputs(reference(below), [(other,)]).state is CanaryState.MATCHED


def test_the_other_servers_lead_counts_where_the_reference_tells_none() -> None:
    blind = said(leads=(None,) * 4)
    tied = said(5, 6, 7, 9, leads=(CLEAR, CLEAR, CLEAR, NEAR))
    assert judge_outputs(reference(blind), [(tied,)]).state is CanaryState.MATCHED
    assert judge_outputs(reference(blind), [(said(5, 6, 7, 9),)]).difference is not None


@pytest.mark.parametrize(("parted", "state"), [(4, "matched"), (5, "mismatched")])
def test_where_no_lead_is_known_few_outputs_may_part(parted: int, state: str) -> None:
    blind, other = said(leads=(None,) * 4), said(5, 6, 7, 9, leads=(None,) * 4)
    base = replace(reference(blind), outputs=(blind,) * 16)
    result = judge_outputs(base, [(other,) * parted + (blind,) * (16 - parted)])
    assert result.state == state
    if state == "mismatched":
        assert "whose lead over the next best is not known" in (result.difference or "")


def test_a_missing_token_is_a_difference() -> None:
    result = judge_outputs(reference(said()), [(said(5, 6, 7),)])
    assert "with nothing as token 3" in (result.difference or "")


def test_without_a_reference_replicas_are_compared_with_each_other() -> None:
    alike = judge_outputs(None, [(said(),), (said(),)])
    assert (alike.state, alike.tokens, alike.trial) == (CanaryState.FIRST, 4, None)
    apart = judge_outputs(None, [(said(),), (said(1, 6, 7, 8),)])
    assert apart.state is CanaryState.MISMATCHED
    assert "replica 1 continues prompt 0 with 1 as token 0, replica 0" in (apart.difference or "")
    alone = judge_outputs(None, [(said(),)])
    assert (alone.state, alone.tokens) == (CanaryState.FIRST, 0)


def test_what_the_second_answer_does_not_repeat_is_kept_in_words() -> None:
    before = judge_outputs(reference(said()), [(said(9, 6, 7, 8),)])
    again = judge_outputs(reference(said()), [(said(),)], before)
    assert again.state is CanaryState.MATCHED
    assert again == replace(again, asked=2, difference=before.difference)
    stands = judge_outputs(reference(said()), [(said(5, 6, 7, 9),)], before)
    assert (stands.state, stands.asked) == (CanaryState.MISMATCHED, 2)
    assert "with 9 as token 3" in (stands.difference or "")


def test_what_changes_numerics_on_purpose_is_compared_with_its_own_kind() -> None:
    args: Params = {
        "tp_size": 2,
        "attention_backend": "triton",
        "kv_cache_dtype": "fp8_e4m3",
        "speculative_algorithm": "EAGLE",
        "quantization": "fp8",
    }
    assert numerics_of(args) == {
        "kv_cache_dtype": "fp8_e4m3",
        "quantization": "fp8",
        "speculative_algorithm": "EAGLE",
    }
