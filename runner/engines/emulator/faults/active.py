"""The faults that one launch really gets: conditions decided, rates drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from runner.engines.emulator.faults.draw import draw
from runner.engines.emulator.faults.fault import Fault
from runner.engines.emulator.faults.kind import FaultKind
from runner.trial import ParamValue


@dataclass(frozen=True, slots=True)
class ActiveFaults:
    """The faults of one server, one of a kind at most; `seed` is for what they draw later."""

    seed: int = 0
    by_kind: Mapping[FaultKind, Fault] | None = None

    @classmethod
    def choose(
        cls, faults: Iterable[Fault], seed: int, identity: str, values: Mapping[str, ParamValue]
    ) -> ActiveFaults:
        """The faults that hit the launch with this identity and these settings.

        A condition that names a setting without a value does not hold. Raises ConfigError when
        one cannot be evaluated.
        """
        chosen: dict[FaultKind, Fault] = {}
        for fault in faults:
            is_hit = fault.rate == 1.0 or draw(seed, identity, fault.text) < fault.rate
            if is_hit and _holds(fault.when, values):
                chosen.setdefault(fault.kind, fault)
        return cls(seed, chosen)

    def get(self, kind: FaultKind) -> Fault | None:
        """The fault of this kind, if it is to happen."""
        return (self.by_kind or {}).get(kind)

    def __contains__(self, kind: FaultKind) -> bool:
        return self.get(kind) is not None

    def __str__(self) -> str:
        return "; ".join(fault.text for fault in (self.by_kind or {}).values()) or "none"


def _holds(when: str | None, values: Mapping[str, ParamValue]) -> bool:
    if when is None:
        return True
    from runner.expression import Expression  # costs a start what most starts do not need

    return Expression.parse(when).decide(dict(values)) is True
