"""What the GPUs of a study draw before anything of ours runs on them, and what they may draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.clock import Clock
from runner.errors import StudyError
from runner.measure.energy import energy_over
from runner.measure.power import SHORTEST_PERIOD_S, GpuIdentity, GpuSensor, PowerMeter
from runner.settings import StudySettings

IDLE_S = 3.0
FEWEST_PERIODS = 10
POWER_METRICS = ("power_w", "energy_j", "tokens_per_joule", "joules_per_request")


@dataclass(frozen=True, slots=True)
class IdleGpu:
    """One GPU before the study's first launch on it. None: unavailable, never 0.

    `pids`: processes that held memory on it while its power was read. GPUs that were read together
    have the same number of their `reading`: 0 for those of the first session, one more each time
    that a later session finds GPUs which were not read before.
    """

    index: int
    uuid: str
    name: str
    power_w: float | None
    power_limit_w: float | None
    pids: tuple[int, ...] = ()
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    reading: int = 0


def read_idle(sensor: GpuSensor, gpus: Sequence[GpuIdentity], clock: Clock) -> tuple[IdleGpu, ...]:
    """Read the GPUs for 3 s of the clock; raises ClusterLost if one cannot be read."""
    uuids = [gpu.uuid for gpu in gpus]
    meter = PowerMeter(sensor, uuids, clock)
    meter.start()
    start_s = clock.now_s()
    clock.sleep(max(IDLE_S, FEWEST_PERIODS * SHORTEST_PERIOD_S * clock.scale))
    end_s = clock.now_s()
    meter.stop()
    energies = energy_over(meter.samples(start_s, end_s), start_s, end_s)
    power_w = {each.gpu_uuid: each.power_w for each in energies}
    return tuple(
        IdleGpu(
            index=gpu.index,
            uuid=gpu.uuid,
            name=gpu.name,
            power_w=power_w[gpu.uuid],
            power_limit_w=gpu.power_limit_w,
            pids=tuple(process.pid for process in sensor.processes(gpu.uuid)),
            capability=gpu.capability,
            memory_bytes=gpu.memory_total_bytes or None,
        )
        for gpu in gpus
    )


def require_power(settings: StudySettings, gpus: Sequence[IdleGpu]) -> None:
    """Refuse a study that asks for power or energy of GPUs that do not offer it."""
    blind = [gpu for gpu in gpus if gpu.power_w is None]
    asking = [f"objective {o.metric}" for o in settings.objectives if o.metric in POWER_METRICS]
    if settings.search.energy_j is not None:
        asking.append("search.energy_j")
    if blind and asking:
        raise StudyError(
            f"{asking[0]} needs the power of every GPU, and that of {len(blind)} of {len(gpus)} "
            f"is unavailable (GPU {blind[0].index}, {blind[0].uuid}; a slice has none of its own); "
            "choose another objective or budget, or whole GPUs that report their power"
        )
