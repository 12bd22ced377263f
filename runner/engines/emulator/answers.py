"""The bytes of an answer: one server-sent event per chunk, or one JSON document.

The emulated model always says the same two words in turn, as a model with random weights does.
Their ids have one width, so what a chunk repeats (SGLang's chunks are cumulative by default) is a
slice of a text made once, and an event costs about a microsecond.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

WORDS = (871, 208)
LEAD_NATS = 4.0
_IDS = b"871,208,"
_TEXT = b" t871 t208"
_ID_WIDTH = len(_IDS) // 2
_TEXT_WIDTH = len(_TEXT) // 2
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a request ended, in SGLang's words."""

    kind: str
    message: str | None = None

    def to_json(self, tokens: int) -> dict[str, object]:
        """The finish_reason of /generate."""
        if self.kind == "abort":
            return {"type": "abort", "message": self.message, "status_code": None, "err_type": None}
        return {"type": self.kind, "length": tokens}


LENGTH = Finish("length")
ABORTED = Finish("abort", "Aborted")


@dataclass(slots=True)
class RequestTimes:
    """One request's dates, on a calendar that runs at the emulated pace, and its durations."""

    received_date: float
    received_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None

    def copy(self) -> RequestTimes:
        """Another request of the same call."""
        return replace(self)

    def note(self, now_s: float) -> None:
        """A token leaves now."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s

    def date(self, clock_s: float) -> float:
        """The calendar's reading when the clock read `clock_s`."""
        return self.received_date + clock_s - self.received_s

    def e2e_s(self) -> float:
        """Received to last token."""
        return (self.last_token_s or self.received_s) - self.received_s


class Answer(Protocol):
    """How one route answers one request."""

    def event(self, tokens: int, finish: Finish | None) -> bytes:
        """What a stream sends once the request has `tokens` tokens; `finish` on the last."""
        ...


