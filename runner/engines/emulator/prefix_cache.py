"""Which prompts the emulated radix cache still holds."""

from __future__ import annotations

from collections import OrderedDict


class PrefixCache:
    """Knows whole prompts only: sent again before a flush, all but the last token is cached.

    Holds at most `capacity_tokens`; the least recently used prompt goes first.
    """

    def __init__(self, capacity_tokens: int, *, is_enabled: bool) -> None:
        self._capacity = capacity_tokens if is_enabled else 0
        self._prompts: OrderedDict[int, int] = OrderedDict()
        self._tokens = 0

    def look_up(self, prompt: int, tokens: int) -> int:
        """How many of the prompt's tokens are cached; `prompt` is a hash of its content."""
        if prompt not in self._prompts:
            return 0
        self._prompts.move_to_end(prompt)
        return tokens - 1

    def keep(self, prompt: int, tokens: int) -> None:
        """The prompt was prefilled."""
        if prompt in self._prompts or tokens > self._capacity:
            return
        self._prompts[prompt] = tokens
        self._tokens += tokens
        while self._tokens > self._capacity:
            self._tokens -= self._prompts.popitem(last=False)[1]

    def flush(self) -> None:
        """Forget everything."""
        self._prompts.clear()
        self._tokens = 0
