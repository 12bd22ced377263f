"""How much is spent: on one trial (the rung budget) and on the study (minutes, launches, joules).

The rung budget. Rungs are measured with the objective's rung first (position 0), so its value is
known before the time of the other rungs is spent. A trial is stopped there when it is clearly
behind: worse than the best value seen at that rung by more than a fifth. It is never stopped

- with several objectives (no one value says that a setting is behind),
- as a baseline or a re-measurement (the table wants all their rungs),
- before four trials have shown what there is to be compared with,
- against a trial that misses a latency limit (slower may be what keeps the limit).

A rate that still drifted, or whose load was cut short, is no measurement, but may say enough: where
even a rate better by `doubt` would be clearly behind, the setting is not tried again.

What a throughput must reach not to be stopped is its rung's `worth`: known before the rung begins,
so that a hopeless load ends early (measure/hopeless.py). A trial that is tried again is measured in
full, since the first time was unfair in some way.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.search.history import History, PastTrial
from runner.settings import Direction, Objective, SearchSettings
from runner.trial import Outcome

BEHIND = 0.2
FIRST_TRIALS = 4
OBJECTIVE_POSITION = 0
SEEN_BY_LOAD = "output_throughput"
"""The metric whose rate a load can watch while it runs."""


def reason_to_stop(
    trial: PastTrial,
    history: History,
    objectives: Sequence[Objective],
    position: int,
    value: float,
    doubt: float = 0.0,
) -> str | None:
    """Why the trial is not worth its other rungs; None: go on.

    `doubt` is how far the value may be off, relative.
    """
    rival = _rival(trial, history, objectives, position)
    if rival is None:
        return None
    best_value, best = rival
    objective = objectives[0]
    sign = _sign(objective)
    hoped = value + sign * doubt * abs(value)
    if sign * (best_value - hoped) <= BEHIND * abs(best_value):
        return None
    unsteady = ", not steady yet, still" if doubt else ""
    where = f"{value:.4g} at concurrency {objective.concurrency:g}{unsteady}"
    return (
        f"{objective.metric} {where} is more than {BEHIND:.0%} behind {best_value:.4g}, "
        f"the best so far (trial {best.number})"
    )


def worth(
    trial: PastTrial, history: History, objectives: Sequence[Objective], position: int
) -> float | None:
    """The value (tokens/s) below which the trial would be stopped at this rung.

    None: nothing stops it there, or its load cannot see the objective while it runs.
    """
    rival = _rival(trial, history, objectives, position)
    objective = objectives[0]
    is_seen = objective.metric == SEEN_BY_LOAD and objective.direction is Direction.MAXIMIZE
    if rival is None or not is_seen or trial.retry_of is not None:
        return None
    return (1 - BEHIND) * rival[0]


def _rival(
    trial: PastTrial, history: History, objectives: Sequence[Objective], position: int
) -> tuple[float, PastTrial] | None:
    """The best value so far and its trial, if this one may not be clearly behind it."""
    if len(objectives) > 1 or position != OBJECTIVE_POSITION:
        return None
    if trial.name is not None or not trial.is_search:
        return None
    shown = [(seen, other) for other in history if (seen := value_seen(other)) is not None]
    fair = [(seen, other) for seen, other in shown if other.violation == 0]
    if len(shown) < FIRST_TRIALS or not fair:
        return None
    return max(fair, key=lambda pair: _sign(objectives[0]) * pair[0])


def _sign(objective: Objective) -> int:
    return 1 if objective.direction is Direction.MAXIMIZE else -1


def value_seen(trial: PastTrial) -> float | None:
    """The one objective's value of a trial that counts, None when it has none."""
    if not trial.counts:
        return None
    if trial.outcome is Outcome.COMPLETE:
        return trial.values[0]
    return trial.reported.get(OBJECTIVE_POSITION)


def spent_budget(
    search: SearchSettings, minutes_used: float, launches_used: int, energy_used_j: float
) -> str | None:
    """Which budget of the study is spent, in words; None: all last."""
    if search.minutes is not None and minutes_used >= search.minutes:
        return f"search.minutes: {minutes_used:.1f} of {search.minutes:g} are used"
    if search.launches is not None and launches_used >= search.launches:
        return f"search.launches: {launches_used} of {search.launches} are used"
    if search.energy_j is not None and energy_used_j >= search.energy_j:
        return f"search.energy_j: {energy_used_j:.0f} of {search.energy_j:g} are used"
    return None
