"""What was measured (tests/data/kimi-measured.json), and the laws of lengths it may have had."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.pipeline import ServerShape
from tests.bursts import spread_lengths

DATA = Path(__file__).parents[2] / "data" / "kimi-measured.json"
USUAL_TOKENS = 2900  # the mean of the runs whose means were recorded
ROWS = 64

PP8 = ServerShape(pp_size=8, max_running_requests=ROWS)
DEEP = replace(PP8, pp_async_batch_depth=8)
SETTINGS: Mapping[str, ServerShape] = {
    "pp8-eager-d0": replace(PP8, cuda_graph=False),
    "pp8-d8-auto": DEEP,
    "pp8-d8-cap64": replace(DEEP, pp_max_micro_batch_size=64),
    "tp8": ServerShape(tp_size=8, max_running_requests=ROWS),
}


@dataclass(frozen=True)
class Point:
    """One measured throughput."""

    setting: str
    concurrency: int
    tokens_per_s: float
    mean_tokens: int | None

    @property
    def name(self) -> str:
        return f"{self.setting} C={self.concurrency}"

    @property
    def is_pp_graph(self) -> bool:
        return self.setting in {"pp8-d8-auto", "pp8-d8-cap64"}


@dataclass(frozen=True)
class PowerRange:
    """Watts of one GPU as they were read off while the settings served."""

    settings: tuple[str, ...]
    low: float
    high: float
    note: str


@dataclass(frozen=True)
class Law:
    """Uniform lengths: `spread` around each run's mean, or from `low` to `high`."""

    name: str
    spread: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def lengths(self, point: Point, scale: float, seed: int) -> tuple[int, ...]:
        """Lengths of a burst, `scale` times shorter than they were."""
        mean = point.mean_tokens or USUAL_TOKENS
        low = self.low or mean * (1.0 - self.spread)
        high = self.high or mean * (1.0 + self.spread)
        return tuple(spread_lengths(point.concurrency, low / scale, high / scale, seed))


# The means of the four cap-64 runs scatter as those of lengths with a deviation of about 290 do.
NEAR = Law("uniform +-20 % around each run's mean", spread=0.2)
WIDE = Law("uniform 1,300 .. 3,000", low=1300, high=3000)
EQUAL = Law("equal lengths, each run's mean")
LAWS = (NEAR, WIDE, EQUAL)


@dataclass(frozen=True)
class Run:
    """A load on a server: a burst, or a closed loop; `gap_s` None: sent at once."""

    shape: ServerShape
    lengths: tuple[int, ...]
    gap_s: float | None = None
    is_closed_loop: bool = False


def load_points() -> tuple[Point, ...]:
    """The independent throughputs."""
    return tuple(Point(**entry) for entry in _document()["throughput"])


def load_power() -> tuple[PowerRange, ...]:
    """The quoted powers."""
    return tuple(
        PowerRange(tuple(entry["settings"]), entry["low"], entry["high"], entry["note"])
        for entry in _document()["power_w"]
    )


def run_of(point: Point, law: Law, scale: float = 1.0, seed: int = 1) -> Run:
    """The load behind a point."""
    return Run(SETTINGS[point.setting], law.lengths(point, scale, seed))


def error(modelled: float, measured: float) -> float:
    """Relative."""
    return modelled / measured - 1.0


def log_error(modelled: float, measured: float) -> float:
    """What is squared and summed in a fit."""
    return math.log(modelled / measured)


def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return document
