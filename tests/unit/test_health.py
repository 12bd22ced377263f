from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.clock import Clock
from runner.load.health import HealthMonitor, clock_jump_s, lasting_lag_s


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


def test_clocks_that_go_together_have_not_jumped() -> None:
    assert clock_jump_s([]) == 0.0
    assert clock_jump_s([(t / 100, 1.7e9 + t / 100) for t in range(50)]) == pytest.approx(
        0.0, abs=1e-6
    )


@pytest.mark.parametrize(
    ("step", "jump_s"),
    [
        ((0.01, 3600.01), 3600.0),  # suspended, or set forward
        ((0.01, -59.99), 60.0),  # set back
        ((5.0, 5.0), 5.0),  # a stopped machine whose clocks both went on
        ((0.8, 0.8), 0.0),  # a stall
    ],
)
def test_a_jump_between_two_ticks(step: tuple[float, float], jump_s: float) -> None:
    readings = [(1.0, 101.0), (1.01, 101.01)]
    readings.append((1.01 + step[0], 101.01 + step[1]))
    readings.append((readings[-1][0] + 0.01, readings[-1][1] + 0.01))
    assert clock_jump_s(readings) == pytest.approx(jump_s)


def test_a_monitor_sees_a_calendar_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    real, offset_s = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + offset_s[0])

    async def watch() -> float:
        monitor = HealthMonitor(Clock())
        monitor.start()
        await asyncio.sleep(0.05)
        offset_s[0] = 100.0
        await asyncio.sleep(0.05)
        monitor.stop()
        return monitor.health(0.0, time.monotonic()).clock_jump_s

    assert asyncio.run(watch()) == pytest.approx(100.0, abs=1.0)
