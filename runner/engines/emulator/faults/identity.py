"""Which launch a server belongs to, so that chance strikes the same launches again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runner.engines.processes import START_VARIABLE

_PORTS = ("host", "port", "nccl_port", "dist_init_addr", "engine_info_bootstrap_port")


@dataclass(frozen=True, slots=True)
class LaunchIdentity:
    """`words` is the same for every server of a launch; `attempt` counts from 1."""

    words: str
    attempt: int = 1

    @classmethod
    def of(cls, args: Mapping[str, object], environment: Mapping[str, str]) -> LaunchIdentity:
        """From what started the server; by hand it is the flags that count, without the ports."""
        start = environment.get(START_VARIABLE, "").split("/")
        if len(start) == 3 and start[2].isdecimal():  # noqa: PLR2004 - launch/replica/attempt
            return cls(f"launch {start[0]}", int(start[2]))
        given = sorted((name, repr(value)) for name, value in args.items() if name not in _PORTS)
        devices = environment.get("CUDA_VISIBLE_DEVICES")
        return cls(f"{given} on {devices}")
