"""An answer with one wrong token, as a race between two steps of the pipeline would leave it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from runner.engines.emulator.answers import Answer, Finish, encode
from runner.engines.emulator.exchange import Form, Part

_EVENT_END = b"\n\n"


class GarbledAnswer:
    """An answer whose token number `position` (from 0) is another one."""

    def __init__(self, answer: Answer, position: int) -> None:
        self._answer = answer
        self._position = position

    def event(self, tokens: int, finish: Finish | None) -> bytes:
        """As the answer, but for that token."""
        events = self._answer.event(tokens, finish).split(_EVENT_END)
        return b"".join(
            b"data: " + self._garble(event.removeprefix(b"data: "), tokens) + _EVENT_END
            for event in events
            if event
        )

    def _garble(self, content: bytes, tokens: int) -> bytes:
        document: dict[str, Any] = json.loads(content)
        garble(document, self._position, tokens)
        return encode(document)


class GarbledForm:
    """What a route says of an exchange; without a stream, each continuation has a wrong token."""

    def __init__(self, form: Form, position: int) -> None:
        self._form = form
        self._position = position

    def closing(self, parts: Sequence[Part]) -> bytes:
        """As the form."""
        return self._form.closing(parts)

    def document(self, parts: Sequence[Part]) -> bytes:
        """As the form, but for those tokens."""
        document: Any = json.loads(self._form.document(parts))
        for one in document if isinstance(document, list) else [document]:
            garble(one, self._position, None)
        return encode(document)


def garble(document: dict[str, Any], position: int, tokens: int | None) -> None:
    """Change token number `position` in a part of an answer that ends with number `tokens`.

    `tokens` None: the part is the whole answer.
    """

    def place_in(length: int) -> int | None:
        place = position if tokens is None else position - (tokens - length)
        return place if 0 <= place < length else None

    ids = document.get("output_ids")
    if isinstance(ids, list) and (place := place_in(len(ids))) is not None:
        ids[place] += 1
    for holder, key in _texts(document):
        words = holder[key].split()
        if (place := place_in(len(words))) is not None:
            words[place] += "x"
            holder[key] = "".join(f" {word}" for word in words)


def _texts(document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where generated text may be, on any of the routes."""
    choices = document.get("choices") or []
    for holder in (document, *choices):
        for inner in (holder, holder.get("delta"), holder.get("message")):
            for key in ("text", "content"):
                if isinstance(inner, dict) and isinstance(inner.get(key), str):
                    yield inner, key
