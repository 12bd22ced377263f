"""The rivals, as closed formulas: who shares a slot, and how long a round of all slots lasts.

In a round every busy slot gets one token per request. A burst is followed from one end of a
request to the next, because rounds get shorter as requests end. `stage_s(b)` is one of 8 stages
with a batch of b; other splits of the model do 8 stages' work on tp GPUs in pp stages, and add a
share of the collectives of TP8 (`reduce_s` per token) that grows with tp - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.machine.shape import slots
from runner.machine.stage import distinct_experts
from runner.pipeline import ServerShape
from tests.bench.rivals.fit import Values
from tests.bench.rivals.measured import ROWS, Run

STAGES = 8
EXPERTS, EXPERTS_PER_TOKEN = 384, 8
STAGGERED_S = 1e-3  # longer gaps than this: every request meets another slot


class ClosedForm:
    """What the rivals have in common. `per_visit`: requests a slot takes as they arrive."""

    name = ""
    about = ""
    scale = 1.0
    start: Values
    per_visit = ROWS

    def throughputs(self, values: Values, runs: Sequence[Run]) -> list[float]:
        return [self._throughput(values, run) for run in runs]

    def round_s(self, values: Values, shape: ServerShape, sizes: Sequence[int]) -> float:
        """Seconds in which each of the busy slots gets one token per request."""
        raise NotImplementedError

    def stage_s(self, values: Values, batch: int) -> float:
        """One of 8 stages."""
        raise NotImplementedError

    def work_s(self, values: Values, shape: ServerShape, batch: int) -> float:
        """One stage of a server of any split, its launch included when that is slower."""
        share = STAGES / (shape.tp_size * shape.pp_size)
        stage_s = self.stage_s(values, batch) * share
        stage_s += values["reduce_s"] * (shape.tp_size - 1) / (STAGES - 1) / shape.pp_size
        if not shape.cuda_graph:
            stage_s = max(stage_s, values["eager_stage_s"] * STAGES / shape.pp_size)
        return stage_s

    def _throughput(self, values: Values, run: Run) -> float:
        members = self._fill(run)
        if run.is_closed_loop:
            sizes = [len(slot) for slot in members if slot]
            return sum(sizes) / self.round_s(values, run.shape, sizes)
        started = sum(len(slot) for slot in members)
        waiting = list(run.lengths[started:])
        wall_s = 0.0
        while any(members):
            sizes = [len(slot) for slot in members if slot]
            rounds = min(min(slot) for slot in members if slot)
            wall_s += rounds * self.round_s(values, run.shape, sizes)
            for slot in members:
                left = [tokens - rounds for tokens in slot if tokens > rounds]
                ended = len(slot) - len(left)
                slot[:] = left + waiting[:ended]
                del waiting[:ended]
        return sum(run.lengths) / wall_s

    def _fill(self, run: Run) -> list[list[int]]:
        """The remaining tokens of the requests of each slot."""
        shape = run.shape
        cap = shape.pp_max_micro_batch_size or max(ROWS // shape.pp_size, 1)
        is_staggered = run.gap_s is not None and run.gap_s > STAGGERED_S
        per_visit = 1 if is_staggered else self.per_visit
        members: list[list[int]] = [[] for _ in range(slots(shape))]
        waiting = list(run.lengths)
        place = 0
        while waiting and any(len(slot) < cap for slot in members):
            slot = members[place % len(members)]
            taken = min(cap - len(slot), per_visit)
            slot += waiting[:taken]
            del waiting[:taken]
            place += 1
        return members


class OneSlot(ClosedForm):
    """The slot rule with a free law of the stage time."""

    name = "one slot"
    about = (
        "under cap 64 all requests of a burst share one slot; a stage takes s1, jumps by `jump_s` "
        "with a few requests, then grows by `request_s` for each"
    )

    def __init__(self) -> None:
        self.start: Values = {
            "s1_s": 3.5e-3,
            "jump_s": 7e-3,
            "half_requests": 2.0,
            "request_s": 1.5e-4,
            "reduce_s": 34e-3,
            "eager_stage_s": 5e-3,
        }

    def stage_s(self, values: Values, batch: int) -> float:
        more = batch - 1
        jump_s = values["jump_s"] * more / (more + values["half_requests"])
        return values["s1_s"] + jump_s + values["request_s"] * more

    def round_s(self, values: Values, shape: ServerShape, sizes: Sequence[int]) -> float:
        works_s = [self.work_s(values, shape, size) for size in sizes]
        return max(shape.pp_size * max(works_s), sum(works_s))


class CpuBound(ClosedForm):
    """The host decides."""

    name = "CPU-bound"
    about = (
        "a stage takes the same time for any batch, and every slot with a batch costs the host "
        "`slot_s` a round, every request `request_s`"
    )

    def __init__(self) -> None:
        self.start: Values = {
            "s1_s": 3.0e-3,
            "slot_s": 4e-3,
            "request_s": 2e-3,
            "reduce_s": 30e-3,
            "eager_stage_s": 4.5e-3,
        }

    def stage_s(self, values: Values, batch: int) -> float:  # noqa: ARG002 - of any batch
        return values["s1_s"]

    def round_s(self, values: Values, shape: ServerShape, sizes: Sequence[int]) -> float:
        gpu_s = shape.pp_size * self.work_s(values, shape, max(sizes))
        return gpu_s + len(sizes) * values["slot_s"] + sum(sizes) * values["request_s"]


class Spread(ClosedForm):
    """Requests of a burst arrive over some iterations, so that caps above `per_visit` do nothing.

    A stage takes `fixed_s` and `expert_s` for each distinct expert of its batch.
    """

    def __init__(self, per_visit: int) -> None:
        self.per_visit = per_visit

    def stage_s(self, values: Values, batch: int) -> float:
        overlap = min(values.get("overlap", 0.0), 0.95)
        hit = distinct_experts(EXPERTS, EXPERTS_PER_TOKEN, batch, overlap)
        return values["fixed_s"] + values["expert_s"] * hit


class ResultsQueue(Spread):
    """A result is handed over only after the batches that were launched since."""

    name = "results queue"
    about = (
        "a burst spreads over slots as it arrives, and with depth d a result leaves the last "
        "stage only after the next min(d, slots - 1) batches have run there"
    )

    def __init__(self, per_visit: int) -> None:
        super().__init__(per_visit)
        self.start: Values = {
            "fixed_s": 2.2e-3,
            "expert_s": 1.6e-4,
            "overlap": 0.1,
            "reduce_s": 30e-3,
            "eager_stage_s": 5e-3,
        }

    def round_s(self, values: Values, shape: ServerShape, sizes: Sequence[int]) -> float:
        works_s = [self.work_s(values, shape, size) for size in sizes]
        if shape.pp_size == 1:
            return works_s[0]
        behind = min(len(sizes) - 1, shape.pp_async_batch_depth)
        return max((shape.pp_size + behind) * max(works_s), sum(works_s))


class Contention(Spread):
    """Stages that work at the same time slow each other down."""

    name = "contention"
    about = (
        "a burst spreads over slots as it arrives, and each further busy stage makes all of them "
        "slower by `slower`"
    )

    def __init__(self, per_visit: int) -> None:
        super().__init__(per_visit)
        self.start: Values = {
            "fixed_s": 2.2e-3,
            "expert_s": 1.6e-4,
            "slower": 0.1,
            "reduce_s": 30e-3,
            "eager_stage_s": 5e-3,
        }

    def round_s(self, values: Values, shape: ServerShape, sizes: Sequence[int]) -> float:
        busy = min(len(sizes), shape.pp_size)
        slower = 1.0 + values["slower"] * (busy - 1)
        works_s = [self.work_s(values, shape, size) for size in sizes]
        return slower * max(shape.pp_size * max(works_s), sum(works_s))


PER_VISIT = (4, 6, 8, 12, 16)


def families() -> tuple[tuple[ClosedForm, ...], ...]:
    """Each rival, in all its versions of whole numbers."""
    return (
        (OneSlot(),),
        (CpuBound(),),
        tuple(ResultsQueue(per_visit) for per_visit in PER_VISIT),
        tuple(Contention(per_visit) for per_visit in PER_VISIT),
    )
