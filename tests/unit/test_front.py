from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from runner.machine.front import AT_READY, Front
from runner.machine.hardware import HostCosts
from runner.machine.profile import load_profile
from runner.pipeline import Token

MEASURED = Path(__file__).parent.parent / "data" / "h200-stops.json"
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
    some.passes(step(1.0, math.ceil(100 * (1 - AT_READY)) - 1))
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


def test_stops_are_as_long_and_as_far_apart_as_measured() -> None:
    launches = json.loads(MEASURED.read_text(encoding="utf-8"))["launches"]
    tokens = [launch["tokens"] for launch in launches]
    host = load_profile("h200-llama-3.1-8b").host
    apart = fmean(after - before for stops in tokens for before, after in pairwise(stops))
    assert host.pause_tokens == pytest.approx(apart, rel=0.02)
    first = fmean(stops[0] for stops in tokens)
    assert host.pause_tokens * (1 - AT_READY) == pytest.approx(first, rel=0.05)
    pauses_s = [pause_s for launch in launches for pause_s in launch["pause_s"]]
    assert host.pause_s == pytest.approx(fmean(pauses_s), rel=0.05)
