"""What one visit of the stages to a slot costs in steady decode, for the closed form. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from runner.machine.graphs import Launching
from runner.machine.hardware import Profile
from runner.machine.shape import ServerShape
from runner.machine.stage import BatchCost, StageModel


class Visit(NamedTuple):
    """One batch: the slowest stage's seconds, the way through all, GPU seconds and joules of all.

    `launch_s` is the CPU's part of a visit up to the launch, and `launched_s` the time until the
    last rank has launched; `extra_j` is beyond idle. `return_s`: from the end of rank 0's visit to
    that of the visit that waits for its result, over the visits between without depth.
    """

    stage_s: float
    path_s: float
    return_s: float
    launch_s: float
    launched_s: float
    work_s: float
    extra_j: float


class Visits:
    """Visits of one server's stages; remembers what decodes cost."""

    def __init__(self, profile: Profile, shape: ServerShape) -> None:
        self._profile = profile
        self._shape = shape
        self._ranks = shape.pp_size
        self._stages = StageModel(profile, shape)
        self._decodes: dict[tuple[float, float], Visit] = {}

    def decode(self, count: float, context: float) -> Visit:
        """One decode of `count` requests on average; between whole numbers on a line.

        Of a slot that is sometimes empty, the way through the stages is that of its one request.
        """
        known = self._decodes.get((count, context))
        if known is None:
            above = math.ceil(count)
            known = self.visit(above, above, above * context, is_prefill=False)
            share = count - above + 1
            if above == 1:
                known = known._replace(
                    stage_s=share * known.stage_s,
                    return_s=share * known.return_s,
                    work_s=share * known.work_s,
                    extra_j=share * known.extra_j,
                )
            elif share < 1:
                below = self.visit(above - 1, above - 1, (above - 1) * context, is_prefill=False)
                pairs = zip(below, known, strict=True)
                known = Visit(*(low + share * (high - low) for low, high in pairs))
            self._decodes[count, context] = known
        return known

    def visit(self, tokens: int, requests: int, kv_tokens: float, *, is_prefill: bool) -> Visit:
        """One batch of `tokens` new tokens of `requests` requests, with `kv_tokens` of context."""
        host, stages = self._profile.host, self._stages
        launching = stages.launching(tokens, is_prefill=is_prefill)
        cost = stages.cost(tokens, requests, launching)
        gpu_s = [s + kv_tokens * kv_s for s, kv_s in zip(cost.gpu_s, stages.kv_s, strict=True)]
        work_s = sum(gpu_s)
        extra_j = work_s * (cost.busy_w - self._profile.gpu.server_idle_w) * self._shape.tp_size
        result_s = host.result_s + requests * host.result_request_s
        # Eager kernels run while later ones are launched; a graph waits for its one launch. A
        # forward that blocks is launched only once it has run.
        launch_s = max(cost.launch_s) + (max(gpu_s) if host.is_blocking else 0.0)
        cpu_s = host.schedule_s + launch_s
        # A rank hands over hidden states and results, in and out; the ends have one less to do.
        exchanges_s = host.exchange_s * (min(self._ranks, 3) + 1 if self._ranks > 1 else 0)
        stage_s = max(*gpu_s, cpu_s + result_s + exchanges_s)
        if self._ranks == 1:
            return Visit(stage_s, stage_s, 0.0, cpu_s, cpu_s, work_s, extra_j)
        launched_s = self._ranks * (launch_s + host.message_s)
        path_s, return_s = self._ways_s(cost, gpu_s, launch_s, result_s)
        return Visit(stage_s, path_s, return_s, cpu_s, launched_s, work_s, extra_j)

    def _ways_s(
        self,
        cost: BatchCost,
        gpu_s: Sequence[float],
        launch_s: float,
        result_s: float,
    ) -> tuple[float, float]:
        """`path_s` and `return_s` of a visit."""
        host, ranks = self._profile.host, self._ranks
        is_whole = cost.launching is Launching.GRAPH
        exchange_s, others = host.exchange_s, ranks - 1
        if host.is_blocking:
            path_s, last_s = ranks * (launch_s + host.message_s), launch_s
        elif is_whole:
            path_s, last_s = launch_s + sum(gpu_s), launch_s + gpu_s[-1]
        else:
            pairs = zip(gpu_s, cost.launch_s, strict=True)
            stages_s = [max(gpu + cost.lead * cpu, cpu + cost.lead * gpu) for gpu, cpu in pairs]
            path_s, last_s = sum(stages_s), stages_s[-1]
        hops_s = ranks * self._profile.link.hop_s
        back_s = result_s + hops_s
        # With little to do for the GPUs a token waits for every rank's CPU: hidden states out and
        # in, and its result on its way around the ring.
        cpus_s = ranks * (host.schedule_s + result_s) + others * launch_s + last_s
        cpus_s += (3 * ranks - 1) * exchange_s + hops_s
        away_s = (others - 1) * launch_s + others * (2 * exchange_s + host.message_s) + last_s
        if is_whole:
            away_s = max(away_s, launch_s + sum(gpu_s[1:]))
        path_s = max(path_s + host.schedule_s + back_s, cpus_s)
        return path_s, (away_s + exchange_s + back_s) / others
