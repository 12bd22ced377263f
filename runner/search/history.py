"""What a study has tried so far, as plain values: no I/O, and no Optuna to read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from runner.trial import Outcome, Params, Stage, TrialLengths


@dataclass(frozen=True, slots=True)
class PastTrial:
    """One trial of the study, running or ended.

    `params` is the setting as it was asked for; `found` are the parameters Optuna keeps: the
    same for a sampled setting, for a baseline the values that its servers resolved. `drawn` says
    how many points the sampler drew until it was content with this one; 0: it is not the
    sampler's. `notes` are what the sampler wrote on its trial for its later self. `values` of
    trials with other `lengths` cannot be compared; those of the search all have the same. `shares`
    is the trial whose measurement it shows.
    """

    number: int
    params: Params
    spec_hash: str
    outcome: Outcome | None = None
    stage: Stage | None = None
    name: str | None = None
    retry_of: int | None = None
    repeat_of: int | None = None
    drawn: int = 0
    found: Params = field(default_factory=dict)
    values: tuple[float, ...] = ()
    constraints: Mapping[str, float] = field(default_factory=dict)
    reported: Mapping[int, float] = field(default_factory=dict)
    notes: Mapping[str, object] = field(default_factory=dict)
    lengths: TrialLengths = TrialLengths.SEARCH
    shares: int | None = None

    @property
    def is_running(self) -> bool:
        """Whether its outcome is still to come."""
        return self.outcome is None

    @property
    def is_search(self) -> bool:
        """Whether it is part of the search; re-measurements are not."""
        return self.repeat_of is None

    @property
    def counts(self) -> bool:
        """Whether it counts towards `search.trials`."""
        return self.is_search and self.outcome in (Outcome.COMPLETE, Outcome.PRUNED)

    @property
    def refused_its_launch(self) -> bool:
        """Whether no server with its launch parameters can start, whatever is then set live."""
        return self.outcome is Outcome.INFEASIBLE and self.stage in (Stage.PLACE, Stage.START)

    @property
    def violation(self) -> float:
        """The sum of what it exceeds its limits by; 0.0 when it keeps them all."""
        return sum(max(0.0, excess) for excess in self.constraints.values())


History: TypeAlias = Sequence[PastTrial]
"""All trials of a study, by number."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How many trials of the search ended how, re-measurements apart.

    `complete + pruned` grows to `wanted`; `running` counts re-measurements too.
    """

    complete: int
    pruned: int
    infeasible: int
    failed: int
    invalid: int
    lost: int
    running: int
    wanted: int
    remeasured: int


def count(history: History, wanted: int) -> Counts:
    """Count the trials of a study by outcome."""
    ended = [trial.outcome for trial in history if trial.is_search]
    return Counts(
        complete=ended.count(Outcome.COMPLETE),
        pruned=ended.count(Outcome.PRUNED),
        infeasible=ended.count(Outcome.INFEASIBLE),
        failed=ended.count(Outcome.FAILED),
        invalid=ended.count(Outcome.INVALID),
        lost=ended.count(Outcome.LOST),
        running=sum(trial.is_running for trial in history),
        wanted=wanted,
        remeasured=sum(
            not trial.is_search and trial.outcome is Outcome.COMPLETE for trial in history
        ),
    )
