"""The pipeline in real time: every token once, in order, not before its time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from runner.clock import Clock
from runner.engines.emulator.lateness import Lateness
from runner.engines.emulator.pace import Pace
from runner.engines.emulator.serving import Demand, Serving
from runner.machine.front import Front
from runner.machine.profile import load_profile
from runner.pipeline import BatchReport, Pipeline, ServerShape, Step

SCALE = 20.0
SHAPE = ServerShape(pp_size=2, pp_async_batch_depth=2, max_running_requests=16)


@dataclass
class Sink:
    """Keeps what it is given."""

    clock: Clock
    announced: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def prepare(self, completion_tokens: int, *, is_last: bool) -> None:
        assert not is_last or not self.ended.is_set()
        self.announced.append(completion_tokens)

    def deliver(self, completion_tokens: int, now_s: float, *, is_last: bool) -> None:
        assert now_s <= self.clock.now_s()
        self.tokens.append(completion_tokens)
        self.read_s.append(now_s)
        self.began.set()
        if is_last:
            self.ended.set()


class Bench:
    """A served pipeline and everything it said."""

    def __init__(self) -> None:
        self.clock = Clock(SCALE)
        self.batches: list[BatchReport] = []
        self.lines: list[str] = []
        pipeline = Pipeline(load_profile("cpu-blocking-pp2"), SHAPE, 1, self.clock.now_s())
        lateness = Lateness(SCALE, self.lines.append)
        front = Front(load_profile("cpu-blocking-pp2").host)
        self.serving = Serving(pipeline, self.clock, self.batches.append, lateness, front)

    def sink(self) -> Sink:
        return Sink(self.clock)


def run(body: Callable[[Bench], Awaitable[None]]) -> None:
    """Run a test on a loop of its own, with a limit in case nothing ends."""

    async def limited() -> None:
        bench = Bench()
        async with asyncio.timeout(30):
            await body(bench)
        bench.serving.close()

    asyncio.run(limited())


def test_every_token_comes_once_and_in_order() -> None:
    async def body(bench: Bench) -> None:
        sinks = [bench.sink() for _ in range(12)]
        for number, sink in enumerate(sinks):
            bench.serving.submit(Demand(16, 10 + number), sink)
        for number, sink in enumerate(sinks):
            await sink.ended.wait()
            assert sink.tokens == sink.announced == list(range(1, 11 + number))
            assert sink.read_s == sorted(sink.read_s)
        assert bench.serving.is_idle
        decoded = sum(batch.running for batch in bench.batches if not batch.is_prefill)
        assert decoded == sum(9 + number for number in range(12))

    run(body)


def test_no_token_comes_before_the_pipeline_says() -> None:
    async def body(bench: Bench) -> None:
        sink = bench.sink()
        bench.serving.submit(Demand(16, 50), sink)
        await sink.ended.wait()
        planned_s = [batch.time_s for batch in bench.batches]
        assert len(planned_s) == 50
        assert all(p <= r for p, r in zip(planned_s, sink.read_s, strict=True))

    run(body)


def test_a_request_after_a_pause_is_served_like_the_first() -> None:
    async def body(bench: Bench) -> None:
        for _ in range(3):
            sink = bench.sink()
            bench.serving.submit(Demand(16, 3), sink)
            await sink.ended.wait()
            assert sink.tokens == [1, 2, 3]
            await asyncio.sleep(0.01)

    run(body)


def test_an_aborted_request_hears_nothing_more_and_the_others_go_on() -> None:
    async def body(bench: Bench) -> None:
        aborted, other = bench.sink(), bench.sink()
        name = bench.serving.submit(Demand(16, 3000), aborted)
        bench.serving.submit(Demand(16, 20), other)
        await aborted.began.wait()
        assert bench.serving.abort(name)
        heard = len(aborted.tokens)
        await other.ended.wait()
        assert len(aborted.tokens) == heard
        assert not aborted.ended.is_set()
        assert not bench.serving.abort(name)
        last = bench.sink()
        bench.serving.submit(Demand(16, 20), last)
        await last.ended.wait()
        assert bench.serving.is_idle

    run(body)


def test_a_frozen_server_delivers_nothing() -> None:
    async def body(bench: Bench) -> None:
        sink = bench.sink()
        bench.serving.submit(Demand(16, 3000), sink)
        await sink.began.wait()
        bench.serving.freeze()
        heard = len(sink.tokens)
        await asyncio.sleep(0.05)
        assert len(sink.tokens) == heard

    run(body)


def test_a_server_that_was_held_up_says_how_late_it_is() -> None:
    async def body(bench: Bench) -> None:
        sink = bench.sink()
        bench.serving.submit(Demand(16, 500), sink)
        await sink.began.wait()
        while not bench.lines:
            Clock().sleep(0.3)  # the loop stands still, as on a machine without a free core
            await asyncio.sleep(0)
        assert "behind its schedule by" in bench.lines[0]
        await sink.ended.wait()
        while len(bench.lines) < 2:
            await asyncio.sleep(0.1)
        assert "The emulation has caught up with its schedule." in bench.lines
        assert sink.tokens == list(range(1, 501))

    run(body)


@pytest.mark.parametrize("cap", [1, 3])
def test_a_live_cap_bounds_every_later_batch(cap: int) -> None:
    async def body(bench: Bench) -> None:
        bench.serving.pipeline.set_cap(cap)
        sinks = [bench.sink() for _ in range(8)]
        for sink in sinks:
            bench.serving.submit(Demand(16, 10), sink)
        for sink in sinks:
            await sink.ended.wait()
        assert max(batch.running for batch in bench.batches) == cap

    run(body)


def test_hot_gpus_stretch_the_pipelines_schedule_from_then_on() -> None:
    async def body(bench: Bench) -> None:
        serving = bench.serving
        planned_s: list[float] = []
        step = serving.pipeline.step

        def noting() -> Step:
            found = step()
            planned_s.extend(batch.time_s for batch in found.batches)
            return found

        serving.pipeline.step = noting  # type: ignore[method-assign]
        sinks = bench.sink(), bench.sink()
        for number, sink in enumerate(sinks):
            if number == 1:
                serving.pace.slow_down(0.5, bench.clock.now_s())
            serving.submit(Demand(16, 20), sink)
            await sink.ended.wait()
            assert sink.tokens == list(range(1, 21))
        logged_s = [batch.time_s for batch in bench.batches]
        for half, factor in ((slice(0, 20), 1.0), (slice(20, 40), 2.0)):
            (first, *_, last), (began, *_, ended) = planned_s[half], logged_s[half]
            assert ended - began == pytest.approx((last - first) * factor)

    run(body)


def test_pace_maps_there_and_back() -> None:
    pace = Pace()
    assert pace.to_pipeline(7.0) == pace.to_clock(7.0) == 7.0
    pace.slow_down(0.5, 10.0)
    assert (pace.to_pipeline(14.0), pace.to_clock(12.0)) == (12.0, 14.0)
    pace.slow_down(1.0, 14.0)
    assert pace.to_pipeline(15.0) == 13.0
