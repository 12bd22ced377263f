"""Requests that the server keeps running although their client is gone and they were aborted."""

from __future__ import annotations

from runner.engines.emulator.faults.fault import Fault


class Ghosts:
    """Which requests have become ghosts. Without a fault, none; `Fault` may limit how many."""

    def __init__(self, fault: Fault | None) -> None:
        numbers = () if fault is None else fault.argument.numbers
        self._most = 0.0 if fault is None else next(iter(numbers), float("inf"))
        self._ids: set[str] = set()

    def keep(self, request_id: str) -> bool:
        """The client of this request is gone: whether the server goes on with it nevertheless."""
        if request_id not in self._ids and len(self._ids) < self._most:
            self._ids.add(request_id)
        return request_id in self._ids

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids
