"""How an answer of /generate is read: its tokens, and how far each is ahead."""

from __future__ import annotations

from typing import Any

import pytest

from runner.canary import PROMPTS, GreedyOutput, prompts_within
from runner.engines.emulator.answers import LEAD_NATS, logprobs
from runner.engines.sglang.greedy import read_output

META: dict[str, Any] = {
    "output_token_logprobs": [[-0.5, 7, None], [-0.1, 9, None]],
    "output_top_logprobs": [[[-0.5, 7, None], [-2.0, 4, None]], [[-0.1, 9, None], [-0.3, 7, None]]],
}


def test_tokens_and_leads() -> None:
    output = read_output({"output_ids": [7, 9], "meta_info": META})
    assert output.tokens == (7, 9)
    assert output.leads_nats == pytest.approx((1.5, 0.2))


def test_a_truth_is_no_token() -> None:
    assert read_output({"output_ids": [7, True, 9]}).tokens == (7, 9)


@pytest.mark.parametrize("size", [2, 100, 954, 955, 151_936, None])
def test_prompts_have_no_token_that_the_model_does_not_have(size: int | None) -> None:
    prompts = prompts_within(size)
    assert [len(prompt) for prompt in prompts] == [len(prompt) for prompt in PROMPTS]
    assert size is None or max(map(max, prompts)) < size
    if size is None or size > 954:
        assert prompts == PROMPTS


def test_versions_without_output_ids_tell_the_ids_with_the_log_probabilities() -> None:
    assert read_output({"text": " a b", "meta_info": META}).tokens == (7, 9)


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"output_top_logprobs": None},
        {"output_top_logprobs": [None, []]},
        {"output_top_logprobs": [[[-0.5, 7, None], [float("-inf"), 4, None]]]},
        {"output_top_logprobs": [[[-0.5, 7, None]], [["x", 9], 3]]},
    ],
)
def test_what_a_server_does_not_tell_is_unknown(meta: dict[str, Any]) -> None:
    answer = {"output_ids": [7, 9], "meta_info": meta}
    assert read_output(answer) == GreedyOutput((7, 9), (None, None))


def test_the_emulated_server_tells_leads() -> None:
    output = read_output({"output_ids": [871, 208], "meta_info": logprobs(2)})
    assert output.leads_nats == pytest.approx((LEAD_NATS, LEAD_NATS))
