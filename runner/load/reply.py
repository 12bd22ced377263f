"""One server reply, read as it arrives: server-sent events whose usage field counts the tokens.

The time stamps are those of the socket reads; the counts are the server's `completion_tokens`,
cumulative, never the number of chunks. JSON is parsed once per request, at its end: per event one
byte search finds the count. A quoted key cannot occur inside a JSON string (its quotes would be
escaped), so the search cannot be fooled by generated text.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Final, Protocol

_COUNT_KEY: Final = b'"completion_tokens":'
_NUMBER: Final = re.compile(rb"\s*(\d+)")
_IDS: Final = re.compile(rb'"output_ids":\s*\[([\d,\s]+)\]')
_EVENT_END: Final = b"\n\n"
_CRLF_END: Final = b"\r\n\r\n"  # as some servers end their lines; a stream keeps to one way
_HTTP_OK: Final = 200
_FEWEST_COUNTED: Final = 3  # a first, a last, and one in between
_LONGEST_ERROR: Final = 300
_MOST_DIGITS: Final = 7
_LONGEST_EVENT: Final = 64 << 20


class TokenCounter(Protocol):
    """Whoever wants running totals: output tokens, and requests that have begun to answer."""

    output_tokens: int
    answered: int


class Reply:
    """What the server has said so far about one request."""

    __slots__ = (
        "_before_last",
        "_counted",
        "_last",
        "_parsed",
        "_separator",
        "_tail",
        "_total",
        "error",
        "is_done",
        "last_s",
        "token_s",
    )

    def __init__(self, total: TokenCounter) -> None:
        self.token_s: list[float] = []
        self.error: str | None = None
        self.is_done = False
        self.last_s: float | None = None
        self._total = total
        self._counted = 0
        self._tail = b""
        self._separator = _EVENT_END
        self._last = b""
        self._before_last = b""
        self._parsed: dict[str, object] | None = None

    def feed(self, body: bytes, now_s: float) -> None:
        """Take the next bytes of the body, read from the socket at `now_s`."""
        self.last_s = now_s
        if self._tail:
            body = self._tail + body
        if self._separator not in body and _CRLF_END in body:
            self._separator = _CRLF_END
        *events, self._tail = body.split(self._separator)
        if len(self._tail) > _LONGEST_EVENT:
            self.fail(f"an event is longer than {_LONGEST_EVENT} bytes")
            self._tail = b""
        for event in events:
            self._take(event, now_s)

    def feed_event(self, event: bytes, now_s: float) -> None:
        """As `feed`, for the bytes of one whole event without the empty line after it.

        Nearly every event is one more token, which needs no more than to be found.
        """
        count = len(self.token_s)
        if count and not self._tail and event.rfind(_mark(count + 1)) >= 0:
            self.last_s = now_s
            self._note(event)
            self.token_s.append(now_s)
            self._total.output_tokens += 1
        else:
            self.feed(event + _EVENT_END, now_s)

    def _take(self, event: bytes, now_s: float) -> None:
        place = event.rfind(_COUNT_KEY)
        if place < 0:
            self._take_other(event)
            return
        number = _NUMBER.match(event, place + len(_COUNT_KEY))
        if number is None or len(number[1]) > _MOST_DIGITS:
            self.fail(f"a token count cannot be read: {_shorten(event)}")
            return
        self._note(event)
        new = int(number[1]) - len(self.token_s)
        if new > 0:
            self._total.answered += not self.token_s
            self._total.output_tokens += new
            self.token_s.extend([now_s] * new)

    def _note(self, event: bytes) -> None:
        self._counted += 1
        self._before_last = self._last
        self._last = event

    def fail(self, error: str) -> None:
        """Note why this request failed; the first cause stays."""
        if self.error is None:
            self.error = error

    def complete(self, http_status: int) -> None:
        """The reply has ended as HTTP wants; find out whether it is what was asked for."""
        if http_status != _HTTP_OK:
            self.fail(f"HTTP {http_status}: {_message(self._tail)}")
        elif self.error is None and not self.is_done:
            self.fail("the stream ended without [DONE]")
        elif self.error is None:
            self._check_finish()

    def usage(self) -> tuple[int | None, int]:
        """(prompt tokens, cached tokens) as the last event says; None: it does not say."""
        event = self._last_parsed()
        usage = event.get("meta_info") or event.get("usage")
        if not isinstance(usage, dict):
            return None, 0
        cached = usage.get("cached_tokens")
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            cached = details.get("cached_tokens")
        prompt = usage.get("prompt_tokens")
        return prompt if isinstance(prompt, int) else None, cached if isinstance(cached, int) else 0

    def _take_other(self, event: bytes) -> None:
        """An event without a count: the end mark, an error, or one that says nothing to us."""
        data = event.strip().removeprefix(b"data:").strip()
        if data == b"[DONE]":
            self.is_done = True
        elif b'"error"' in data:
            self.fail(f"error in the stream: {_message(data)}")

    def _check_finish(self) -> None:
        """The reason to finish is in the last event; OpenAI-like streams count once more after."""
        reason = _finish_reason(self._last_parsed())
        if reason is None:
            reason = _finish_reason(_event_json(self._before_last))
        if reason is None:
            self.fail("the stream ended without a finish reason")
        elif reason not in {"length", "stop"}:
            self.fail(f"the server finished the request with {reason!r}")
        elif (sent := self._sent_ids()) not in {None, len(self.token_s)}:
            self.fail(f"the server counts {len(self.token_s)} tokens but has sent {sent}")

    def _last_parsed(self) -> dict[str, object]:
        """The last event that counted; parsed when the reply is whole, and not again."""
        if self._parsed is None or not self.is_done:
            self._parsed = _event_json(self._last)
        return self._parsed

    def _sent_ids(self) -> int | None:
        """Token ids in the last event, None where that is not all of them.

        Events repeat all ids unless the server was told to send the new ones only; an event that
        is neither the first nor the last shows which.
        """
        before = self._before_last
        number = _NUMBER.match(before, before.rfind(_COUNT_KEY) + len(_COUNT_KEY))
        if self._counted < _FEWEST_COUNTED or number is None or _ids_in(before) != int(number[1]):
            return None
        return _ids_in(self._last)


@cache
def _mark(count: int) -> bytes:
    """How an event that has counted so many tokens says so, in the way most servers write JSON."""
    return b"%s%d," % (_COUNT_KEY, count)


def _ids_in(event: bytes) -> int | None:
    """How many token ids an event carries, None for an event without any."""
    found = _IDS.search(event)
    return None if found is None else found[1].count(b",") + 1


def _event_json(event: bytes) -> dict[str, object]:
    try:
        found = json.loads(event.strip().removeprefix(b"data:"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _finish_reason(found: dict[str, object]) -> str | None:
    holder = found.get("meta_info")
    choices = found.get("choices")
    if isinstance(choices, list) and choices:
        holder = choices[0]
    if not isinstance(holder, dict):
        return None
    reason = holder.get("finish_reason")
    if isinstance(reason, dict):
        reason = reason.get("type")
    return None if reason is None else str(reason)


def _message(data: bytes) -> str:
    """The server's own words in an error body, or its start if it is not of a known form."""
    found = _event_json(data)
    error = found.get("error", found)
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return _shorten(error["message"].encode())
    return _shorten(data) if data else "(no text)"


def _shorten(data: bytes) -> str:
    return data[:_LONGEST_ERROR].decode(errors="replace")
