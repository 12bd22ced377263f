"""The load generator: a blocking door to one phase of load, and the sum of several shards."""

from __future__ import annotations

import asyncio
import gc
import resource
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import uvloop

from runner.clock import Clock
from runner.errors import Interrupted
from runner.load.client import Target
from runner.load.phase import LoadProgress, Phase
from runner.measure.batches import rate_in, token_times
from runner.measure.hopeless import HOPELESS
from runner.trial import ClientHealth, LoadPlan, LoadRun

__all__ = ["LoadGenerator", "LoadProgress", "merge_runs"]

SHORTEST_COMMON = 0.5


class LoadGenerator:
    """Drives one plan at a time against servers; reusable for the whole study."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._cancel: Callable[[], object] | None = None

    def run(
        self,
        plan: LoadPlan,
        targets: Sequence[Target],
        shard: int = 0,
        shards: int = 1,
        on_progress: Callable[[LoadProgress], None] | None = None,
    ) -> LoadRun:
        """Drive the plan to its end by the window rule.

        Stream i of the plan loads target i modulo their number; shard s of n drives the streams
        s, s + n, ... What still runs at the end is cut off and aborted on the servers.

        Raises LoadFailed when too many requests fail, and Interrupted after `cancel`.
        """
        allow_connections()
        phase = Phase(plan, targets, self._clock, shard, shards)
        loop = uvloop.new_event_loop()
        task = loop.create_task(phase.run(on_progress))
        with self._lock:
            self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        gc.freeze()  # a full collection would walk through all the driver holds while tokens come
        try:
            return loop.run_until_complete(task)
        except asyncio.CancelledError as err:
            raise Interrupted("the load was stopped") from err
        finally:
            gc.unfreeze()
            with self._lock:
                self._cancel = None
            loop.close()

    def cancel(self) -> None:
        """From another thread: the run in progress, if any, raises Interrupted soon."""
        with self._lock:
            if self._cancel is not None:
                self._cancel()
                self._cancel = None


def allow_connections() -> None:
    """Each request in flight holds a connection: take as many open files as we are given."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def merge_runs(runs: Sequence[LoadRun]) -> LoadRun:
    """The shards of one phase as one run, over the window they have in common.

    Each shard ends by its own rule, so the windows differ. The common one is steady when every
    shard's is and it is at least half as long as the shortest: less of it says too little.

    A shard that ends early as hopeless leaves the servers to the others, so where such a shard
    ends first, its window is the common one: all of them ran in it. Only where they were hopeless
    together is the load; else it is not steady.
    """
    if len(runs) == 1:
        return runs[0]
    first = min(runs, key=lambda run: run.window_end_s)
    if first.cut_below is not None:
        merged = replace(_merge(runs, *first.window), is_steady=False)
        is_hopeless = rate_in(token_times(merged), *first.window) < HOPELESS * first.cut_below
        return replace(merged, cut_below=first.cut_below if is_hopeless else None)
    start_s = max(run.window_start_s for run in runs)
    end_s = min(run.window_end_s for run in runs)
    shortest_s = min(run.window_end_s - run.window_start_s for run in runs)
    is_long = end_s - start_s >= SHORTEST_COMMON * shortest_s and end_s > start_s
    is_steady = is_long and all(run.is_steady for run in runs)
    return replace(_merge(runs, start_s, max(end_s, start_s)), is_steady=is_steady)


def _merge(runs: Sequence[LoadRun], start_s: float, end_s: float) -> LoadRun:
    """All records of the shards, over one window."""
    return LoadRun(
        records=tuple(
            sorted((r for run in runs for r in run.records), key=lambda record: record.send_s)
        ),
        started_s=min(run.started_s for run in runs),
        window_start_s=start_s,
        window_end_s=end_s,
        is_steady=False,
        client=ClientHealth(
            cpu_share=max(run.client.cpu_share for run in runs),
            max_lag_s=max(run.client.max_lag_s for run in runs),
            clock_jump_s=max(run.client.clock_jump_s for run in runs),
        ),
        start=runs[0].start,
    )
