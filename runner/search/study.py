"""The door to the search: ask for a setting, tell how it went. The only user of Optuna is here.

One process at a time, the driver, opens a study's search and is the only one to write it. What
is in memory is a copy of what is stored: read when the study is opened, then kept in step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from runner.errors import StudyError
from runner.expression import Expression
from runner.forecast.refusals import known_refusal
from runner.launch import spec_hash
from runner.plans import lengths_of
from runner.search.budget import OBJECTIVE_POSITION, reason_to_stop, spent_budget, worth
from runner.search.history import Counts, PastTrial, count
from runner.search.proposals import (
    Proposal,
    next_baseline,
    proposal_of,
    repeat_due,
    retry_due,
    search_is_full,
    settle,
)
from runner.search.sampler import VIOLATED, choose, inside
from runner.search.storage import NewTrial, TrialStorage
from runner.search.stuck import MOST_UNMEASURED, stuck_words, unmeasured_after
from runner.settings import Baseline, StudySettings
from runner.space import enumerate_space
from runner.trial import Outcome, Params, TrialLengths, TrialResult

LARGEST_LISTED_SPACE = 20_000


class Search:
    """The search of one study, in an Optuna storage that survives the process."""

    def __init__(self, settings: StudySettings, storage_url: str) -> None:
        self._settings = self._whole = settings
        self._storage = TrialStorage(settings, storage_url)
        self._trials = {trial.number: trial for trial in self._storage.read_all()}
        self._refusal = known_refusal(settings)
        self._losses_in_a_row = 0
        self._unmeasured: tuple[TrialResult, ...] = ()
        self._is_exhausted = False

    def restrict(self, constraints: Sequence[Expression]) -> None:
        """Offer no setting that breaks these either, from now on, until restricted otherwise."""
        self._settings = replace(self._whole, constraints=(*self._whole.constraints, *constraints))

    def running(self) -> tuple[Proposal, ...]:
        """What was asked for and not told: at the start, what a dead driver left."""
        return tuple(proposal_of(trial) for trial in self._history if trial.is_running)

    def ask(self) -> Proposal | None:
        """Begin the next trial; None when there is nothing to begin.

        In this order: a trial to repeat because it failed, was invalid or lost; a baseline not
        measured yet; what the sampler proposes, until `search.trials` count, the space is
        exhausted or the search is stuck; then the finalists and baselines once more, when nothing
        of the search runs, at the lengths of the workload.
        """
        new = self._next()
        if new is None:
            return None
        trial = self._storage.create(new)
        self._trials[trial.number] = trial
        return proposal_of(trial)

    def report(self, number: int, position: int, value: float) -> None:
        """Store the objective's metric at one rung; with several objectives nothing is stored."""
        check_finite([value], f"trial {number}, rung {position}")
        if len(self._settings.objectives) == 1:
            self._storage.report(number, position, value)
            self._refresh(number)

    def should_stop(
        self, number: int, position: int, value: float, doubt: float = 0.0
    ) -> str | None:
        """Why a trial is not worth its other rungs, None to go on (the rule: budget.py)."""
        check_finite([value], f"trial {number}, rung {position}")
        return reason_to_stop(
            self._trials[number], self._history, self._settings.objectives, position, value, doubt
        )

    def worth(self, number: int, position: int) -> float | None:
        """What the load of a rung must reach to matter (tokens/s), None: unknown (budget.py)."""
        return worth(self._trials[number], self._history, self._settings.objectives, position)

    def settle(self, result: TrialResult) -> TrialResult:
        """The result to keep and tell: invalid once too often becomes failed, same reason."""
        return settle(self._history, result)

    def tell(self, result: TrialResult) -> None:
        """End a trial as its outcome says. Telling the same outcome again does nothing.

        Raises:
            StudyError: there is no such trial, or it ended with another outcome.
            ValueError: a value or constraint is not finite, or their number is wrong.
        """
        trial = self._trials.get(result.number)
        if trial is None:
            raise StudyError(f"trial {result.number} was never begun in the search storage")
        if trial.outcome is not None:
            if trial.outcome is not result.outcome:
                raise StudyError(
                    f"trial {result.number} ended {trial.outcome} in the search storage, but "
                    f"{result.outcome} in its result.json; move its folder away to go on"
                )
            return
        constraints = self._constraints_of(result)
        values = self._values_of(result)
        if result.outcome is Outcome.PRUNED and len(result.values) == 1 and not trial.reported:
            self.report(result.number, OBJECTIVE_POSITION, result.values[0])
        self._storage.add_params(result.number, self._found(trial, result))
        self._storage.add_constraints(result.number, constraints)
        self._storage.end(result, values)
        self._refresh(result.number)
        self._unmeasured = unmeasured_after(self._unmeasured, result)
        if result.outcome is Outcome.LOST:
            self._losses_in_a_row += 1
        elif result.outcome is Outcome.COMPLETE:
            self._losses_in_a_row = 0

    def trials(self) -> tuple[PastTrial, ...]:
        """Every trial that was begun, by number."""
        return self._history

    def counts(self) -> Counts:
        """How many trials ended how."""
        return count(self._history, self._settings.search.trials)

    def losses_in_a_row(self) -> int:
        """Trials lost since the last complete one, in this process."""
        return self._losses_in_a_row

    def why_stuck(self) -> str | None:
        """Why the search offers nothing new: too many trials in a row, in this process, had no
        measurement; None: it goes on.
        """
        is_stuck = len(self._unmeasured) >= MOST_UNMEASURED
        return stuck_words(self._unmeasured) if is_stuck else None

    def budget_left(self, minutes_used: float, launches_used: int, energy_used_j: float) -> bool:
        """Whether no budget of the study is spent (search.trials apart: see ask)."""
        return self.spent_budget(minutes_used, launches_used, energy_used_j) is None

    def spent_budget(
        self, minutes_used: float, launches_used: int, energy_used_j: float
    ) -> str | None:
        """Which budget is spent, in words."""
        return spent_budget(self._settings.search, minutes_used, launches_used, energy_used_j)

    def close(self) -> None:
        """Let go of the storage."""
        self._storage.close()

    @property
    def _history(self) -> tuple[PastTrial, ...]:
        return tuple(self._trials.values())

    def _next(self) -> NewTrial | None:
        history, settings = self._history, self._settings
        if (trial := retry_due(history)) is not None:
            return retry_of(trial)
        if not search_is_full(history, settings.search.trials):
            if (baseline := next_baseline(history, settings.baselines)) is not None:
                return first_of(baseline)
            if not self._is_exhausted and self.why_stuck() is None:
                choice = choose(settings, history, self._all_points, self._is_refused)
                if choice is not None:
                    digest = spec_hash(choice.params)
                    return NewTrial(
                        choice.params, digest, choice.params, drawn=choice.drawn, notes=choice.notes
                    )
                self._is_exhausted = True
        if any(trial.is_running and trial.is_search for trial in history):
            return None
        trial = repeat_due(history, settings.objectives, settings.measure)
        if trial is None:
            return None
        return repeat_of(trial, lengths_of(settings, trial.number))

    def _all_points(self) -> Sequence[Params] | None:
        return enumerate_space(self._settings, LARGEST_LISTED_SPACE)

    def _is_refused(self, params: Params) -> bool:
        return self._refusal(params) is not None

    def _found(self, trial: PastTrial, result: TrialResult) -> Params:
        """What Optuna is to know of the setting: as asked, else as the servers resolved it."""
        return inside(self._settings.parameters, {**result.resolved, **trial.params})

    def _values_of(self, result: TrialResult) -> Sequence[float] | None:
        if result.outcome is not Outcome.COMPLETE:
            return None
        if len(result.values) != len(self._settings.objectives):
            raise ValueError(
                f"trial {result.number} has {len(result.values)} values, the study "
                f"{len(self._settings.objectives)} objectives"
            )
        check_finite(result.values, f"trial {result.number}")
        return result.values

    def _constraints_of(self, result: TrialResult) -> Mapping[str, float]:
        if result.outcome is Outcome.INFEASIBLE:
            return VIOLATED
        check_finite(result.constraints, f"trial {result.number}, limits")
        names = [f"{limit.metric}.{limit.percentile}" for limit in self._settings.slo]
        is_known = result.outcome is Outcome.COMPLETE or bool(result.constraints)
        if is_known and len(result.constraints) != len(names):
            raise ValueError(
                f"trial {result.number} has {len(result.constraints)} constraint values, the "
                f"study {len(names)} limits"
            )
        return dict(zip(names, result.constraints, strict=False))

    def _refresh(self, number: int) -> None:
        self._trials[number] = self._storage.read(number)


def first_of(baseline: Baseline) -> NewTrial:
    """A baseline's first trial; Optuna learns its parameters when its servers resolved them."""
    return NewTrial(baseline.params, spec_hash(baseline.params), found={}, name=baseline.name)


def retry_of(trial: PastTrial) -> NewTrial:
    """The same setting again, because its trial says nothing or may have been bad luck."""
    return NewTrial(
        trial.params,
        trial.spec_hash,
        trial.found,
        name=trial.name,
        retry_of=trial.number,
        repeat_of=trial.repeat_of,
        notes=trial.notes,
        lengths=trial.lengths,
    )


def repeat_of(trial: PastTrial, lengths: TrialLengths) -> NewTrial:
    """A re-measurement of a complete trial."""
    return NewTrial(
        trial.params,
        trial.spec_hash,
        trial.found,
        name=trial.name,
        repeat_of=trial.number,
        lengths=lengths,
    )


def check_finite(values: Sequence[float], where: str) -> None:
    """Keep NaN and infinity out of Optuna, which takes them without a word."""
    for value in values:
        if not math.isfinite(value):
            raise ValueError(f"{where}: {value} is no measurement")
