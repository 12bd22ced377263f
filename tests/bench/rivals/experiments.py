"""Settings that nobody measured, where the mechanisms disagree."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from runner.pipeline import ServerShape
from tests.bench.rivals.measured import DEEP, NEAR, PP8, ROWS, Point, Run

STAGGER_S = 0.05
REQUESTS = 32
DEEP_CAP_4, SHALLOW_CAP_4 = "PP8 d8 cap 4", "PP8 d0 cap 4"


@dataclass(frozen=True)
class Experiment:
    """One load of 32 requests that would tell mechanisms apart."""

    name: str
    run: Run


def experiments(scale: float) -> tuple[Experiment, ...]:
    """With requests `scale` times shorter than the usual ones."""
    lengths = NEAR.lengths(Point("", REQUESTS, 1.0, None), scale, seed=1)

    def burst(name: str, shape: ServerShape) -> Experiment:
        return Experiment(name, Run(shape, lengths))

    return (
        burst("PP8 d8 cap 8 (measured: 248.1)", DEEP),
        burst("PP8 d0 cap 8", PP8),
        burst(DEEP_CAP_4, replace(DEEP, pp_max_micro_batch_size=4)),
        burst(SHALLOW_CAP_4, replace(PP8, pp_max_micro_batch_size=4)),
        Experiment(
            "PP8 d8 cap 4, closed loop",
            Run(replace(DEEP, pp_max_micro_batch_size=4), lengths, is_closed_loop=True),
        ),
        burst("PP8 d8 cap 2", replace(DEEP, pp_max_micro_batch_size=2)),
        burst("PP8 d8 cap 1", replace(DEEP, pp_max_micro_batch_size=1)),
        Experiment(
            f"PP8 d8 cap 64, one request each {STAGGER_S * 1000:g} ms",
            Run(replace(DEEP, pp_max_micro_batch_size=ROWS), lengths, gap_s=STAGGER_S),
        ),
        burst("PP8 eager d0 cap 8", replace(PP8, cuda_graph=False)),
        burst("TP2 x PP4 d0 cap 8", _hybrid(2, 4, 8)),
        burst("TP4 x PP2 d0 cap 16", _hybrid(4, 2, 16)),
    )


def widest(predictions: Mapping[str, float], names: Collection[str]) -> float:
    """The highest over the lowest prediction of the named mechanisms."""
    speeds = [predictions[name] for name in names]
    return max(speeds) / min(speeds)


def _hybrid(tp_size: int, pp_size: int, cap: int) -> ServerShape:
    return ServerShape(
        tp_size=tp_size, pp_size=pp_size, pp_max_micro_batch_size=cap, max_running_requests=ROWS
    )
