"""An answer with one wrong token, as a race between two steps of the pipeline would leave it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from runner.engines.emulator.answers import Answer, Finish, encode

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

    def document(self, tokens: int, finish: Finish) -> bytes:
        """As the answer, but for that token."""
        return self._garble(self._answer.document(tokens, finish), tokens)

    def _garble(self, content: bytes, tokens: int) -> bytes:
        """Whatever part of the answer this carries, it ends with token number `tokens`."""
        document: dict[str, Any] = json.loads(content)
        ids = document.get("output_ids")
        if isinstance(ids, list) and (place := self._place(len(ids), tokens)) is not None:
            ids[place] += 1
        for holder, key in _texts(document):
            words = holder[key].split()
            if (place := self._place(len(words), tokens)) is not None:
                words[place] += "x"
                holder[key] = "".join(f" {word}" for word in words)
        return encode(document)

    def _place(self, length: int, tokens: int) -> int | None:
        """Where the token is in a part of this length, None if it is not in it."""
        place = self._position - (tokens - length)
        return place if 0 <= place < length else None


def _texts(document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where generated text may be, on any of the routes."""
    choices = document.get("choices") or []
    for holder in (document, *choices):
        for inner in (holder, holder.get("delta"), holder.get("message")):
            for key in ("text", "content"):
                if isinstance(inner, dict) and isinstance(inner.get(key), str):
                    yield inner, key
