"""What a body asks for: the prompts, how many tokens of each, how many samples, under which ids."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from runner.engines.emulator.info import max_input_tokens
from runner.engines.emulator.server import RequestRefused
from runner.engines.emulator.setup import ServerSetup

Body: TypeAlias = Mapping[str, Any]
GENERATE_DEFAULT_TOKENS = 128
COMPLETION_DEFAULT_TOKENS = 16
TEMPLATE_TOKENS = 4
MOST_SAMPLES = 128  # one request of more would hold everybody else up


@dataclass(frozen=True, slots=True)
class Prompt:
    """What was sent to be continued: a hash of its content, and its length."""

    content: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, and how many tokens to add to it."""

    prompt: Prompt
    wanted: int


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request: `samples` continuations of each prompt, one id each, prompt by prompt."""

    asks: tuple[Ask, ...]
    samples: int
    request_ids: tuple[str, ...]
    is_list: bool


def generate_call(body: Body, setup: ServerSetup) -> Call:
    """/generate; raises RequestRefused."""
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise RequestRefused("Either text or input_ids should be provided, and not both.")
    if ids is None and not setup.has_tokenizer:
        raise RequestRefused(
            "The engine initialized with skip_tokenizer_init=True cannot accept text prompts. "
            "Please provide input_ids or re-initialize the engine with "
            "skip_tokenizer_init=False."
        )
    prompts, is_batch = _texts(text) if ids is None else _token_lists(ids)
    sampling = _sampling(body.get("sampling_params"), len(prompts))
    samples = _samples(sampling[0])
    if any(_samples(params) != samples for params in sampling):
        raise RequestRefused("The parallel_sample_num should be the same for all samples.")
    wanted = [_count(params, "max_new_tokens", GENERATE_DEFAULT_TOKENS) for params in sampling]
    for count in wanted:
        if count < 0:
            raise RequestRefused(f"max_new_tokens must be at least 0, got {count}.")
    asks = [_ask(prompt, count, setup) for prompt, count in zip(prompts, wanted, strict=True)]
    return _call(body, asks, samples, is_batch=is_batch)


def completion_call(body: Body, setup: ServerSetup) -> Call:
    """/v1/completions; raises RequestRefused."""
    _check_openai(setup)
    prompt = body.get("prompt")
    if not isinstance(prompt, str | list):
        raise RequestRefused(f"Prompt must be a text or a list, got {prompt!r}.")
    if not prompt or (isinstance(prompt, list) and not any(prompt)):
        raise RequestRefused("Prompt cannot be empty")
    is_text = isinstance(prompt, str) or isinstance(prompt[0], str)
    prompts, is_batch = _texts(prompt) if is_text else _token_lists(prompt)
    wanted = _positive("max_tokens", _count(body, "max_tokens", COMPLETION_DEFAULT_TOKENS))
    asks = [_ask(each, wanted, setup) for each in prompts]
    return _call(body, asks, _samples(body), is_batch=is_batch)


def chat_call(body: Body, setup: ServerSetup) -> Call:
    """/v1/chat/completions; raises RequestRefused."""
    _check_openai(setup)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestRefused("Messages cannot be empty.")
    prompt = _chat_prompt(messages)
    name = "max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"
    rest = max(1, max_input_tokens(setup) - prompt.tokens)
    wanted = _positive(name, _count(body, name, rest))
    return _call(body, [_ask(prompt, wanted, setup)], _samples(body), is_batch=False)


def _call(body: Body, asks: Sequence[Ask], samples: int, *, is_batch: bool) -> Call:
    is_list = is_batch or samples > 1
    ids = _request_ids(body.get("rid"), len(asks), is_list=is_list)
    if samples > 1:  # as in SGLang, samples do not keep the ids that were sent
        ids = [uuid.uuid4().hex for _ in range(len(asks) * samples)]
    if len(set(ids)) < len(ids):
        raise RequestRefused("Duplicate request IDs detected within the request.")
    return Call(tuple(asks), samples, tuple(ids), is_list)


def _request_ids(rid: object, count: int, *, is_list: bool) -> list[str]:
    if rid is None or rid == "":
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [f"{rid}_{number}" for number in range(count)] if is_list else [rid]
    if not is_list or not isinstance(rid, list) or not all(isinstance(one, str) for one in rid):
        raise RequestRefused("The rid should be a string or a list of strings.")
    if len(rid) != count:
        raise RequestRefused(
            "The specified rids length mismatch with the batch_size for batch processing."
        )
    return rid


def _ask(prompt: Prompt, wanted: int, setup: ServerSetup) -> Ask:
    """Check a prompt's length; what exceeds the KV cache is cut off, as SGLang does."""
    longest, context = max_input_tokens(setup), setup.context_len
    if prompt.tokens > longest:
        raise RequestRefused(
            f"The input ({prompt.tokens} tokens) is longer than the model's context length "
            f"({longest} tokens)."
        )
    if prompt.tokens + wanted > context:
        raise RequestRefused(
            "Requested token count exceeds the model's maximum context length of "
            f"{context} tokens. You requested a total of {prompt.tokens + wanted} tokens: "
            f"{prompt.tokens} tokens from the input messages and {wanted} tokens for the "
            "completion."
        )
    return Ask(prompt, max(1, min(wanted, longest - prompt.tokens + 1)))


