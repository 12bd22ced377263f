"""What to measure next but for the sampler's choice: retries, baselines, re-measurements.

Pure over the history of trials. The rules are the outcome table of the design: a failed setting
is tried once more at most, an invalid one twice, a lost one again until it is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runner.search.history import History, PastTrial
from runner.settings import Baseline, Direction, MeasureSettings, Objective
from runner.trial import Outcome, Params, TrialLengths, TrialResult

MOST_TRIES = 3
MOST_FAILURES = 2


@dataclass(frozen=True, slots=True)
class Proposal:
    """One setting to measure, under its number. A re-measurement asks for a launch of its own.

    `lengths` says whether the replies are those of the search or the user's own.
    """

    number: int
    params: Params
    name: str | None
    retry_of: int | None
    repeat_of: int | None
    fresh_launch: bool
    spec_hash: str
    lengths: TrialLengths = TrialLengths.SEARCH


def proposal_of(trial: PastTrial) -> Proposal:
    """What is to be measured for a trial that runs."""
    return Proposal(
        number=trial.number,
        params=trial.params,
        name=trial.name,
        retry_of=trial.retry_of,
        repeat_of=trial.repeat_of,
        fresh_launch=trial.repeat_of is not None,
        spec_hash=trial.spec_hash,
        lengths=trial.lengths,
    )


def retry_due(history: History) -> PastTrial | None:
    """The first trial that is to be tried again, None when there is none."""
    ends = last_of_bad(history)
    return next((trial for trial in ends if is_tried_again(tries(history, trial))), None)


def given_up(history: History) -> frozenset[int]:
    """The last trials of settings that failed or were invalid too often: as infeasible now."""
    ends = last_of_bad(history)
    return frozenset(trial.number for trial in ends if not is_tried_again(tries(history, trial)))


def last_of_bad(history: History) -> list[PastTrial]:
    """Trials that failed, were invalid or lost and that no other trial retries."""
    retried = {trial.retry_of for trial in history}
    bad = (Outcome.FAILED, Outcome.INVALID, Outcome.LOST)
    return [trial for trial in history if trial.outcome in bad and trial.number not in retried]


def tries(history: History, last: PastTrial) -> list[Outcome]:
    """The outcomes of a trial and of those it retries, oldest first; running ones left out."""
    by_number = {trial.number: trial for trial in history}
    outcomes: list[Outcome] = []
    trial: PastTrial | None = last
    while trial is not None:
        if trial.outcome is not None:
            outcomes.append(trial.outcome)
        trial = None if trial.retry_of is None else by_number[trial.retry_of]
    return outcomes[::-1]


def is_tried_again(outcomes: Sequence[Outcome]) -> bool:
    """Whether a setting with these outcomes, oldest first, is measured again.

    A loss says nothing about the setting, so losses are not counted as tries.
    """
    judged = [outcome for outcome in outcomes if outcome is not Outcome.LOST]
    match outcomes[-1]:
        case Outcome.LOST:
            return True
        case Outcome.INVALID:
            return len(judged) < MOST_TRIES
        case Outcome.FAILED:
            return len(judged) < MOST_TRIES and judged.count(Outcome.FAILED) < MOST_FAILURES
        case Outcome.COMPLETE | Outcome.PRUNED | Outcome.INFEASIBLE:
            return False


def settle(history: History, result: TrialResult) -> TrialResult:
    """The result as it is kept: invalid once too often is failed, for the same reason."""
    trial = next(trial for trial in history if trial.number == result.number)
    outcomes = [*tries(history, replace(trial, outcome=None)), result.outcome]
    if result.outcome is Outcome.INVALID and not is_tried_again(outcomes):
        return replace(result, outcome=Outcome.FAILED)
    return result


def next_baseline(history: History, baselines: Sequence[Baseline]) -> Baseline | None:
    """The first baseline that no trial has measured yet."""
    begun = {trial.name for trial in history if trial.is_search}
    return next((baseline for baseline in baselines if baseline.name not in begun), None)


def search_is_full(history: History, wanted: int) -> bool:
    """Whether enough trials count, or will if those that run do."""
    return sum(trial.counts or (trial.is_search and trial.is_running) for trial in history) >= (
        wanted
    )


def repeat_due(
    history: History, objectives: Sequence[Objective], measure: MeasureSettings
) -> PastTrial | None:
    """The trial to measure once more: the finalists and each complete baseline, in rounds.

    Rounds go through all of them before any is measured again, so that a slow drift of the
    machine hits all alike. A re-measurement that ended badly was its turn; retries aside.
    """
    best = finalists(history, objectives, measure.finalists)
    named = [trial for trial in measured(history) if trial.name]
    targets = {trial.number: trial for trial in (*best, *named)}
    turns = [trial.repeat_of for trial in history if trial.retry_of is None]
    for turn in range(1, measure.repeats + 1):
        for number, trial in targets.items():
            if turns.count(number) < turn:
                return trial
    return None


def measured(history: History) -> list[PastTrial]:
    """The complete trials of the search that have a measurement of their own."""
    complete = [t for t in history if t.is_search and t.outcome is Outcome.COMPLETE]
    return [trial for trial in complete if trial.shares is None]


def finalists(
    history: History, objectives: Sequence[Objective], most: int
) -> tuple[PastTrial, ...]:
    """The best complete trials of the search, best first; re-measurements say nothing here.

    Those that keep every limit come first; with several objectives a trial is the better the
    fewer others beat it in all of them. Equals stay in the order of their numbers.
    """
    complete = measured(history)

    def beaten_by(trial: PastTrial) -> int:
        return sum(beats(other, trial, objectives) for other in complete)

    ordered = sorted(complete, key=lambda trial: (trial.violation, beaten_by(trial), trial.number))
    return tuple(ordered[:most])


def beats(one: PastTrial, other: PastTrial, objectives: Sequence[Objective]) -> bool:
    """Whether one trial keeps its limits as well, is nowhere worse and somewhere better."""
    if one.violation > other.violation:
        return False
    gains = [
        mine - theirs if objective.direction is Direction.MAXIMIZE else theirs - mine
        for mine, theirs, objective in zip(one.values, other.values, objectives, strict=True)
    ]
    return min(gains) >= 0 and max(gains) > 0
