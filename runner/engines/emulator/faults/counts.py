"""A usage that counts tokens nobody got, or loses some."""

from __future__ import annotations

import re

from runner.engines.emulator.answers import Answer, Finish

_COUNT = re.compile(rb'("completion_tokens":)(\d+)')


class MiscountedAnswer:
    """An answer whose last count of tokens is `extra` more (or less) than there were."""

    def __init__(self, answer: Answer, extra: int) -> None:
        self._answer = answer
        self._extra = extra

    def event(self, tokens: int, finish: Finish | None) -> bytes:
        """As the answer, but for the count at its end."""
        event = self._answer.event(tokens, finish)
        return event if finish is None else self._miscount(event)

    def document(self, tokens: int, finish: Finish) -> bytes:
        """As the answer, but for the count."""
        return self._miscount(self._answer.document(tokens, finish))

    def _miscount(self, content: bytes) -> bytes:
        return _COUNT.sub(lambda m: b"%b%d" % (m[1], max(0, int(m[2]) + self._extra)), content)
