"""The HTTP process of a server, as far as it holds back what passes through it.

Python collects its garbage from time to time, and a process that has imported a machine learning
stack stops for half a second then. What comes meanwhile, tokens and requests, passes at the end.
That is short, but requests that end during a stop are replaced together: they are prefilled as one
batch, and where replies have equal lengths they end together for ever after.

Measured on SGLang 0.5.16, one H200: 0.36 to 0.5 s, every 86,000 output tokens or so (68,000 to
100,000), the first after 6,400. The scheduler goes on meanwhile. Its own process hardly ever stops
(once, for 0.4 s, in 2.6 million tokens: 0.1 % of the time), which is not modelled. SGLang's line
about a stop is written by the HTTP process only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from runner.machine.batch import Token
from runner.machine.hardware import HostCosts

AT_READY = 0.926
"""How far a server is on the way to its first stop when it is ready, as a share of the tokens."""


class Front:
    """Passes tokens and requests on, stopped for `pause_s` each time that `pause_tokens` passed.

    `progress` is how far it is on the way to its next stop, as a share. Times never fall.
    """

    def __init__(self, host: HostCosts, progress: float = AT_READY) -> None:
        self.pause_s = host.pause_s
        self._every = host.pause_tokens
        self._passed = progress * host.pause_tokens
        self._is_frozen = host.pause_s <= 0.0 or host.pause_tokens <= 0.0
        self._free_s = -math.inf
        self.pauses = 0

    def freeze(self) -> None:
        """No more stops: its garbage is left alone from now on."""
        self._is_frozen = True

    def takes(self, now_s: float) -> float:
        """When a request that comes now goes on to the scheduler."""
        return max(now_s, self._free_s)

    def passes(self, tokens: Iterable[Token]) -> list[Token]:
        """The tokens of one step with the times at which they leave."""
        return [self._pass(token) for token in tokens]

    def _pass(self, token: Token) -> Token:
        if not self._is_frozen:
            self._passed += 1
            if self._passed >= self._every:
                self._passed -= self._every
                self._free_s = max(token.time_s, self._free_s) + self.pause_s
                self.pauses += 1
        return token._replace(time_s=self._free_s) if token.time_s < self._free_s else token
