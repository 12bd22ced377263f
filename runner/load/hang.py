"""When servers that hold requests and send nothing are said to hang, each server on its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runner.clock import Clock
from runner.lengths import longest
from runner.load.client import Target
from runner.load.reply import Reply
from runner.trial import LoadPlan

HANG_S = 120.0
WARM_UP_HANG_S = 300.0  # the first batch of a size may compile kernels; SGLang's watchdog waits so
SLOWEST_PREFILL = 500.0  # tokens/s: nothing comes while a single long prompt is read
SHORTEST_WALL_S = 2.0  # whatever the clock's scale: a busy machine may stand still for a moment
LOOKS = 20  # at every request in flight, in the time that a server may be silent


def hang_limit_s(plan: LoadPlan, clock: Clock) -> float:
    """How long a server with requests may send no token of any, in seconds of the clock."""
    usual_s = WARM_UP_HANG_S if plan.is_warmup else HANG_S
    prefill_s = longest(plan.prompt_tokens) / SLOWEST_PREFILL
    return max(usual_s, prefill_s, SHORTEST_WALL_S * clock.scale)


class HangWatch:
    """The latest sign of life of each target of a load."""

    def __init__(self, targets: Sequence[Target], limit_s: float, now_s: float) -> None:
        self._limit_s = limit_s
        self._heard_s = {target.replica: now_s for target in targets}
        self._looked_s = now_s

    def heard(self, target: Target, now_s: float) -> None:
        """A request of this target has ended, well or not."""
        self._heard_s[target.replica] = now_s

    def look(self, now_s: float, in_flight: Iterable[tuple[Target, Reply]]) -> str | None:
        """Which server hangs, in words; None: none does, or it is too early to look again."""
        if now_s - self._looked_s < self._limit_s / LOOKS:
            return None
        self._looked_s = now_s
        waiting = dict.fromkeys(self._heard_s, 0)
        for target, reply in in_flight:
            waiting[target.replica] += 1
            if reply.token_s:
                latest_s = max(self._heard_s[target.replica], reply.token_s[-1])
                self._heard_s[target.replica] = latest_s
        for replica, count in waiting.items():
            if count == 0:
                self._heard_s[replica] = now_s
            silent_s = now_s - self._heard_s[replica]
            if silent_s >= self._limit_s:
                requests = "1 request" if count == 1 else f"{count} requests"
                which = "the server" if len(waiting) == 1 else f"server {replica}"
                return (
                    f"{which} hangs: no output token came in {silent_s:.0f} s with {requests} in "
                    f"flight (at most {self._limit_s:.0f} s)"
                )
        return None
