"""GPUs that grow too hot under load and slow down."""

from __future__ import annotations

import asyncio

from runner.clock import Clock
from runner.engines.emulator.faults.fault import Fault
from runner.engines.emulator.server_gpus import ServerGpus
from runner.engines.emulator.serving import Serving

LOOK_S = 0.1
SHORTEST_LOOK_S = 0.002  # real seconds


async def heat_up(fault: Fault | None, serving: Serving, clock: Clock, gpus: ServerGpus) -> None:
    """Wait for the load that makes the GPUs hot, then slow them down for good."""
    if fault is None:
        return
    load_s, lost_share = fault.argument.numbers
    looked_s = clock.now_s()
    while load_s > 0:
        await asyncio.sleep(max(clock.wall_duration_s(LOOK_S), SHORTEST_LOOK_S))
        now_s = clock.now_s()
        if not serving.is_idle:
            load_s -= now_s - looked_s
        looked_s = now_s
    serving.pace.slow_down(1.0 - lost_share, clock.now_s())
    gpus.throttle(1.0 - lost_share)
