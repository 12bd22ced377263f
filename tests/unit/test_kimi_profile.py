"""The 8-GPU profile under its operators' protocol: what must hold however long requests are.

Bursts after two warm-up calls, requests up to 20 times shorter than the measured ones with the
same relative spread. What does not hold for requests of equal length is said here too.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import cache

import pytest

from runner.machine.profile import load_profile
from runner.pipeline import ServerShape
from tests.bursts import Burst, run_burst, spread_lengths

PROFILE = load_profile("rtx-pro-6000-x8-kimi-k2.6")
SEEDS = (1, 2, 3)
SHORTER = 20
LESS_SHORT = 4  # where prefill would count
QUOTED_W = 310.0

TP8 = ServerShape(tp_size=8, max_running_requests=64)
SHALLOW = ServerShape(pp_size=8, max_running_requests=64)
DEEP = replace(SHALLOW, pp_async_batch_depth=8)
EAGER = replace(SHALLOW, cuda_graph=False)


@dataclass(frozen=True)
class Law:
    """Output tokens are spread evenly from `low` to `high`."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}"


NEAR, WIDE, EQUAL = Law(2320, 3480), Law(1300, 3000), Law(2900, 2900)
UNEVEN = pytest.mark.parametrize("law", [NEAR, WIDE], ids=str)
ANY = pytest.mark.parametrize("law", [NEAR, WIDE, EQUAL], ids=str)
DEPTHS = pytest.mark.parametrize("shape", [DEEP, SHALLOW], ids=["depth 8", "depth 0"])


@cache
def burst(shape: ServerShape, count: int, law: Law, seed: int, shorter: float = SHORTER) -> Burst:
    lengths = spread_lengths(count, law.low / shorter, law.high / shorter, seed)
    return run_burst(PROFILE, shape, lengths, seed=seed)


def throughput(shape: ServerShape, law: Law, count: int = 32, shorter: float = SHORTER) -> float:
    bursts = [burst(shape, count, law, seed, shorter) for seed in SEEDS]
    return statistics.median(one.tokens_per_s for one in bursts)


def capped(shape: ServerShape, cap: int) -> ServerShape:
    return replace(shape, pp_max_micro_batch_size=cap)


@pytest.mark.parametrize("shape", [TP8, DEEP, capped(DEEP, 64)], ids=["tp8", "pp8", "cap 64"])
def test_short_requests_stand_for_long_ones(shape: ServerShape) -> None:
    short = throughput(shape, NEAR)
    assert short == pytest.approx(burst(shape, 32, NEAR, 1, shorter=1).tokens_per_s, rel=0.05)


@UNEVEN
def test_tensor_parallelism_is_as_fast_as_measured(law: Law) -> None:
    assert throughput(TP8, law, shorter=LESS_SHORT) == pytest.approx(577.8, rel=0.1)


def test_tensor_parallelism_is_too_fast_when_no_request_is_slower_than_others() -> None:
    """A step of TP8 hardly grows with its batch, so the slowest request decides the wall."""
    assert 1.1 < throughput(TP8, EQUAL, shorter=LESS_SHORT) / 577.8 < 1.25


@ANY
@DEPTHS
def test_the_automatic_cap_is_in_the_measured_range(shape: ServerShape, law: Law) -> None:
    assert 200.0 < throughput(shape, law) < 360.0


@ANY
@DEPTHS
def test_a_smaller_cap_fills_more_stages(shape: ServerShape, law: Law) -> None:
    assert throughput(capped(shape, 4), law) > throughput(capped(shape, 8), law)
    assert throughput(capped(shape, 8), law) >= throughput(capped(shape, 64), law)


@pytest.mark.parametrize(
    ("shape", "count", "measured"),
    [
        (EAGER, 1, 24.7),
        (EAGER, 4, 68.3),
        (EAGER, 8, 95.6),
        (DEEP, 1, 34.3),
        (capped(DEEP, 64), 8, 83.2),
        (capped(DEEP, 64), 16, 159.5),
        (capped(DEEP, 64), 32, 250.9),
        (capped(DEEP, 64), 48, 316.2),
        (TP8, 1, 26.3),
    ],
)
def test_throughputs_are_those_measured(shape: ServerShape, count: int, measured: float) -> None:
    assert throughput(shape, NEAR, count) == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize("cap", [None, 1, 4, 64])
@pytest.mark.parametrize("count", [1, 8, 32])
def test_power_is_between_idle_and_the_highest_reading(cap: int | None, count: int) -> None:
    powers = burst(replace(DEEP, pp_max_micro_batch_size=cap), count, NEAR, 1).power_w
    assert PROFILE.gpu.idle_w < min(powers) <= max(powers) < QUOTED_W


def test_launching_kernel_by_kernel_draws_less() -> None:
    eager, graph = burst(EAGER, 8, NEAR, 1).power_w, burst(DEEP, 32, NEAR, 1).power_w
    assert 150.0 < statistics.fmean(eager) < 200.0
    assert statistics.fmean(eager) < statistics.fmean(graph)
