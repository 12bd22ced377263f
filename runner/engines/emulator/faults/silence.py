"""A server that sends no tokens any more after it has sent so many."""

from __future__ import annotations

from collections.abc import Callable

from runner.engines.emulator.serving import TokenSink


class TokenBudget:
    """How many tokens a server still sends; `on_spent` is called when the last one is sent."""

    def __init__(self, tokens: int, on_spent: Callable[[], None]) -> None:
        self._left = tokens
        self._on_spent = on_spent

    def spend(self, tokens: int) -> None:
        """So many tokens were sent."""
        was_left = self._left > 0
        self._left -= tokens
        if was_left and self._left <= 0:
            self._on_spent()


class BudgetedSink:
    """Counts the tokens of one request against the server's budget."""

    def __init__(self, sink: TokenSink, budget: TokenBudget) -> None:
        self._sink = sink
        self._budget = budget
        self._sent = 0

    def deliver(self, completion_tokens: int, now_s: float, *, is_last: bool) -> None:
        """The request has `completion_tokens` tokens now."""
        self._sink.deliver(completion_tokens, now_s, is_last=is_last)
        self._budget.spend(completion_tokens - self._sent)
        self._sent = completion_tokens
