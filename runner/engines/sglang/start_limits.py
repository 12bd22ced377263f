"""How long each phase of a start may take: the one table, and what a study changes in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from runner.trial import Params

WARM_UP = "warmup"
WATCHDOG_PARAM = "watchdog_timeout"
WATCHDOG_TIMEOUT_S = 300.0  # SGLang's default; it fires between 1 and 1.5 times that


@dataclass(frozen=True, slots=True)
class PhaseLimit:
    """Seconds of the study's clock: of the whole phase, and of it without any progress.

    Progress is a log line, work on a CPU or reading from a disk.
    """

    most_s: float
    quiet_s: float


PHASE_LIMITS: Mapping[str, PhaseLimit] = {
    # From the process's start to the first rank's: Python imports, perhaps from a network disk.
    "import": PhaseLimit(most_s=1200.0, quiet_s=300.0),
    # Ranks find each other. A rank that never comes keeps the others busy.
    "init": PhaseLimit(most_s=900.0, quiet_s=300.0),
    # 600 GB from a disk of 25 MB/s take 7 hours, and each of them is progress.
    "load_weights": PhaseLimit(most_s=8 * 3600.0, quiet_s=600.0),
    "kv_cache": PhaseLimit(most_s=900.0, quiet_s=300.0),
    # Attention kernels are compiled and graphs captured.
    "cuda_graph": PhaseLimit(most_s=1800.0, quiet_s=600.0),
    # SGLang's own watchdog ends a server that hangs here after 300 to 450 s.
    WARM_UP: PhaseLimit(most_s=420.0, quiet_s=420.0),
}


def limits_for(limits: Mapping[str, PhaseLimit], args: Params) -> Mapping[str, PhaseLimit]:
    """The limits of a server with these arguments.

    Whoever gives SGLang's watchdog more time expects long steps, also of the warm-up.
    """
    timeout_s = args.get(WATCHDOG_PARAM)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        return limits
    factor, usual = max(1.0, timeout_s / WATCHDOG_TIMEOUT_S), limits[WARM_UP]
    return {**limits, WARM_UP: PhaseLimit(factor * usual.most_s, factor * usual.quiet_s)}


def with_allowance(
    limits: Mapping[str, PhaseLimit], allowance_s: float
) -> Mapping[str, PhaseLimit]:
    """Every limit so much longer: time that no clock's scale shortens."""
    return {
        phase: replace(
            limit, most_s=limit.most_s + allowance_s, quiet_s=limit.quiet_s + allowance_s
        )
        for phase, limit in limits.items()
    }
