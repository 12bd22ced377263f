"""The routes that generate: /generate, /v1/completions, /v1/chat/completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, TypeAlias

from aiohttp import web

from runner.engines.emulator.answers import (
    DONE,
    Answer,
    ChatAnswer,
    Choice,
    CompletionAnswer,
    GenerateAnswer,
    Place,
    RequestTimes,
    UsageOptions,
    encode,
)
from runner.engines.emulator.calls import Body, Call, chat_call, completion_call, generate_call
from runner.engines.emulator.exchange import Exchange, Form, write_chunk
from runner.engines.emulator.forms import GenerateForm, OpenAiForm
from runner.engines.emulator.reply import Reply
from runner.engines.emulator.server import (
    DOCUMENT_ABORT_DELAY_S,
    STREAM_ABORT_DELAY_S,
    EmulatedServer,
    Job,
    RequestRefused,
)
from runner.engines.emulator.serving import Demand

STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


Jobs: TypeAlias = list[tuple[EmulatedServer, Job]]


class Generation:
    """Serves the three routes of one port; replicas behind it take requests in turn."""

    def __init__(self, servers: Sequence[EmulatedServer]) -> None:
        self._server = servers[0]
        self._has_replicas = len(servers) > 1
        self._turns = cycle(servers)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """SGLang's own route."""
        setup = self._server.setup
        try:
            body = await read_object(request)
        except RequestRefused as err:
            return openai_error(err)
        is_stream = body.get("stream") is True
        times = self._times()
        try:
            call = generate_call(body, setup)
            jobs = await self._jobs(call)
        except RequestRefused as err:
            if is_stream:
                return await _refuse_stream(request, _generate_words(err))
            return json_response({"error": {"message": err.message}}, err.status)
        each = [times.copy() for _ in jobs]
        has_logprobs = body.get("return_logprob") is True and not is_stream
        options = replace(setup.generate_options, has_logprobs=has_logprobs)
        answers = [
            GenerateAnswer(
                job.request_id,
                job.demand.prompt_tokens,
                job.demand.cached_tokens,
                times,
                options,
                Place(
                    index if call.is_list else None,
                    server.dp_rank if self._has_replicas else None,
                ),
            )
            for index, ((server, job), times) in enumerate(zip(jobs, each, strict=True))
        ]
        form = GenerateForm(answers, is_list=call.is_list)
        return await self._serve(request, jobs, answers, each, form, is_stream=is_stream)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's text completions."""
        return await self._openai(request, is_chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's chat completions."""
        return await self._openai(request, is_chat=True)

    async def _openai(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        setup, times = self._server.setup, self._times()
        is_stream = False
        try:
            body = await read_object(request)
            is_stream = body.get("stream") is True
            call = chat_call(body, setup) if is_chat else completion_call(body, setup)
            options = self._usage_options(body)
            jobs = await self._jobs(call)
        except RequestRefused as err:
            if is_stream and err.status != web.HTTPBadRequest.status_code:
                return await _refuse_stream(request, _openai_words(err))
            return openai_error(err)
        model, created = str(body.get("model") or setup.model_name), int(self._server.date())
        choices = [
            Choice(job.request_id, index, model, created, job.demand.prompt_tokens)
            for index, (_, job) in enumerate(jobs)
        ]
        firsts = [job for _, job in jobs[:: call.samples]]
        prompt_tokens = sum(job.demand.prompt_tokens for job in firsts)
        cached_tokens = sum(job.demand.cached_tokens for job in firsts)
        make = ChatAnswer if is_chat else CompletionAnswer
        answers = [make(choice, has_usage=options.always) for choice in choices]
        form = OpenAiForm(answers, prompt_tokens, cached_tokens, options)
        each = [times.copy() for _ in jobs]
        return await self._serve(request, jobs, answers, each, form, is_stream=is_stream)

    async def _jobs(self, call: Call) -> Jobs:
        """What a call comes to; the prompt of several samples is prefilled first, as in SGLang."""
        await self._server.wait_resumed()
        servers = [next(self._turns) for _ in call.request_ids]
        for server, request_id in zip(servers, call.request_ids, strict=True):
            server.check_room(request_id)
        if call.samples > 1:
            for ask in call.asks:
                await next(self._turns).prefill(ask.prompt.content, ask.prompt.tokens)
        jobs = []
        asks = [ask for ask in call.asks for _ in range(call.samples)]
        for server, request_id, ask in zip(servers, call.request_ids, asks, strict=True):
            prompt = ask.prompt
            cached = server.find_cached(prompt.content, prompt.tokens)
            demand = Demand(prompt.tokens, ask.wanted, cached)
            jobs.append((server, Job(request_id, prompt.content, demand)))
        return jobs

    async def _serve(
        self,
        request: web.Request,
        jobs: Jobs,
        answers: Sequence[Answer],
        times: Sequence[RequestTimes],
        form: Form,
        *,
        is_stream: bool,
    ) -> web.StreamResponse:
        stream = await _open_stream(request) if is_stream else None
        transport = _transport(request) if stream is not None else None
        first_server, first_job = jobs[0]
        form = first_server.faults.form(form, first_job.demand)
        exchange = Exchange(form, len(jobs), transport)
        interval = self._server.setup.whole("stream_interval")
        for index, (server, job) in enumerate(jobs):
            on_end = partial(server.on_end, job.request_id)
            answer = server.faults.answer(answers[index], job.demand)
            reply = Reply(answer, times[index], exchange, index, interval, on_end)
            server.submit(job, reply)
        try:
            document = await exchange.done
        except asyncio.CancelledError:
            delay_s = STREAM_ABORT_DELAY_S if is_stream else DOCUMENT_ABORT_DELAY_S
            for server, job in jobs:
                server.forget(job.request_id, delay_s)
            raise
        return stream or web.Response(body=document, content_type="application/json")

    def _times(self) -> RequestTimes:
        return RequestTimes(self._server.date(), self._server.clock.now_s())

    def _usage_options(self, body: Body) -> UsageOptions:
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise RequestRefused("stream_options must be an object.")
        args = self._server.setup.args
        default = bool(args["stream_response_default_include_usage"])
        return UsageOptions(
            at_end=bool(options.get("include_usage")) or default,
            always=bool(options.get("continuous_usage_stats", False)),
            has_cached=bool(args["enable_cache_report"]),
        )


async def read_object(request: web.Request) -> Body:
    """The JSON object in a request's body; raises RequestRefused for anything else."""
    try:
        body: Any = json.loads(await request.read())
    except (ValueError, RecursionError, web.RequestPayloadError) as err:
        raise RequestRefused(f"The body is not JSON: {err}") from err
    if not isinstance(body, dict):
        raise RequestRefused("The body must be a JSON object.")
    return body


def json_response(value: object, status: int = 200) -> web.Response:
    """JSON as SGLang writes it."""
    return web.Response(body=encode(value), status=status, content_type="application/json")


def openai_error(refused: RequestRefused) -> web.Response:
    """An error in the OpenAI routes' shape."""
    return json_response(_openai_words(refused), refused.status)


def _openai_words(refused: RequestRefused) -> dict[str, object]:
    is_bad = refused.status == web.HTTPBadRequest.status_code
    kind = "BadRequest" if is_bad else str(refused.status)
    return error_words(refused.message, kind, refused.status)


def error_words(message: str, kind: str, status: int) -> dict[str, object]:
    """An error in the words of OpenAI's interface."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def _generate_words(refused: RequestRefused) -> dict[str, object]:
    is_theirs = refused.status < web.HTTPInternalServerError.status_code
    return {
        "message": refused.message,
        "type": "invalid_request_error" if is_theirs else "server_error",
        "code": refused.status,
        "retryable": not is_theirs,
    }


async def _open_stream(request: web.Request) -> web.StreamResponse:
    stream = web.StreamResponse(headers=STREAM_HEADERS)
    stream.enable_chunked_encoding()
    try:
        await stream.prepare(request)
    except ConnectionResetError as err:  # the client is gone before its stream began
        raise asyncio.CancelledError from err
    return stream


async def _refuse_stream(request: web.Request, error: dict[str, object]) -> web.StreamResponse:
    """SGLang has sent its 200 by then: the error is an event."""
    stream = await _open_stream(request)
    transport = _transport(request)
    write_chunk(transport, b"data: " + encode({"error": error}) + b"\n\n")
    write_chunk(transport, DONE)
    return stream


def _transport(request: web.Request) -> asyncio.WriteTransport:
    transport = request.transport
    if transport is None:
        raise web.HTTPServiceUnavailable  # the client is gone
    return transport
