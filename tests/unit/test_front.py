from __future__ import annotations

from dataclasses import replace

from runner.machine.front import AT_READY, Front
from runner.machine.hardware import HostCosts
from runner.machine.profile import load_profile
from runner.pipeline import Token

HOST = replace(load_profile("cpu-blocking-pp2").host, pause_s=0.5, pause_tokens=100.0)


def step(time_s: float, count: int) -> list[Token]:
    return [Token(str(number), time_s, 1, is_last=False) for number in range(count)]


def times(tokens: list[Token]) -> list[float]:
    return [token.time_s for token in tokens]


def front(host: HostCosts = HOST, progress: float = 0.0) -> Front:
    return Front(host, progress)


def test_the_token_that_fills_the_measure_and_those_after_it_wait_for_the_stops_end() -> None:
    some = front()
    assert times(some.passes(step(1.0, 98))) == [1.0] * 98
    assert times(some.passes(step(2.0, 4))) == [2.0, 2.5, 2.5, 2.5]
    assert times(some.passes(step(2.3, 2))) == [2.5, 2.5]
    assert times(some.passes(step(2.5, 1))) == [2.5]
    assert times(some.passes(step(2.6, 1))) == [2.6]
    assert some.pauses == 1


def test_requests_that_come_during_a_stop_are_taken_at_its_end() -> None:
    some = front(progress=0.99)
    assert some.takes(0.9) == 0.9
    some.passes(step(1.0, 1))
    assert [some.takes(now_s) for now_s in (1.2, 1.5, 1.6)] == [1.5, 1.5, 1.6]


def test_a_fresh_server_is_near_its_first_stop() -> None:
    some = Front(HOST)
    some.passes(step(1.0, round(100 * (1 - AT_READY)) - 1))
    assert some.pauses == 0
    some.passes(step(1.1, 1))
    assert some.pauses == 1


def test_frozen_garbage_stops_nothing() -> None:
    some = front(progress=0.99)
    some.freeze()
    assert times(some.passes(step(1.0, 300))) == [1.0] * 300


def test_a_profile_without_stops_has_none() -> None:
    none = front(replace(HOST, pause_s=0.0), progress=0.99)
    assert times(none.passes(step(1.0, 300))) == [1.0] * 300