def _check_openai(setup: ServerSetup) -> None:
    if not setup.has_tokenizer:
        raise RequestRefused(
            "The OpenAI routes need a tokenizer; the engine was started with "
            "skip_tokenizer_init=True."
        )


def _sampling(params: object, prompts: int) -> list[Body]:
    """The sampling parameters of each prompt."""
    if params is None or isinstance(params, dict):
        return [params or {}] * prompts
    if not isinstance(params, list) or not all(isinstance(each, dict) for each in params):
        raise RequestRefused("sampling_params must be an object, or a list of one per prompt.")
    if len(params) != prompts:
        raise RequestRefused("The length of sampling_params should be equal to the batch size.")
    return params


def _samples(params: Body) -> int:
    samples = _positive("n", _count(params, "n", 1))
    if samples > MOST_SAMPLES:
        raise RequestRefused(f"n must be at most {MOST_SAMPLES}, got {samples}.")
    return samples


def _token_lists(ids: object) -> tuple[list[Prompt], bool]:
    """One prompt or several as token ids, and whether it was a list of prompts."""
    if not isinstance(ids, list) or not ids:
        raise RequestRefused("input_ids cannot be empty.")
    if isinstance(ids[0], list):
        return [_ids_prompt(each) for each in ids], True
    return [_ids_prompt(ids)], False


def _texts(text: object) -> tuple[list[Prompt], bool]:
    """One prompt or several as text, and whether it was a list of prompts."""
    if isinstance(text, list) and text:
        return [_text_prompt(each) for each in text], True
    return [_text_prompt(text)], False


def _ids_prompt(ids: object) -> Prompt:
    if not isinstance(ids, list) or not ids:
        raise RequestRefused("input_ids cannot be empty.")
    if not all(type(token) is int and token >= 0 for token in ids):
        raise RequestRefused("input_ids must be whole numbers from 0 on.")
    return Prompt(hash(tuple(ids)), len(ids))


def _text_prompt(text: object) -> Prompt:
    """A word is a token."""
    if not isinstance(text, str):
        raise RequestRefused(f"A prompt must be a text, got {text!r}.")
    return Prompt(hash(text), max(1, len(text.split())))


def _chat_prompt(messages: list[object]) -> Prompt:
    """The words, and what a chat template adds to each message."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    texts = [text if isinstance(text, str) else json.dumps(text) for text in contents]
    words = sum(len(text.split()) for text in texts)
    return Prompt(hash(json.dumps(messages)), words + TEMPLATE_TOKENS * len(messages))


def _count(values: Body, name: str, default: int) -> int:
    value = values.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise RequestRefused(f"{name} must be a whole number, got {value!r}.")
    return value


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise RequestRefused(f"{name} must be positive, got {value}.")
    return value
