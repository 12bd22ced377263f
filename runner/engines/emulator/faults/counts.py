"""A usage that counts tokens nobody got, or loses some."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runner.engines.emulator.answers import Answer, Finish
from runner.engines.emulator.exchange import Form, Part

_COUNT = re.compile(rb'("completion_tokens":)(\d+)')


class MiscountedAnswer:
    """An answer whose last count of tokens is `extra` more (or less) than there were."""

    def __init__(self, answer: Answer, extra: int) -> None:
        self._answer = answer
        self._extra = extra

    def event(self, tokens: int, finish: Finish | None) -> bytes:
        """As the answer, but for the count at its end."""
        event = self._answer.event(tokens, finish)
        return event if finish is None else miscount(event, self._extra)


class MiscountedForm:
    """What a route says of an exchange, with the same mistake in each count."""

    def __init__(self, form: Form, extra: int) -> None:
        self._form = form
        self._extra = extra

    def closing(self, parts: Sequence[Part]) -> bytes:
        """As the form, but for the count."""
        return miscount(self._form.closing(parts), self._extra)

    def document(self, parts: Sequence[Part]) -> bytes:
        """As the form, but for the counts."""
        return miscount(self._form.document(parts), self._extra)


def miscount(content: bytes, extra: int) -> bytes:
    """The content with so many more (or fewer) completion tokens counted."""
    return _COUNT.sub(lambda m: b"%b%d" % (m[1], max(0, int(m[2]) + extra)), content)
