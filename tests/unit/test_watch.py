"""Occupied slots, counted while a pipeline runs."""

from __future__ import annotations

import pytest

from runner.forecast.watch import WatchedPipeline
from runner.machine.profile import load_profile
from runner.machine.shape import ServerShape
from runner.pipeline import PipelineRequest

KIMI = load_profile("rtx-pro-6000-x8-kimi-k2.6")


def ran(requests: int, cap: int) -> tuple[WatchedPipeline, float]:
    """A pipeline that served some equal requests, and when it was done."""
    shape = ServerShape(pp_size=8, pp_async_batch_depth=4, max_running_requests=64)
    pipeline = WatchedPipeline(KIMI, shape, seed=0, start_s=10.0)
    pipeline.set_cap(cap)
    for number in range(requests):
        pipeline.submit(PipelineRequest(str(number), 16, 40), 10.0)
    end_s = 10.0
    while (next_s := pipeline.next_step_s()) is not None:
        end_s = next_s
        pipeline.step()
    return pipeline, end_s


@pytest.mark.parametrize(("requests", "cap", "slots"), [(1, 8, 1), (6, 1, 6), (6, 2, 3)])
def test_slots_that_hold_requests_are_counted(requests: int, cap: int, slots: int) -> None:
    pipeline, end_s = ran(requests, cap)
    middle_s = (10.0 + end_s) / 2
    assert pipeline.occupied_slots(middle_s, end_s) == pytest.approx(slots, abs=0.35)


def test_an_idle_pipeline_occupies_none() -> None:
    pipeline, end_s = ran(1, 8)
    busy_s = end_s - 10.0
    assert pipeline.occupied_slots(10.0, end_s + busy_s) == pytest.approx(0.5, abs=0.1)
    assert pipeline.occupied_slots(end_s + 1, end_s + 2) == 0.0
    assert pipeline.occupied_slots(end_s, end_s) == 0.0