def output_ids(tokens: int) -> bytes:
    """The first `tokens` ids, separated by commas."""
    return (_IDS * ((tokens + 1) // 2))[: tokens * _ID_WIDTH - 1] if tokens else b""


def output_text(tokens: int) -> bytes:
    """The first `tokens` words as text."""
    return (_TEXT * ((tokens + 1) // 2))[: tokens * _TEXT_WIDTH]


def logprobs(tokens: int) -> dict[str, object]:
    """What `return_logprob` tells of the first `tokens` tokens: each leads by `LEAD_NATS`.

    The runner-up is the other word, and there is no third.
    """
    pairs = [(WORDS[place % 2], WORDS[1 - place % 2]) for place in range(tokens)]
    best = -math.log1p(math.exp(-LEAD_NATS))
    return {
        "output_token_logprobs": [[best, token, None] for token, _ in pairs],
        "output_top_logprobs": [
            [[best, token, None], [best - LEAD_NATS, other, None]] for token, other in pairs
        ],
    }


def encode(value: object) -> bytes:
    """JSON without spaces, as SGLang writes it."""
    return json.dumps(value, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Place:
    """Where an answer comes from: its number in a list, and its replica where there are several."""

    index: int | None = None
    dp_rank: int | None = None


class GenerateAnswer:
    """/generate: cumulative ids (and text, with a tokenizer), or the new ones only."""

    def __init__(
        self,
        request_id: str,
        prompt_tokens: int,
        cached_tokens: int,
        times: RequestTimes,
        options: GenerateOptions,
        place: Place,
    ) -> None:
        self._end = b"}" if place.index is None else b',"index":%d}' % place.index
        self._times = times
        self._options = options
        self._sent = 0
        cached = {"device": cached_tokens, "host": 0} if cached_tokens else None
        self._meta: dict[str, object] = {
            "id": request_id,
            "finish_reason": None,
            "prompt_tokens": prompt_tokens,
            "weight_version": "default",
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": 0,
            "cached_tokens": cached_tokens,
            "cached_tokens_details": cached,
            "dp_rank": place.dp_rank,
        }
        before, self._after = encode(self._meta).split(b'"completion_tokens":0')
        self._middle = b'],"meta_info":' + before + b'"completion_tokens":'

    def event(self, tokens: int, finish: Finish | None) -> bytes:
        start = self._sent if self._options.is_incremental else 0
        is_first = self._sent == 0
        self._sent = tokens
        if finish is not None or is_first:
            meta = encode(self._full_meta(tokens, finish))
            output = self._output(start, tokens)
            return b'data: %b],"meta_info":%b%b\n\n' % (output, meta, self._end)
        return b"data: %b%b%d%b%b\n\n" % (
            self._output(start, tokens),
            self._middle,
            tokens,
            self._after,
            self._end,
        )

    def document(self, tokens: int, finish: Finish) -> bytes:
        """What is sent without a stream."""
        meta = encode(self._full_meta(tokens, finish))
        return b'%b],"meta_info":%b}' % (self._output(0, tokens), meta)

    def _output(self, start: int, tokens: int) -> bytes:
        ids = output_ids(tokens)
        if start:
            ids = ids[start * _ID_WIDTH :]
        if not self._options.has_text:
            return b'{"output_ids":[' + ids
        text = output_text(tokens)[start * _TEXT_WIDTH :]
        return b'{"text":"%b","output_ids":[%b' % (text, ids)

    def _full_meta(self, tokens: int, finish: Finish | None) -> dict[str, object]:
        times = self._times
        meta = {**self._meta, "completion_tokens": tokens}
        first_s = times.first_token_s
        if finish is not None:
            meta["finish_reason"] = finish.to_json(tokens)
            meta["e2e_latency"] = times.e2e_s()
            meta["request_received_ts"] = times.received_date
            if self._options.has_times and first_s is not None:
                decode_s = times.e2e_s() - (first_s - times.received_s)
                meta["first_token_latency"] = first_s - times.received_s
                meta["decode_throughput"] = (tokens - 1) / decode_s if decode_s > 0 else None
            meta["request_finished_ts"] = times.date(times.received_s + times.e2e_s())
            if self._options.has_logprobs:
                meta |= logprobs(tokens)
        if first_s is not None:
            meta["response_sent_to_client_ts"] = times.date(first_s)
        return meta


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What server flags decide of /generate's answers; `has_logprobs`: the request asks so."""

    has_text: bool
    is_incremental: bool
    has_times: bool
    has_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class UsageOptions:
    """What `stream_options` asks for, and whether the server reports what it had cached."""

    at_end: bool = False
    always: bool = False
    has_cached: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of its call's continuations an answer is, and what all of them share."""

    request_id: str
    index: int
    model: str
    created: int
    prompt_tokens: int


def usage(prompt_tokens: int, tokens: int) -> dict[str, object]:
    """The OpenAI routes' count of tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + tokens,
        "completion_tokens": tokens,
        "reasoning_tokens": 0,
    }


class CompletionAnswer:
    """/v1/completions: each chunk carries the new text only."""

    def __init__(self, choice: Choice, *, has_usage: bool) -> None:
        self._choice = choice
        self._has_usage = has_usage
        self._sent = 0
        self._head: dict[str, object] = {
            "id": choice.request_id,
            "object": "text_completion",
            "created": choice.created,
            "model": choice.model,
        }
        self._before = b"data: %b," % encode(self._head)[:-1]
        self._open = b'%b"choices":[{"index":%d,"text":"' % (self._before, choice.index)

    def event(self, tokens: int, finish: Finish | None) -> bytes:
        text = output_text(tokens)[self._sent * _TEXT_WIDTH :]
        self._sent = tokens
        counts = b"null"
        if self._has_usage:
            counts = encode(usage(self._choice.prompt_tokens, tokens))
        return (
            b'%b%b","logprobs":null,"finish_reason":%b,"matched_stop":null}],"usage":%b}\n\n'
        ) % (self._open, text, _reason(finish), counts)

    def usage_event(self, counts: dict[str, object]) -> bytes:
        """The chunk without choices that counts a stream's tokens."""
        return b'%b"choices":[],"usage":%b}\n\n' % (self._before, encode(counts))

    def choice(self, tokens: int, finish: Finish) -> dict[str, object]:
        """The whole continuation, without a stream."""
        return {
            "index": self._choice.index,
            "text": output_text(tokens).decode(),
            "logprobs": None,
            "finish_reason": finish.kind,
            "matched_stop": None,
        }

    def document(self, choices: list[dict[str, object]], counts: dict[str, object]) -> bytes:
        """What is sent without a stream."""
        metadata = {"weight_version": "default"}
        return encode({**self._head, "choices": choices, "usage": counts, "metadata": metadata})


class ChatAnswer:
    """/v1/chat/completions: first the role, then new text, then the reason, in chunks each."""

    def __init__(self, choice: Choice, *, has_usage: bool) -> None:
        self._choice = choice
        self._has_usage = has_usage
        self._sent = 0
        self._has_role = False
        self._head: dict[str, object] = {
            "id": choice.request_id,
            "created": choice.created,
            "model": choice.model,
        }

    def event(self, tokens: int, finish: Finish | None) -> bytes:
        events = []
        if not self._has_role:
            self._has_role = True
            events.append(self._chunk({"role": "assistant", "content": ""}, 0))
        text = output_text(tokens)[self._sent * _TEXT_WIDTH :]
        if text:
            events.append(self._chunk({"role": None, "content": text.decode()}, tokens))
        self._sent = tokens
        if finish is not None:
            events.append(self._chunk({"role": None, "content": None}, tokens, finish.kind))
        return b"".join(events)

    def usage_event(self, counts: dict[str, object]) -> bytes:
        """The chunk without choices that counts a stream's tokens."""
        return self._event([], counts)

    def choice(self, tokens: int, finish: Finish) -> dict[str, object]:
        """The whole continuation, without a stream."""
        message = {"role": "assistant", "content": output_text(tokens).decode()}
        return {
            "index": self._choice.index,
            "message": {**message, "reasoning_content": None, "tool_calls": None},
            "logprobs": None,
            "finish_reason": finish.kind,
            "matched_stop": None,
        }

    def document(self, choices: list[dict[str, object]], counts: dict[str, object]) -> bytes:
        """What is sent without a stream."""
        metadata = {"weight_version": "default"}
        head = {**self._head, "object": "chat.completion"}
        return encode({**head, "choices": choices, "usage": counts, "metadata": metadata})

    def _chunk(self, delta: Mapping[str, object], tokens: int, reason: str | None = None) -> bytes:
        choice = {
            "index": self._choice.index,
            "delta": {**delta, "reasoning_content": None, "tool_calls": None},
            "logprobs": None,
            "finish_reason": reason,
            "matched_stop": None,
        }
        counts = usage(self._choice.prompt_tokens, tokens) if self._has_usage else None
        return self._event([choice], counts)

    def _event(self, choices: list[object], counts: dict[str, object] | None) -> bytes:
        head = {**self._head, "object": "chat.completion.chunk"}
        return b"data: %b\n\n" % encode({**head, "choices": choices, "usage": counts})


def _reason(finish: Finish | None) -> bytes:
    return b"null" if finish is None else b'"%b"' % finish.kind.encode()
