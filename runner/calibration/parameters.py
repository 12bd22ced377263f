"""Which numbers of a profile a calibration may move, and how far off they may be. Pure.

Sizes (bytes, layers, operations) are facts and never fitted. A number that is 0 says that the
effect is not there, and stays 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from runner.machine.hardware import Backend, Profile

TWOFOLD = math.log(2.0)
RANKS_FACTOR = "host.eager_ranks_factor"
EAGER_LAYER = "host.eager_layer_s"
# Dotted name, and the standard deviation of log(true / in the profile) before anything is measured.
NUMBERS = (
    ("gpu.bandwidth_bytes_per_s", 0.15),
    ("gpu.flop_per_s", 0.3),
    ("gpu.memory_bound_w", 0.2),
    ("gpu.compute_bound_w", 0.2),
    ("gpu.communication_w", 0.2),
    ("gpu.tail_w", 0.2),
    ("link.ring_step_s", TWOFOLD),
    ("link.bandwidth_bytes_per_s", TWOFOLD),
    ("link.hop_s", TWOFOLD),
    ("model.routing_overlap", 0.5),  # of its logit
    ("host.schedule_s", TWOFOLD),
    ("host.graph_launch_s", TWOFOLD),
    (EAGER_LAYER, TWOFOLD),
    ("host.piece_s", TWOFOLD),
    ("host.result_s", TWOFOLD),
    ("host.result_request_s", TWOFOLD),
    ("host.empty_slot_s", TWOFOLD),
    ("host.message_s", TWOFOLD),
    ("host.exchange_s", TWOFOLD),
    (RANKS_FACTOR, 0.3),
    ("host.collective_s", TWOFOLD),
    ("host.http_s", TWOFOLD),
    ("host.accept_s", TWOFOLD),
    ("kernels.layer_s", TWOFOLD),
    ("kernels.split_cost", TWOFOLD),
    ("kernels.batch_s", TWOFOLD),
    ("kernels.batch_half_tokens", TWOFOLD),
)
OF_BACKENDS = (
    ("eager_factor", 0.3),
    ("kv_factor", 0.3),
    ("layer_factor", 0.3),
    ("request_s", TWOFOLD),
    ("sequence_s", TWOFOLD),
)
SHARES = frozenset({"model.routing_overlap"})
RELATIVE = frozenset({"eager_factor", "layer_factor"})
"""Factors that only compare backends: that of one of them is the unit of the others."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number that may move: `start` is the profile's, `deviation` how wrong that may be.

    `deviation` is the prior standard deviation of its logarithm, of a share that of its logit.
    """

    name: str
    start: float
    deviation: float
    is_share: bool = False

    def value(self, steps: float) -> float:
        """The number that is `steps` prior deviations from the start; exactly the start for 0."""
        if steps == 0.0:
            return self.start
        moved = math.exp(steps * self.deviation)
        if self.is_share:
            odds = self.start / (1.0 - self.start) * moved
            return odds / (1.0 + odds)
        return self.start * moved

    def steps(self, value: float) -> float:
        """How many prior deviations a value lies from the start."""
        moved = math.log(value / self.start)
        if self.is_share:
            moved -= math.log((1.0 - value) / (1.0 - self.start))
        return moved / self.deviation

    @property
    def section(self) -> str:
        """Its part of the profile, of a backend's number the backend."""
        return self.name.rpartition(".")[0]

    @property
    def field(self) -> str:
        """Its name within its section."""
        return self.name.rpartition(".")[2]


def parameters_of(profile: Profile, backends: Iterable[str]) -> tuple[Parameter, ...]:
    """What can be fitted to measurements of servers with these attention backends."""
    measured = sorted(set(backends) & set(profile.backends))
    found = [
        Parameter(name, start, deviation, is_share=name in SHARES)
        for name, deviation in NUMBERS
        if (start := _number(profile, name)) > 0.0 and not (name in SHARES and start >= 1.0)
    ]
    for field, deviation in OF_BACKENDS:
        unit = _unit(profile, measured, field) if field in RELATIVE else None
        starts = {name: float(getattr(profile.backends[name], field)) for name in measured}
        found += [
            Parameter(f"backends.{name}.{field}", start, deviation)
            for name, start in starts.items()
            if name != unit and start > 0.0
        ]
    return tuple(found)


def absent_from(profile: Profile) -> tuple[str, ...]:
    """The numbers that are 0 in a profile: effects that it says are not there."""
    return tuple(name for name, _ in NUMBERS if _number(profile, name) == 0.0)


def with_values(profile: Profile, values: Mapping[str, float]) -> Profile:
    """The profile with numbers replaced, by their dotted names."""
    sections: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        section, _, field = name.rpartition(".")
        sections.setdefault(section, {})[field] = value
    backends: dict[str, Backend] = dict(profile.backends)
    changed: dict[str, Any] = {}
    for section, fields in sections.items():
        if section.startswith("backends."):
            backend = section.removeprefix("backends.")
            backends[backend] = replace(backends[backend], **fields)  # type: ignore[arg-type]
        else:
            changed[section] = replace(getattr(profile, section), **fields)
    return replace(profile, backends=backends, **changed)


def _number(profile: Profile, name: str) -> float:
    """A number by its dotted name; 0 where it is left out."""
    section, _, field = name.rpartition(".")
    value: float | None = getattr(getattr(profile, section), field)
    return value or 0.0


def _unit(profile: Profile, measured: list[str], field: str) -> str | None:
    """The backend whose factor stays: one with 1, else the profile's default, else the first."""
    default = profile.defaults.attention_backend
    order = sorted(measured, key=lambda name: (name != default, name))
    ones = [name for name in order if getattr(profile.backends[name], field) == 1.0]
    return next(iter((*ones, *order)), None)
