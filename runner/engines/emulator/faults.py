"""Ways to break an emulated server on purpose, for the tests of everything around it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """What goes wrong; the command line's help says what each one does."""

    DIE_AT_START = "die-at-start"
    HANG_AT_START = "hang-at-start"
    DIE_AFTER_REQUESTS = "die-after-requests"
    REFUSE_FLAG = "refuse-flag"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `requests` counts for DIE_AFTER_REQUESTS only."""

    kind: FaultKind
    argument: str | None = None
    requests: int = 0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read KIND[:ARG]; raises ValueError with a message for the user."""
        name, _, argument = text.partition(":")
        kinds = ", ".join(FaultKind)
        if name not in tuple(FaultKind):
            raise ValueError(f"unknown fault {name!r}; known are {kinds}")
        kind = FaultKind(name)
        if kind is not FaultKind.DIE_AFTER_REQUESTS:
            return cls(kind, argument or None)
        if not argument.isdecimal() or int(argument) == 0:
            raise ValueError(f"{name} needs a count of requests, as in {name}:20")
        return cls(kind, argument, int(argument))
