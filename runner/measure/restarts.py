"""How often the load of a rung is started anew, and what its restarts say together.

One window cannot show its own error: which requests share a slot of a pipeline can last for many
request durations, so all of a window sees one state, and its batches agree with each other better
than with the long run. So a rate is claimed from restarts: the load is drained and begun again on
the same servers, with other prompts and lengths. Each restart's rate is one observation.

The plan of a rung asks for `restarts` of them at least; a search trial asks for one, and claims
nothing. Where it asks for three or more, of a closed loop of two or more streams, a **probe** comes
second: a restart whose streams begin together, while those of the others begin gradually
(load/ramp.py). A setting that forgets how it was started gives the probe the rate of the others.

halfwidth = t * sqrt(max(s^2, w^2) / n) + e

n     restarts that count; t: Student's t at 97.5 %, n - 1 degrees of freedom
s     the standard deviation of their rates
w     what their windows alone explain: the root mean square of the standard errors of their batch
      means (measure/window.py), so that rates which agree by luck claim no more than a window can
e     |mean rate of the second halves of the windows - that of the first halves|: what creeps within
      a window, by less than its noise perhaps, creeps on behind it

The claim is about the long run after a gradual start. **Metastable** says that the load may as well
stay elsewhere for long: the probe lies outside its prediction interval, t * sqrt((1 + 1/n) *
max(s^2, w^2)) around the mean, or s^2 / w^2 is above Fisher's F at 99 % (three batches a window are
assumed; windows of more have more degrees of freedom). Its spread is that of all restarts, the
probe included. Replies of equal length that begin together stay in step: a closed loop of them is
often metastable.

More restarts follow while the half-width is above `precision` of the mean and `MOST` of them would
bring it there if s stayed what it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from runner.measure.batches import (
    end_times,
    rate_batches,
    rate_in,
    token_times,
)
from runner.measure.student import student_t
from runner.trial import LoadPlan, LoadProtocol, LoadRun, LoadStart, RungRecord

FEWEST = 3
MOST = 6
MOST_LOADS = MOST + 1  # with the probe
PROBE_PLACE = 1
# Fisher's F, 99 % with (n - 1, 2 n) degrees of freedom, by n from 2 on.
FISHER_F = (21.20, 10.92, 7.591, 5.994, 5.064, 4.456, 4.026, 3.705, 3.457)


@dataclass(frozen=True, slots=True)
class RateClaim:
    """What restarts say of a rate, in its unit; `halfwidth` None: fewer than two count."""

    mean: float
    halfwidth: float | None
    is_metastable: bool


def has_probe(plan: LoadPlan) -> bool:
    """Whether a rung of this plan has a restart whose streams begin together."""
    is_loop = plan.protocol is LoadProtocol.CLOSED_LOOP and plan.concurrency > 1
    return is_loop and plan.restarts >= FEWEST


def next_restart(plan: LoadPlan, loads: Sequence[LoadRun]) -> LoadPlan | None:
    """The next restart of a rung's load after those that were driven; None: they are enough."""
    done = len(loads)
    if has_probe(plan) and done == PROBE_PLACE:
        return _restart(plan, done, LoadStart.TOGETHER)
    is_claiming = plan.restarts >= FEWEST
    if len(_counted(loads)) < plan.restarts or (is_claiming and _is_worth_more(plan, loads)):
        return _restart(plan, done, plan.start)
    return None


def claim(plan: LoadPlan, loads: Sequence[LoadRun]) -> RateClaim:
    """The output throughput of a rung (tokens/s) from the restarts of its load."""
    counted = _counted(loads)
    probe = next((load for load in loads if not any(load is each for each in counted)), None)
    tokens_s = [token_times(load) for load in counted]
    seen = list(zip(counted, tokens_s, strict=True))
    noises = [_window_error(plan, load, token_s) for load, token_s in seen]
    is_burst = plan.protocol is LoadProtocol.BURST
    return claim_of(
        [rate_in(token_s, *load.window) for load, token_s in seen],
        errors=[noise for noise in noises if noise is not None],
        creeps=[] if is_burst else [_creep(token_s, *load.window) for load, token_s in seen],
        probe=None if probe is None else output_rate(probe),
    )


def _counted(loads: Sequence[LoadRun]) -> tuple[LoadRun, ...]:
    return RungRecord(0, 0, tuple(loads), ()).counted


def claim_of(
    rates: Sequence[float],
    *,
    errors: Sequence[float] = (),
    creeps: Sequence[float] = (),
    probe: float | None = None,
) -> RateClaim:
    """The claim of this module from the rates of restarts.

    Args:
        rates: the rate of each restart that counts, at least one.
        errors: the standard error of each, as its own window shows it; empty: not known.
        creeps: by how much the second half of each window is faster; empty: not known.
        probe: the rate of the probe; None: there is none.
    """
    mean = statistics.fmean(rates)
    count = len(rates)
    if count <= 1:
        return RateClaim(mean, None, is_metastable=False)
    between = statistics.variance(rates)
    within = statistics.fmean(error * error for error in errors) if errors else 0.0
    t = student_t(count - 1)
    fisher = FISHER_F[min(count, len(FISHER_F) + 1) - 2]
    variance = max(between, within)
    creeping = abs(statistics.fmean(creeps)) if creeps else 0.0
    reach = t * math.sqrt((1 + 1 / count) * variance)
    is_apart = probe is not None and abs(probe - mean) > reach
    is_uneven = within > 0 and between > fisher * within
    return RateClaim(mean, t * math.sqrt(variance / count) + creeping, is_apart or is_uneven)


def output_rate(load: LoadRun) -> float:
    """Output tokens per second in the window of one load; failed requests deliver nothing."""
    return rate_in(token_times(load), *load.window)


def creep(load: LoadRun) -> float:
    """By how much the second half of a load's window is faster than the first (tokens/s)."""
    return _creep(token_times(load), *load.window)


def _creep(token_s: Sequence[float], start_s: float, end_s: float) -> float:
    middle_s = (start_s + end_s) / 2
    return rate_in(token_s, middle_s, end_s) - rate_in(token_s, start_s, middle_s)


def _window_error(plan: LoadPlan, load: LoadRun, token_s: Sequence[float]) -> float | None:
    """The standard error of a load's rate by its batch means; None for a burst, which has none."""
    if plan.protocol is LoadProtocol.BURST:
        return None
    concurrency = plan.concurrency if plan.protocol is LoadProtocol.CLOSED_LOOP else None
    rates = rate_batches(token_s, end_times(load), concurrency, *load.window)
    return math.sqrt(statistics.variance(rates) / len(rates)) if len(rates) > 1 else None


def _is_worth_more(plan: LoadPlan, loads: Sequence[LoadRun]) -> bool:
    counted = _counted(loads)
    if len(counted) >= MOST:
        return False
    found = claim(plan, loads)
    wanted = plan.precision * found.mean
    if found.halfwidth is None or found.halfwidth <= wanted:
        return False
    rates = [output_rate(load) for load in counted]
    best = student_t(MOST - 1) * math.sqrt(statistics.variance(rates) / MOST)
    return best <= wanted


def _restart(plan: LoadPlan, number: int, start: LoadStart) -> LoadPlan:
    return replace(plan, phase=f"{plan.phase}-{number}", start=start)
