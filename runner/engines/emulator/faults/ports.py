"""A port that somebody else took while the server loaded."""

from __future__ import annotations

import errno

from runner.engines.emulator.faults.fault import Fault


def check_port(fault: Fault | None, attempt: int, host: str, port: int) -> None:
    """Raise what binding a used port raises, in each of a launch's first attempts, or in all."""
    if fault is None:
        return
    most = next(iter(fault.argument.numbers), float("inf"))
    if attempt <= most:
        raise OSError(
            errno.EADDRINUSE,
            f"error while attempting to bind on address ({host!r}, {port}): address already in use",
        )
