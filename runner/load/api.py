"""The HTTP interfaces a request can be sent through, and the bytes of a request for each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import assert_never

from runner.load.workload import PlannedRequest


class Api(StrEnum):
    """SGLang's own interface, or one of the two OpenAI-like ones."""

    GENERATE = "generate"
    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """The path of the interface on a server."""
        match self:
            case Api.GENERATE:
                return "/generate"
            case Api.COMPLETIONS:
                return "/v1/completions"
            case Api.CHAT:
                return "/v1/chat/completions"
            case _:
                assert_never(self)


def request_body(
    api: Api, model: str, request: PlannedRequest, input_ids: Sequence[int]
) -> dict[str, object]:
    """The JSON body that asks for exactly `request.output_tokens` tokens, streamed and counted."""
    if api is Api.GENERATE:
        return {
            "rid": request.request_id,
            "input_ids": input_ids,
            "stream": True,
            "sampling_params": {
                "max_new_tokens": request.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
        }
    body: dict[str, object] = {
        "rid": request.request_id,
        "model": model,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if api is Api.COMPLETIONS:
        return body | {"prompt": input_ids}
    # Chat takes words only; how many tokens they make is the server's to say.
    words = " ".join(str(token) for token in input_ids)
    return body | {"messages": [{"role": "user", "content": words}]}


def encode(body: object) -> bytes:
    """A body as compact JSON."""
    return json.dumps(body, separators=(",", ":")).encode()


def post(host: str, path: str, content: bytes, key: str | None = None) -> bytes:
    """A whole HTTP request, ready for the socket; `key` is shown as a bearer token."""
    bearer = "" if key is None else f"Authorization: Bearer {key}\r\n"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"{bearer}Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content
