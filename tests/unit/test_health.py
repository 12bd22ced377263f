from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.clock import Clock
from runner.load.health import HealthMonitor, lasting_lag_s


def test_a_single_stall_is_not_the_clients_limit() -> None:
    assert lasting_lag_s([0.001, 0.300, 0.001, 0.002], 1.0) == 0.001


def test_lag_that_lasts_is() -> None:
    assert lasting_lag_s([0.001, 0.080, 0.070, 0.090, 0.001], 1.0) == 0.070


def test_a_stall_for_most_of_the_time_is() -> None:
    assert lasting_lag_s([0.001, 0.600, 0.001], 1.0) == 0.600


@given(st.lists(st.floats(0, 10)))
def test_lasting_lag_is_never_more_than_the_worst(lags_s: list[float]) -> None:
    assert 0.0 <= lasting_lag_s(lags_s, 1.0) <= max(lags_s, default=0.0)


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_a_loop_that_only_computes_is_seen_in_wall_seconds(scale: float) -> None:
    clock = Clock(scale)

    async def compute() -> tuple[float, float, HealthMonitor]:
        monitor = HealthMonitor(clock)
        monitor.start()
        start_s = clock.now_s()
        for _ in range(6):
            until_s = time.thread_time() + 0.06
            while time.thread_time() < until_s:
                pass
            await asyncio.sleep(0)
        end_s = clock.now_s()
        monitor.stop()
        return start_s, end_s, monitor

    start_s, end_s, monitor = asyncio.run(compute())
    health = monitor.health(start_s, end_s)
    # Each turn takes 60 ms, so a callback due after 10 ms is about 50 ms late.
    assert health.max_lag_s > 0.04
    assert 0.0 < health.cpu_share <= 1.05


def test_an_idle_loop_uses_little_of_its_core() -> None:
    clock = Clock()

    async def idle() -> HealthMonitor:
        monitor = HealthMonitor(clock)
        monitor.start()
        await asyncio.sleep(0.2)
        monitor.stop()
        return monitor

    health = asyncio.run(idle()).health(0.0, float("inf"))
    assert health.cpu_share < 0.5
