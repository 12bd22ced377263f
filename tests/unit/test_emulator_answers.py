"""The bytes of answers: what a client of SGLang finds in them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.engines.emulator.answers import (
    ABORTED,
    LENGTH,
    WORDS,
    Answer,
    ChatAnswer,
    Choice,
    CompletionAnswer,
    GenerateAnswer,
    GenerateOptions,
    Place,
    RequestTimes,
    UsageOptions,
)
from runner.engines.emulator.exchange import Part
from runner.engines.emulator.forms import GenerateForm, OpenAiForm


def events(raw: bytes) -> list[Any]:
    """The JSON of each event in what a stream sent."""
    assert raw.endswith(b"\n\n")
    parts = raw.split(b"\n\n")[:-1]
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    return [json.loads(part[len(b"data: ") :]) for part in parts]


def stream(answer: Answer, tokens: int) -> list[Any]:
    """All events of a request that gets one token at a time."""
    raw = b"".join(answer.event(n, LENGTH if n == tokens else None) for n in range(1, tokens + 1))
    return events(raw)


def generate(
    *,
    has_text: bool = False,
    is_incremental: bool = False,
    cached_tokens: int = 0,
    index: int | None = None,
) -> GenerateAnswer:
    times = RequestTimes(received_date=1000.0, received_s=5.0)
    times.note(5.25)
    times.note(6.25)
    options = GenerateOptions(has_text, is_incremental, has_times=True)
    return GenerateAnswer("r1", 16, cached_tokens, times, options, Place(index))


def completion(index: int = 0, *, has_usage: bool = False) -> CompletionAnswer:
    return CompletionAnswer(Choice(f"r{index}", index, "m", 7, 3), has_usage=has_usage)


def chat() -> ChatAnswer:
    return ChatAnswer(Choice("r1", 0, "m", 7, 3), has_usage=False)


def openai(
    *answers: CompletionAnswer | ChatAnswer, at_end: bool = False, has_cached: bool = False
) -> OpenAiForm:
    return OpenAiForm(answers, 3, 2, UsageOptions(at_end=at_end, has_cached=has_cached))


def test_generate_is_cumulative() -> None:
    found = stream(generate(), 3)
    assert [event["output_ids"] for event in found] == [[871], [871, 208], [871, 208, 871]]
    assert [event["meta_info"]["completion_tokens"] for event in found] == [1, 2, 3]
    assert all("text" not in event for event in found)


def test_generate_with_a_tokenizer_sends_text_too() -> None:
    found = stream(generate(has_text=True), 3)
    assert [event["text"] for event in found] == [" t871", " t871 t208", " t871 t208 t871"]


def test_generate_incrementally_sends_what_is_new() -> None:
    answer = generate(has_text=True, is_incremental=True)
    raw = answer.event(1, None) + answer.event(4, None) + answer.event(5, LENGTH)
    found = events(raw)
    assert [event["output_ids"] for event in found] == [[871], [208, 871, 208], [871]]
    assert [event["text"] for event in found] == [" t871", " t208 t871 t208", " t871"]
    assert [event["meta_info"]["completion_tokens"] for event in found] == [1, 4, 5]


def test_generate_ends_with_its_reason_and_its_times() -> None:
    first, middle, last = (event["meta_info"] for event in stream(generate(cached_tokens=15), 3))
    assert first["finish_reason"] is middle["finish_reason"] is None
    assert first["response_sent_to_client_ts"] == 1000.25
    assert "e2e_latency" not in middle
    expected = {
        "id": "r1",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 16,
        "completion_tokens": 3,
        "cached_tokens": 15,
        "cached_tokens_details": {"device": 15, "host": 0},
        "e2e_latency": 1.25,
        "first_token_latency": 0.25,
        "decode_throughput": 2.0,
        "request_received_ts": 1000.0,
        "request_finished_ts": 1001.25,
    }
    assert {name: last[name] for name in expected} == expected


def test_generate_without_a_stream_says_the_same() -> None:
    document = json.loads(generate(has_text=True).document(3, LENGTH))
    assert document == stream(generate(has_text=True), 3)[-1]


def test_generate_numbers_the_events_of_a_list_but_not_its_documents() -> None:
    answer = generate(index=2)
    assert [event["index"] for event in stream(answer, 3)] == [2, 2, 2]
    form = GenerateForm([generate(index=0), generate(index=1)], is_list=True)
    first, second = json.loads(form.document([Part(1, LENGTH), Part(2, LENGTH)]))
    assert (first["output_ids"], second["output_ids"]) == ([871], [871, 208])
    assert "index" not in first


def test_an_aborted_request_says_so() -> None:
    (event,) = events(generate().event(0, ABORTED))
    assert event["output_ids"] == []
    assert event["meta_info"]["finish_reason"]["type"] == "abort"
    assert completion().choice(2, ABORTED)["finish_reason"] == "abort"


@pytest.mark.parametrize("tokens", [1, 2, 7, 256, 1001])
def test_ids_are_as_many_as_the_count_says(tokens: int) -> None:
    document = json.loads(generate(has_text=True).document(tokens, LENGTH))
    assert document["output_ids"] == [WORDS[n % 2] for n in range(tokens)]
    assert document["text"].split() == [f"t{WORDS[n % 2]}" for n in range(tokens)]


def test_completions_send_new_text_and_the_reason_last() -> None:
    found = stream(completion(), 3)
    choices = [event["choices"][0] for event in found]
    assert [choice["text"] for choice in choices] == [" t871", " t208", " t871"]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
    assert {event["object"] for event in found} == {"text_completion"}
    assert [event["usage"] for event in found] == [None, None, None]


def test_usage_comes_in_a_chunk_without_choices() -> None:
    assert openai(completion()).closing([Part(3, LENGTH)]) == b""
    (last,) = events(openai(completion(), at_end=True).closing([Part(3, LENGTH)]))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 6,
        "completion_tokens": 3,
        "reasoning_tokens": 0,
    }


def test_usage_adds_up_and_says_what_was_cached_when_the_server_reports_it() -> None:
    form = openai(completion(0), completion(1), at_end=True, has_cached=True)
    (last,) = events(form.closing([Part(3, LENGTH), Part(4, LENGTH)]))
    assert last["usage"]["completion_tokens"] == 7
    assert last["usage"]["total_tokens"] == 10
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_usage_on_every_chunk_when_asked() -> None:
    found = stream(completion(has_usage=True), 3)
    assert [event["usage"]["completion_tokens"] for event in found] == [1, 2, 3]


def test_a_completion_without_a_stream() -> None:
    form = openai(completion(0), completion(1))
    document = json.loads(form.document([Part(2, LENGTH), Part(1, LENGTH)]))
    assert [choice["text"] for choice in document["choices"]] == [" t871 t208", " t871"]
    assert [choice["index"] for choice in document["choices"]] == [0, 1]
    assert document["usage"]["completion_tokens"] == 3
    assert document["id"] == "r0"


def test_chat_opens_with_the_role_and_closes_with_the_reason() -> None:
    found = stream(chat(), 2)
    deltas = [event["choices"][0]["delta"] for event in found]
    assert [delta["role"] for delta in deltas] == ["assistant", None, None, None]
    assert [delta["content"] for delta in deltas] == ["", " t871", " t208", None]
    reasons = [event["choices"][0]["finish_reason"] for event in found]
    assert reasons == [None, None, None, "length"]
    (last,) = events(openai(chat(), at_end=True).closing([Part(2, LENGTH)]))
    assert (last["choices"], last["object"]) == ([], "chat.completion.chunk")
    assert last["usage"]["total_tokens"] == 5


def test_an_aborted_chat_without_a_token_says_its_role_and_its_reason() -> None:
    first, last = events(chat().event(0, ABORTED))
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert last["choices"][0]["finish_reason"] == "abort"


def test_chat_without_a_stream() -> None:
    document = json.loads(openai(chat()).document([Part(2, LENGTH)]))
    assert document["choices"][0]["message"]["content"] == " t871 t208"
    assert document["object"] == "chat.completion"
