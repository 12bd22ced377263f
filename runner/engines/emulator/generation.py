"""The routes that generate: /generate, /v1/completions, /v1/chat/completions."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from aiohttp import web

from runner.engines.emulator.answers import (
    DONE,
    Answer,
    ChatAnswer,
    CompletionAnswer,
    GenerateAnswer,
    RequestTimes,
    UsageOptions,
    encode,
)
from runner.engines.emulator.info import max_input_tokens
from runner.engines.emulator.reply import Reply, write_chunk
from runner.engines.emulator.server import (
    DOCUMENT_ABORT_DELAY_S,
    STREAM_ABORT_DELAY_S,
    EmulatedServer,
    Job,
    RequestRefused,
)
from runner.engines.emulator.serving import Demand

Body: TypeAlias = Mapping[str, Any]
GENERATE_DEFAULT_TOKENS = 128
COMPLETION_DEFAULT_TOKENS = 16
TEMPLATE_TOKENS = 4
STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """What was sent to be continued: a hash of its content, and its length."""

    content: int
    tokens: int


class Generation:
    """Serves the three routes of one server."""

    def __init__(self, server: EmulatedServer) -> None:
        self._server = server

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """SGLang's own route."""
        try:
            body = await read_object(request)
        except RequestRefused as err:
            return openai_error(err)
        is_stream = body.get("stream") is True
        try:
            job = self._generate_job(body)
        except RequestRefused as err:
            if is_stream:
                return await _refuse_stream(request, err)
            return json_response({"error": {"message": err.message}}, err.status)
        server = self._server
        times = RequestTimes(server.date(), server.clock.now_s())
        answer = GenerateAnswer(
            job.request_id,
            job.demand.prompt_tokens,
            job.demand.cached_tokens,
            times,
            server.setup.generate_options,
        )
        return await self._serve(request, job, answer, times, is_stream=is_stream)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's text completions."""
        return await self._openai(request, is_chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's chat completions."""
        return await self._openai(request, is_chat=True)

    async def _openai(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        try:
            body = await read_object(request)
            job = self._chat_job(body) if is_chat else self._completion_job(body)
            options = self._usage_options(body)
        except RequestRefused as err:
            return openai_error(err)
        server = self._server
        make = ChatAnswer if is_chat else CompletionAnswer
        model = str(body.get("model") or server.setup.model_name)
        created = int(server.date())
        answer = make(job.request_id, model, created, job.demand.prompt_tokens, options)
        times = RequestTimes(server.date(), server.clock.now_s())
        is_stream = body.get("stream") is True
        return await self._serve(request, job, answer, times, is_stream=is_stream)

    async def _serve(
        self,
        request: web.Request,
        job: Job,
        answer: Answer,
        times: RequestTimes,
        *,
        is_stream: bool,
    ) -> web.StreamResponse:
        server = self._server
        stream = await _open_stream(request) if is_stream else None
        reply = Reply(
            server.faults.answer(answer, job.demand),
            times,
            _transport(request) if stream is not None else None,
            server.setup.whole("stream_interval"),
            partial(server.on_end, job.request_id),
        )
        server.submit(job, reply)
        try:
            document = await reply.done
        except asyncio.CancelledError:
            delay_s = STREAM_ABORT_DELAY_S if is_stream else DOCUMENT_ABORT_DELAY_S
            server.forget(job.request_id, delay_s)
            raise
        return stream or web.Response(body=document, content_type="application/json")

    def _generate_job(self, body: Body) -> Job:
        sampling = body.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            raise RequestRefused("sampling_params must be an object.")
        ids, text = body.get("input_ids"), body.get("text")
        if (ids is None) == (text is None):
            raise RequestRefused("Either text or input_ids should be provided, and not both.")
        prompt = _text_prompt(text) if ids is None else _ids_prompt(ids)
        if ids is None and not self._server.setup.has_tokenizer:
            raise RequestRefused(
                "The engine initialized with skip_tokenizer_init=True cannot accept text prompts. "
                "Please provide input_ids or re-initialize the engine with "
                "skip_tokenizer_init=False."
            )
        wanted = _count(sampling, "max_new_tokens", GENERATE_DEFAULT_TOKENS)
        if wanted < 0:
            raise RequestRefused(f"max_new_tokens must be at least 0, got {wanted}.")
        if sampling.get("n") not in {None, 1}:
            raise RequestRefused("n > 1 is not supported by the emulated server.")
        return self._job(body, prompt, wanted)

    def _completion_job(self, body: Body) -> Job:
        self._check_openai(body)
        prompt = body.get("prompt")
        found = _ids_prompt(prompt) if isinstance(prompt, list) else _text_prompt(prompt)
        wanted = _count(body, "max_tokens", COMPLETION_DEFAULT_TOKENS)
        return self._job(body, found, _positive("max_tokens", wanted))

    def _chat_job(self, body: Body) -> Job:
        self._check_openai(body)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RequestRefused("Messages cannot be empty.")
        prompt = _chat_prompt(messages)
        name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        rest = max(1, max_input_tokens(self._server.setup) - prompt.tokens)
        return self._job(body, prompt, _positive(name, _count(body, name, rest)))

    def _job(self, body: Body, prompt: Prompt, wanted: int) -> Job:
        server, context = self._server, self._server.setup.context_len
        request_id = body.get("rid") or uuid.uuid4().hex
        if not isinstance(request_id, str):
            raise RequestRefused("rid must be a string; batches are not emulated.")
        if prompt.tokens > max_input_tokens(server.setup):
            raise RequestRefused(
                f"The input ({prompt.tokens} tokens) is longer than the model's context length "
                f"({max_input_tokens(server.setup)} tokens)."
            )
        if prompt.tokens + wanted > context:
            raise RequestRefused(
                "Requested token count exceeds the model's maximum context length of "
                f"{context} tokens. You requested a total of {prompt.tokens + wanted} tokens: "
                f"{prompt.tokens} tokens from the input messages and {wanted} tokens for the "
                "completion."
            )
        server.check_room(request_id)
        room = max_input_tokens(server.setup) - prompt.tokens + 1
        cached = server.find_cached(prompt.content, prompt.tokens)
        demand = Demand(prompt.tokens, max(1, min(wanted, room)), cached)
        return Job(request_id, prompt.content, demand)

    def _check_openai(self, body: Body) -> None:
        if not self._server.setup.has_tokenizer:
            raise RequestRefused(
                "The OpenAI routes need a tokenizer; the engine was started with "
                "skip_tokenizer_init=True."
            )
        if body.get("n") not in {None, 1}:
            raise RequestRefused("n > 1 is not supported by the emulated server.")

    def _usage_options(self, body: Body) -> UsageOptions:
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise RequestRefused("stream_options must be an object.")
        default = self._server.setup.args["stream_response_default_include_usage"]
        return UsageOptions(
            at_end=bool(options.get("include_usage", default)),
            always=bool(options.get("continuous_usage_stats", False)),
        )


async def read_object(request: web.Request) -> Body:
    """The JSON object in a request's body; raises RequestRefused for anything else."""
    try:
        body: Any = json.loads(await request.read())
    except (json.JSONDecodeError, UnicodeDecodeError) as err:
        raise RequestRefused(f"The body is not JSON: {err}") from err
    if not isinstance(body, dict):
        raise RequestRefused("The body must be a JSON object.")
    return body


def json_response(value: object, status: int = 200) -> web.Response:
    """JSON as SGLang writes it."""
    return web.Response(body=encode(value), status=status, content_type="application/json")


def openai_error(refused: RequestRefused) -> web.Response:
    """An error in the OpenAI routes' shape."""
    error = {
        "object": "error",
        "message": refused.message,
        "type": "BadRequest" if refused.status == web.HTTPBadRequest.status_code else "Error",
        "param": None,
        "code": refused.status,
    }
    return json_response(error, refused.status)


async def _open_stream(request: web.Request) -> web.StreamResponse:
    stream = web.StreamResponse(headers=STREAM_HEADERS)
    stream.enable_chunked_encoding()
    await stream.prepare(request)
    return stream


async def _refuse_stream(request: web.Request, refused: RequestRefused) -> web.StreamResponse:
    """SGLang has sent its 200 by then: the error is an event."""
    stream = await _open_stream(request)
    error = {
        "message": refused.message,
        "type": "invalid_request_error" if refused.status < 500 else "server_error",  # noqa: PLR2004
        "code": refused.status,
        "retryable": refused.status >= 500,  # noqa: PLR2004
    }
    transport = _transport(request)
    write_chunk(transport, b"data: " + encode({"error": error}) + b"\n\n")
    write_chunk(transport, DONE)
    return stream


def _transport(request: web.Request) -> asyncio.WriteTransport:
    transport = request.transport
    if transport is None:
        raise web.HTTPServiceUnavailable  # the client is gone
    return transport


def _ids_prompt(ids: object) -> Prompt:
    if not isinstance(ids, list) or not ids:
        raise RequestRefused("input_ids must be a list of at least one token id.")
    if not all(type(token) is int and token >= 0 for token in ids):
        raise RequestRefused("input_ids must be whole numbers; batches are not emulated.")
    return Prompt(hash(tuple(ids)), len(ids))


def _text_prompt(text: object) -> Prompt:
    """A word is a token."""
    if not isinstance(text, str):
        raise RequestRefused("The prompt must be one text; batches are not emulated.")
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
