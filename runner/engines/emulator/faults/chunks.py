"""Tokens held back and handed on together, as a busy detokenizer or a stream interval does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from runner.engines.emulator.serving import TokenSink


class ChunkedSink:
    """Hands tokens on in groups of these sizes, in turn; the last token takes the rest along."""

    def __init__(self, sink: TokenSink, sizes: tuple[int, ...]) -> None:
        self._sink = sink
        self._sizes: Iterator[int] = cycle(sizes)
        self._due = next(self._sizes)

    def deliver(self, completion_tokens: int, now_s: float, *, is_last: bool) -> None:
        """The request has `completion_tokens` tokens now."""
        if completion_tokens < self._due and not is_last:
            return
        self._due += next(self._sizes)
        self._sink.deliver(completion_tokens, now_s, is_last=is_last)
