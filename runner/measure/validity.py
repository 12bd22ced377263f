"""Whether a rung was measured fairly: each unfairness as a reason in plain words.

A rung without reasons is valid. Nothing here is about good or bad numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from runner.measure.batches import rate_in, token_times
from runner.measure.energy import by_gpu, longest_gap_s, spans
from runner.measure.hopeless import HOPELESS
from runner.measure.restarts import FEWEST
from runner.measure.window import longest_ramp_s
from runner.trial import (
    GpuEnergy,
    LoadPlan,
    LoadProtocol,
    LoadRun,
    PowerSample,
    RequestRecord,
    RequestStatus,
    RungRecord,
)

MAX_CPU_SHARE = 0.9
MAX_LAG_S = 0.05
MAX_ERROR_RATE = 0.01
LOWEST_ACHIEVED = 0.9
MOST_SHORTENED = 0.6
CACHED_MARGIN = 0.05
LEAST_CACHED = 0.5  # of the share that prompts have in common
LATE_SHARE = 0.5  # of the mean gap between two arrivals
LEAST_LATE_S = 0.002  # no timer is finer
MOST_LATE = 0.01  # of the requests
MAX_CLOCK_JUMP_S = 0.5
CLOCK_PARTS = 4
MAX_CLOCK_SHIFT = 0.15  # within a fair window of an H200 at its power limit: below 0.10


def find_reasons(
    rung: RungRecord, plan: LoadPlan, achieved: float, gpus: Sequence[GpuEnergy]
) -> tuple[str, ...]:
    """Every reason why this rung is no fair measurement, in words for the user.

    Args:
        rung: the raw record.
        plan: the plan of its load.
        achieved: its achieved concurrency.
        gpus: its energy per GPU.
    """
    records = [record for load in rung.loads for record in load.records]
    found: list[str | None] = [_cut(rung), _drift(rung, plan), _silence(rung), _hung(rung)]
    found += [_client_cpu(rung), _client_lag(rung)]
    found += [_clock_jump(rung)]
    found += [_errors(records), _token_counts(records), _cache(records, plan.shared_prefix)]
    match plan.protocol:
        case LoadProtocol.CLOSED_LOOP:
            found += [_concurrency(rung.concurrency, achieved)]
        case LoadProtocol.OPEN_LOOP:
            found += [_backlog(rung), _late_sends(records, plan)]
        case LoadProtocol.BURST:
            pass
    found += _power(rung, gpus)
    found += _strangers(rung)
    if plan.protocol is not LoadProtocol.BURST:  # prefill and decode run at clocks of their own
        found += _clock_shifts(rung)
    return tuple(reason for reason in found if reason is not None)


def _cut(rung: RungRecord) -> str | None:
    for load in rung.counted:
        if load.cut_below is not None:
            rate = rate_in(token_times(load), *load.window)
            return (
                f"cut short: at {rate:.4g} tokens/s it was less than {HOPELESS:.0%} of the "
                f"{load.cut_below:.4g} it had to reach"
            )
    return None


def drifting(rung: RungRecord) -> int:
    """How many of the loads that count were not steady, those that were cut short apart."""
    return sum(not load.is_steady and load.cut_below is None for load in rung.counted)


def is_unsteady(rung: RungRecord, plan: LoadPlan) -> bool:
    """Whether drift makes the rung unfair: of one load, or of half of its restarts.

    The more restarts, the likelier that one of them drifts by chance. Its rate is one observation
    then, and the interval is theirs: what they creep by on the mean is in it (measure/restarts.py).
    A burst that was given up is always unfair.
    """
    loads = rung.counted
    usual_s = statistics.median(load.window_end_s - load.window_start_s for load in loads)
    is_claimed = len(loads) >= FEWEST and plan.protocol is not LoadProtocol.BURST
    if not is_claimed or any(_is_unfinished(load, plan, usual_s) for load in loads):
        return drifting(rung) > 0
    return drifting(rung) > (len(loads) - 1) // 2


def _is_unfinished(load: LoadRun, plan: LoadPlan, usual_s: float) -> bool:
    """Whether a load is not steady for another reason than drift.

    Its ramp-up was cut off, or its shards hardly ran together (load/generator.py).
    """
    length_s, ramp_s = load.window_end_s - load.window_start_s, load.window_start_s - load.started_s
    return not load.is_steady and (length_s < usual_s / 2 or ramp_s >= longest_ramp_s(plan))


def _drift(rung: RungRecord, plan: LoadPlan) -> str | None:
    if not is_unsteady(rung, plan):
        return None
    count = len(rung.counted)
    which = "" if count == 1 else f" in {drifting(rung)} of {count} restarts"
    return f"not steady{which}: the token rate drifted within its window"


def _silence(rung: RungRecord) -> str | None:
    is_heard = all(
        any(
            load.window_start_s < time_s <= load.window_end_s
            for r in load.records
            for time_s in r.token_s
        )
        for load in rung.counted
    )
    return None if is_heard else "no output token arrived in the window"


def _hung(rung: RungRecord) -> str | None:
    """Requests that were in flight over a whole window and got nothing in it.

    Those that only queue are none: they had no token before either, and nobody overtook them. The
    one period of a load that was cut short is no longer than a request may queue.
    """
    hung = sum(
        bool(record.token_s) or _is_overtaken(record, load, rung.concurrency)
        for load in rung.counted
        if load.cut_below is None
        for record in load.records
        if record.status is RequestStatus.CUT
        and record.send_s <= load.window_start_s
        and record.end_s >= load.window_end_s
        and not any(load.window_start_s < time_s for time_s in record.token_s)
    )
    if not hung:
        return None
    which = "1 request" if hung == 1 else f"{hung} requests"
    return f"{which} hung: in flight over a whole window, without a token in it"


def _is_overtaken(queued: RequestRecord, load: LoadRun, streams: int) -> bool:
    """Whether as many later requests as there are streams were answered before this one."""
    later = (record for record in load.records if record.send_s > queued.send_s)
    return sum(record.first_token_s is not None for record in later) >= streams


def _client_cpu(rung: RungRecord) -> str | None:
    share = max(load.client.cpu_share for load in rung.counted)
    if share <= MAX_CPU_SHARE:
        return None
    return (
        f"the load generator was the limit: it used {share:.0%} of a core "
        f"(at most {MAX_CPU_SHARE:.0%}); use more load generators"
    )


def _client_lag(rung: RungRecord) -> str | None:
    lag_s = max(load.client.max_lag_s for load in rung.counted)
    if lag_s <= MAX_LAG_S:
        return None
    return (
        f"the load generator was the limit: it ran {lag_s * 1000:.0f} ms late "
        f"(at most {MAX_LAG_S * 1000:.0f} ms); leave it more CPU time"
    )


def _clock_jump(rung: RungRecord) -> str | None:
    jump_s = max(load.client.clock_jump_s for load in rung.counted)
    if jump_s <= MAX_CLOCK_JUMP_S:
        return None
    return (
        f"the machine's time jumped by {jump_s:.1f} s (at most {MAX_CLOCK_JUMP_S} s): it was "
        "suspended, stood still, or its clock was set"
    )


def _errors(records: Iterable[RequestRecord]) -> str | None:
    ended = [record for record in records if record.status is not RequestStatus.CUT]
    failed = [record for record in ended if record.status is RequestStatus.FAILED]
    if len(failed) <= MAX_ERROR_RATE * len(ended):
        return None
    return (
        f"error rate: {len(failed)} of {len(ended)} requests failed "
        f"(at most {MAX_ERROR_RATE:.0%}); the first: {failed[0].error}"
    )


def _token_counts(records: Iterable[RequestRecord]) -> str | None:
    ok = [record for record in records if record.status is RequestStatus.OK]
    wrong = [record for record in ok if record.output_tokens != record.wanted_tokens]
    if not wrong:
        return None
    return (
        f"{len(wrong)} of {len(ok)} requests returned another number of tokens than asked for; "
        f"the first: {wrong[0].output_tokens} of {wrong[0].wanted_tokens}"
    )


def _cache(records: Iterable[RequestRecord], shared_prefix: float) -> str | None:
    ok = [record for record in records if record.status is RequestStatus.OK]
    prompt_tokens = sum(record.prompt_tokens for record in ok)
    cached_tokens = sum(record.cached_tokens for record in ok)
    # One token a prompt may have come before by chance (load/workload.py).
    if cached_tokens <= (shared_prefix + CACHED_MARGIN) * prompt_tokens + len(ok):
        return None
    return (
        f"the prefix cache served {cached_tokens / prompt_tokens:.0%} of the prompt tokens, "
        f"but prompts share only {shared_prefix:.0%}"
    )


def find_notes(rung: RungRecord, plan: LoadPlan) -> tuple[str, ...]:
    """What a user should know of a rung that is fair all the same, in words."""
    found = (
        *(_drifted(rung, plan), _unserved_prefix(rung, plan.shared_prefix)),
        _few_durations(rung, plan),
    )
    return tuple(note for note in found if note is not None)


def _drifted(rung: RungRecord, plan: LoadPlan) -> str | None:
    if not drifting(rung) or is_unsteady(rung, plan):
        return None
    return (
        f"the token rate drifted in {drifting(rung)} of {len(rung.counted)} restarts; the interval "
        "of the throughput takes it in"
    )


def _few_durations(rung: RungRecord, plan: LoadPlan) -> str | None:
    """Whether the longest window was much shorter than the request durations it was to hold."""
    is_cut = any(load.cut_below is not None for load in rung.counted)
    if plan.protocol is not LoadProtocol.CLOSED_LOOP or is_cut:
        return None
    records = [record for load in rung.counted for record in load.records]
    e2e_s = [r.end_s - r.send_s for r in records if r.status is RequestStatus.OK]
    if math.fsum(e2e_s) <= 0:
        return None
    windows = [load.window for load in rung.counted]
    window_s = statistics.fmean(end_s - start_s for start_s, end_s in windows)
    durations = window_s / statistics.fmean(e2e_s)
    if durations >= MOST_SHORTENED * plan.min_periods:
        return None
    return (
        f"a window holds {durations:.1f} mean request durations where {plan.min_periods} are "
        "wanted: raise measure.max_window_s for a surer value"
    )


def _unserved_prefix(rung: RungRecord, shared_prefix: float) -> str | None:
    """Whether the prefix that prompts share was not served from the cache."""
    records = (record for load in rung.loads for record in load.records)
    ok = [record for record in records if record.status is RequestStatus.OK]
    prompt_tokens = sum(record.prompt_tokens for record in ok)
    cached_tokens = sum(record.cached_tokens for record in ok)
    if cached_tokens >= LEAST_CACHED * shared_prefix * prompt_tokens:
        return None
    served = "nothing" if not cached_tokens else f"only {cached_tokens / prompt_tokens:.0%}"
    return (
        f"prompts share {shared_prefix:.0%} of their tokens, but the prefix cache served {served} "
        "of them; is it off (disable_radix_cache), or too small?"
    )


def _late_sends(records: Iterable[RequestRecord], plan: LoadPlan) -> str | None:
    """Whether the generator could not keep the arrival times of an open loop."""
    late_s = [record.send_s - record.due_s for record in records if record.due_s is not None]
    if not plan.rate or not late_s:
        return None
    limit_s = max(LATE_SHARE / plan.rate, LEAST_LATE_S)
    count = sum(each > limit_s for each in late_s)
    if count <= MOST_LATE * len(late_s):
        return None
    return (
        f"client-limited: requests left up to {max(late_s) * 1000:.0f} ms late, {count} of "
        f"{len(late_s)} later than {LATE_SHARE:.0%} of the mean gap (at most {MOST_LATE:.0%}); "
        "leave the load generator more CPU time, or use more of them"
    )


def _concurrency(offered: int, achieved: float) -> str | None:
    if achieved >= LOWEST_ACHIEVED * offered:
        return None
    return (
        f"only {achieved:.1f} of {offered} requests were in flight on average "
        f"(at least {LOWEST_ACHIEVED:.0%})"
    )


def _backlog(rung: RungRecord) -> str | None:
    arrived = finished = 0
    for load in rung.counted:
        start_s, end_s = load.window
        arrived += sum(start_s < record.send_s <= end_s for record in load.records)
        finished += sum(
            start_s < record.end_s <= end_s
            for record in load.records
            if record.status is not RequestStatus.CUT
        )
    # Arrivals are random: three standard deviations are no sign of a backlog.
    if finished >= LOWEST_ACHIEVED * arrived - 3 * math.sqrt(arrived):
        return None
    return f"the servers did not keep up: {arrived} requests arrived, {finished} finished"


def _power(rung: RungRecord, gpus: Sequence[GpuEnergy]) -> list[str]:
    reasons = [_throttled(rung, gpu.gpu_uuid) for gpu in gpus if gpu.throttled]
    gaps_s: list[float] = []
    for gpu in gpus:
        taken = [sample for sample in rung.power if sample.gpu_uuid == gpu.gpu_uuid]
        if gpu.energy_j is not None or not _offers_power(taken):
            continue
        gaps_s.append(max(longest_gap_s(taken, *load.window) for load in rung.counted))
    if gaps_s:
        which = "1 GPU" if len(gaps_s) == 1 else f"{len(gaps_s)} GPUs"
        reasons.append(f"the power of {which} was not read for {max(gaps_s):.1f} s")
    return reasons


def _offers_power(taken: Sequence[PowerSample]) -> bool:
    """Whether the GPU offers power at all: one that does not is unavailable, not unfair."""
    return any(sample.power_w is not None or sample.energy_j is not None for sample in taken)


def _throttled(rung: RungRecord, gpu_uuid: str) -> str:
    taken = by_gpu(rung.power)[gpu_uuid]
    inside = [held for load in rung.counted for held in spans(taken, *load.window)]
    slow = [(sample, held_s) for sample, held_s in inside if sample.throttled]
    words = f"GPU {gpu_uuid} was slowed down by heat or by its power supply"
    if not slow:  # by its last reading, at the window's end
        return words
    share = sum(held_s for _, held_s in slow) / sum(held_s for _, held_s in inside)
    words += f" for {share:.0%} of the window"
    clocks_mhz = [s.sm_clock_mhz for s, _ in slow if s.sm_clock_mhz is not None]
    return words + (f", down to {min(clocks_mhz):.0f} MHz" if clocks_mhz else "")


def _clock_shifts(rung: RungRecord) -> list[str]:
    """Which GPUs ran a part of a window at another clock than the rest.

    The clock of a GPU at its power limit moves with every batch; the means of the quarters of a
    steady window do not. A GPU that idles may save power, so idle readings do not count,
    nor those of a throttled GPU, which is a reason of its own.
    """
    reasons = []
    for uuid, taken in by_gpu(rung.power).items():
        for start_s, end_s in (load.window for load in rung.counted):
            part_s = (end_s - start_s) / CLOCK_PARTS
            starts_s = [start_s + part * part_s for part in range(CLOCK_PARTS)]
            parts = [_mean_clock_mhz(taken, from_s, from_s + part_s) for from_s in starts_s]
            means_mhz = [mean_mhz for mean_mhz in parts if mean_mhz is not None]
            if len(means_mhz) < CLOCK_PARTS:
                continue
            usual_mhz = statistics.median(means_mhz)
            other_mhz = max(means_mhz, key=lambda mhz: abs(mhz - usual_mhz))
            if abs(other_mhz - usual_mhz) > MAX_CLOCK_SHIFT * usual_mhz:
                reasons.append(_shift_words(uuid, other_mhz, usual_mhz))
                break
    return reasons


def _mean_clock_mhz(taken: Sequence[PowerSample], start_s: float, end_s: float) -> float | None:
    known = [
        (sample.sm_clock_mhz, held_s)
        for sample, held_s in spans(taken, start_s, end_s)
        if sample.sm_clock_mhz is not None and sample.utilization != 0 and not sample.throttled
    ]
    total_s = sum(held_s for _, held_s in known)
    return sum(mhz * held_s for mhz, held_s in known) / total_s if known else None


def _shift_words(uuid: str, other_mhz: float, usual_mhz: float) -> str:
    return (
        f"the clock of GPU {uuid} changed: it ran at {other_mhz:.0f} MHz in a quarter of the "
        f"window, at {usual_mhz:.0f} MHz else (at most {MAX_CLOCK_SHIFT:.0%} apart)"
    )


def _strangers(rung: RungRecord) -> list[str]:
    reasons = []
    for uuid, taken in by_gpu(rung.power).items():
        inside = (sample for load in rung.counted for sample, _ in spans(taken, *load.window))
        pid = next((s.foreign_pid for s in inside if s.foreign_pid is not None), None)
        if pid is not None:
            reasons.append(f"process {pid}, none of ours, used GPU {uuid} during the measurement")
    return reasons
