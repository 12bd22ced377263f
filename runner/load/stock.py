"""Request bodies built ahead, so that a stream's next request leaves at once."""

from __future__ import annotations

import asyncio
from collections import deque

from runner.load.api import Api, encode, request_body
from runner.load.workload import PlannedRequest, RequestSource

PAUSE_S = 0.005


class RequestStock:
    """Takes requests from a source in order and keeps `size` of them ready."""

    def __init__(self, source: RequestSource, api: Api, model: str, size: int) -> None:
        self._source = source
        self._api = api
        self._model = model
        self._size = size
        self._ready: deque[tuple[PlannedRequest, bytes]] = deque()

    def take(self) -> tuple[PlannedRequest, bytes]:
        """The next request and its body."""
        return self._ready.popleft() if self._ready else self._build()

    def fill(self) -> None:
        """Build until the stock is full."""
        while len(self._ready) < self._size:
            self._ready.append(self._build())

    async def keep_full(self) -> None:
        """Refill one by one for as long as it is awaited; replies are read in between."""
        while True:
            if len(self._ready) < self._size:
                self._ready.append(self._build())
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(PAUSE_S)

    def _build(self) -> tuple[PlannedRequest, bytes]:
        request = self._source.next()
        ids = self._source.input_ids(request)
        return request, encode(request_body(self._api, self._model, request, ids))
