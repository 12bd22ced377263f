"""The closed form of steady decode: what one server gives under a load, not simulated. Pure.

n busy slots with x requests each, stage time s(x), hop c, CPU time o of a rank per batch:

    round = max(sum over slots of max(s(x), o), pp_size * (s(x) + c) + o')   x: of the fullest slot
    without depth, all slots busy, also slots * (what a result takes to come back / (pp_size - 1))
    without stages, one step: max(GPU, CPU)
    tokens/s = requests in flight / round, less what prefills take

Slots fill by the scheduler's rules. A burst is admitted greedily: the first visit takes the one
request that has arrived, each later one as many as the cap and the chunk budget allow. A request
that replaces an ended one lands in the next open slot: equal lengths keep together for ever, uneven
ones drift apart, after `LIVES` lifetimes by a normal law of variance LIVES * cv ** 2 slots (cv: the
relative deviation of the output lengths). What the cap refuses goes on to the next slot, and what
exceeds slots, rows or KV cache waits.

Left out, so simulate where it matters: which slot meets which, chance in what ends when, metastable
states, a prefix cache, noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from runner.machine.hardware import REQUEST_S, Profile
from runner.machine.occupancy import Counts, occupancy
from runner.machine.shape import ServerShape, resolve, slots
from runner.machine.visit import Visit, Visits
from runner.trial import LoadProtocol

LIVES = 2.5  # lifetimes after which a closed loop is looked at
WIDTH = math.sqrt(12.0)  # width of a uniform law in standard deviations
TAIL_SHARE = 0.15  # of a burst, to stand for what is left of it while the uneven ones end
POLLING_SHARE = 0.5  # of a stage's idle time in which its receiving kernel already waits


@dataclass(frozen=True, slots=True)
class SteadyLoad:
    """The load of one server. `rate` (requests/s) is the open loop's, else `concurrency` counts.

    `output_cv` is the standard deviation of the output lengths over their mean;
    `longest_output_tokens` is the longest of a burst (0: none is longer than the mean).
    """

    protocol: LoadProtocol
    concurrency: int
    prompt_tokens: float
    output_tokens: float
    output_cv: float = 0.0
    longest_output_tokens: float = 0.0
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class SteadyState:
    """One server under one load; for a burst, means from the first send to the last token.

    `busy_stages` of pp_size work at a time, `slots` hold requests, `in_flight` requests have a
    row, `power_w` is the sum over the server's GPUs. `tpot_s` and `ttft_s` are means, the latter
    an estimate.
    """

    output_throughput: float
    tpot_s: float
    ttft_s: float
    busy_stages: float
    slots: float
    in_flight: int
    power_w: float


class _Passes(NamedTuple):
    """Prefill passes: per lifetime in a slot, per round in all slots, and how many coincide."""

    per_life: float
    per_round: float
    together: float


class _Phase(NamedTuple):
    """Sums over some rounds: seconds, GPU seconds, joules beyond idle, seconds of busy slots."""

    time_s: float
    work_s: float
    extra_j: float
    slot_s: float

    def times(self, factor: float) -> _Phase:
        return _Phase(*(factor * value for value in self))

    def plus(self, other: _Phase) -> _Phase:
        return _Phase(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class SteadyModel:
    """The closed form of one server; remembers what batches cost over caps and loads."""

    def __init__(self, profile: Profile, shape: ServerShape) -> None:
        self._profile = profile
        self._shape = shape
        self._resolved = resolve(profile, shape)
        self._visits = Visits(profile, shape)
        self._slots = slots(shape)
        self._ranks = shape.pp_size
        self._chunk_tokens = self._resolved.chunk_tokens

    def state(self, cap: int | None, load: SteadyLoad) -> SteadyState:
        """The server under `load`, with `cap` requests per slot at most (None: the server's own).

        An open loop that is faster than the server is one with every row taken; its queue grows
        without limit and is left out of `ttft_s`.
        """
        if cap is None:
            cap = self._resolved.pp_max_micro_batch_size
        if load.protocol is LoadProtocol.OPEN_LOOP and load.rate is not None:
            return self._open_loop(cap, load, load.rate)
        return self._loaded(cap, load, load.concurrency)

    def _open_loop(self, cap: int, load: SteadyLoad, rate: float) -> SteadyState:
        """The least concurrency that keeps up with the rate (Little's law)."""
        wanted = rate * load.output_tokens
        low, high = 1, self._room(cap, load)
        found = self._loaded(cap, load, high)
        if found.output_throughput < wanted:
            return found
        while low < high:
            middle = (low + high) // 2
            tried = self._loaded(cap, load, middle)
            if tried.output_throughput < wanted:
                low = middle + 1
            else:
                high, found = middle, tried
        share = wanted / found.output_throughput
        idle_w = self._profile.gpu.server_idle_w * self._shape.gpus
        return replace(
            found,
            output_throughput=wanted,
            busy_stages=found.busy_stages * share,
            slots=found.slots * share,
            power_w=idle_w + (found.power_w - idle_w) * share,
        )

    def _room(self, cap: int, load: SteadyLoad) -> int:
        """The most requests in flight: slots, rows and KV cache."""
        kept = max(load.prompt_tokens + load.output_tokens, 1.0)
        in_cache = int(self._resolved.max_total_tokens // kept)
        return max(1, min(self._slots * cap, self._resolved.max_running_requests, in_cache))

    def _loaded(self, cap: int, load: SteadyLoad, sent: int) -> SteadyState:
        """The state when `sent` requests are kept in flight or, as a burst, are sent together."""
        running = min(sent, self._room(cap, load))
        is_burst = load.protocol is LoadProtocol.BURST
        spread = 0.0 if is_burst and sent == running else load.output_cv
        counts = self._counts(cap, load, running)
        passes = self._passes(counts, load, spread)
        prefill = self._prefill(counts, load, passes)
        context = load.prompt_tokens + load.output_tokens / 2
        visits = [self._visits.decode(count, context) for count in counts]
        occupied = sum(min(count, 1.0) for count in counts)
        later = self._later(load, occupied)
        round_s = self._round_s(visits, later, prefill, passes)
        rounds = max(load.output_tokens, 1.0) + passes.per_life - 1.0
        life_s = rounds * round_s
        decodes = 1.0 - passes.per_round / len(counts)
        phase = _Phase(
            time_s=round_s,
            work_s=decodes * sum(v.work_s for v in visits) + passes.per_round * prefill.work_s,
            extra_j=decodes * sum(v.extra_j for v in visits) + passes.per_round * prefill.extra_j,
            slot_s=round_s * occupied,
        ).times(life_s * sent / running / round_s)
        if is_burst:
            phase = self._burst(cap, load, sent, running, phase).plus(self._tail(counts, load))
        busy_stages = min(phase.work_s / phase.time_s, float(self._ranks))
        queue_s = phase.time_s * (sent - running) / sent
        return SteadyState(
            output_throughput=sent * load.output_tokens / phase.time_s,
            tpot_s=(rounds - 1.0) * round_s / max(load.output_tokens - 1.0, 1.0),
            ttft_s=self._first_s(prefill, passes, round_s, spread)
            + queue_s * (0.5 if is_burst else 1.0),
            busy_stages=busy_stages,
            slots=phase.slot_s / phase.time_s,
            in_flight=running,
            power_w=self._power_w(busy_stages, phase.extra_j / phase.time_s),
        )

    def _counts(self, cap: int, load: SteadyLoad, running: int) -> Counts:
        """Mean requests of each occupied slot."""
        if self._ranks == 1:
            return (float(running),)
        per_visit = max(1, int(self._chunk_tokens // max(load.prompt_tokens, 1.0)))
        host = self._profile.host
        if host.accept_s > 0:  # while a prefill is launched, so many more come through HTTP
            launch_s = self._visits.visit(
                round(load.prompt_tokens) or 1, 1, 0.0, is_prefill=True
            ).launch_s
            per_visit = max(1, min(per_visit, round(launch_s / host.accept_s)))
        is_burst = load.protocol is LoadProtocol.BURST
        variance = 0.0 if is_burst else LIVES * load.output_cv**2
        return occupancy(self._slots, cap, min(cap, per_visit), running, round(variance, 2))

    def _passes(self, counts: Counts, load: SteadyLoad, spread: float) -> _Passes:
        """How often prefills come: the more uneven the lengths, the fewer requests end together."""
        output = max(load.output_tokens, 1.0)
        width = max(1.0, WIDTH * spread * output)  # rounds over which requests of an age end
        chunks = load.prompt_tokens / self._chunk_tokens
        each = [max(1.0, min(count, width), count * chunks) for count in counts]
        per_life = max(each)
        return _Passes(
            per_life, sum(each) / (output + per_life - 1.0), max(1.0, len(counts) / width)
        )

    def _prefill(self, counts: Counts, load: SteadyLoad, passes: _Passes) -> Visit:
        """One prefill pass of the fullest slot."""
        requests = max(1, round(max(counts) / passes.per_life))
        tokens = min(max(1, round(requests * load.prompt_tokens)), self._chunk_tokens)
        return self._visits.visit(tokens, requests, 0.0, is_prefill=True)

    def _round_s(
        self, visits: Sequence[Visit], later: float, prefill: Visit, passes: _Passes
    ) -> float:
        """A mean round: most rounds only decode, some also prefill."""
        decode_s = self._decode_s(visits, later)
        if self._ranks == 1:
            return decode_s + passes.per_round * (prefill.stage_s - decode_s)
        longer_s = prefill.stage_s - max(visit.stage_s for visit in visits)
        sum_s = sum(visit.stage_s for visit in visits) + passes.together * max(longer_s, 0.0)
        prefill_s = max(decode_s, sum_s, prefill.path_s)
        share = 1.0 - math.exp(-passes.per_round / passes.together)
        return decode_s + share * (prefill_s - decode_s)

    def _decode_s(self, visits: Sequence[Visit], later: float) -> float:
        """A round without prefills; with depth, results wait for `later` launches more."""
        sum_s = sum(visit.stage_s for visit in visits)
        if self._ranks == 1:
            return sum_s
        between = max(self._shape.pp_async_batch_depth - 1, 0)
        empty_s = (between - later) * self._profile.host.empty_slot_s
        late_s = max(v.launched_s + later * v.launch_s + empty_s for v in visits)
        if self._shape.pp_async_batch_depth == 0 and len(visits) == self._slots:
            sum_s = max(sum_s, sum(visit.return_s for visit in visits))
        return max(sum_s, late_s, *(visit.path_s for visit in visits))

    def _later(self, load: SteadyLoad, occupied: float) -> float:
        """How many busy slots are between a busy one and the visit that ships its result.

        That is `depth` visits later, before its own launch.
        """
        between = max(self._shape.pp_async_batch_depth - 1, 0)
        others = max(occupied - 1.0, 0.0)
        if self._ranks > 1 and load.output_cv and load.protocol is not LoadProtocol.BURST:
            return others * between / (self._slots - 1)  # they lie anywhere
        return min(float(between), others)  # they lie side by side

    def _burst(self, cap: int, load: SteadyLoad, sent: int, running: int, phase: _Phase) -> _Phase:
        """A burst but for its tail: equal requests go in waves, the last of them a smaller one."""
        waves, rest = divmod(sent, running)
        if not rest or load.longest_output_tokens > load.output_tokens:
            return phase  # uneven ones are replaced one by one
        last = self._loaded(cap, load, rest)
        last_s = rest * load.output_tokens / last.output_throughput
        whole = phase.times(waves * running / sent)
        idle_w = self._power_w(last.busy_stages, 0.0)
        return whole.plus(
            _Phase(
                time_s=last_s,
                work_s=last.busy_stages * last_s,
                extra_j=(last.power_w - idle_w) * last_s,
                slot_s=last.slots * last_s,
            )
        )

    def _tail(self, counts: Counts, load: SteadyLoad) -> _Phase:
        """While the longest requests of a burst end."""
        rounds = max(load.longest_output_tokens - load.output_tokens, 0.0)
        left = [count * TAIL_SHARE for count in counts]
        context = load.prompt_tokens + load.output_tokens
        visits = [self._visits.decode(count, context) for count in left]
        occupied = sum(min(count, 1.0) for count in left)
        round_s = self._decode_s(visits, self._later(load, occupied))
        return _Phase(
            time_s=round_s,
            work_s=sum(visit.work_s for visit in visits),
            extra_j=sum(visit.extra_j for visit in visits),
            slot_s=round_s * occupied,
        ).times(rounds)

    def _first_s(self, prefill: Visit, passes: _Passes, round_s: float, spread: float) -> float:
        """From the send to the first token of an admitted request."""
        host = self._profile.host
        first_s = (
            REQUEST_S
            + host.http_s
            + host.accept_s
            + prefill.path_s
            + (passes.together - 1.0) / 2 * prefill.stage_s
        )
        if self._ranks > 1:
            return first_s
        # It waits for the step that runs: a decode, or the first's prefill where all come together.
        return first_s + (round_s / 2 if spread else prefill.stage_s)

    def _power_w(self, busy_stages: float, extra_w: float) -> float:
        """All GPUs: idle, what work adds, and what waiting for the stage before adds."""
        gpu = self._profile.gpu
        receivers = (self._ranks - 1) * self._shape.tp_size
        waiting = POLLING_SHARE * (1.0 - busy_stages / self._ranks)
        polling_w = receivers * waiting * (gpu.communication_w - gpu.server_idle_w)
        return self._shape.gpus * gpu.server_idle_w + extra_w + polling_w
