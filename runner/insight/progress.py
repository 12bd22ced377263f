"""How far a study is: the trials of its search, then its re-measurements. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.insight.summary import counted, trials_wanted
from runner.search.history import History, PastTrial
from runner.search.proposals import finalists, is_tried_again, last_of_bad, measured, tries
from runner.settings import StudySettings
from runner.trial import TrialResult


@dataclass(frozen=True, slots=True)
class Progress:
    """Trials that count, of those wanted; re-measurements, of those that are due at the end.

    A re-measurement is done once it is not tried again. As long as the search goes on,
    `again_wanted` is the most that there can be.
    """

    done: int
    wanted: int
    is_repeating: bool
    again_done: int
    again_wanted: int

    @property
    def is_searching(self) -> bool:
        """Whether trials of the search are to come; a space may end before `wanted`."""
        return self.done < self.wanted and not self.is_repeating

    @property
    def measured(self) -> int:
        """Trials and re-measurements that are done."""
        return self.done + self.again_done

    @property
    def left(self) -> int:
        """Trials and re-measurements that are to come."""
        trials = self.wanted - self.done if self.is_searching else 0
        return trials + max(self.again_wanted - self.again_done, 0)

    @property
    def words(self) -> str:
        """`12 of 20 trials done`, at the end `20 of 20 trials done, 1 of 4 measured again`."""
        trials = f"{self.done} of {self.wanted} trials done"
        if not self.again_wanted or (self.is_searching and not self.again_done):
            return trials
        return f"{trials}, {self.again_done} of {self.again_wanted} measured again"


def progress_of(results: Sequence[TrialResult], settings: StudySettings) -> Progress:
    """How far a study with these results is."""
    done = counted(results)
    wanted = trials_wanted(settings, done)
    history = [_past(result) for result in results]
    turns = [trial for trial in history if not trial.is_search and trial.retry_of is None]
    again = [trial for trial in last_of_bad(history) if is_tried_again(tries(history, trial))]
    ended = len(turns) - sum(not trial.is_search for trial in again)
    most = settings.measure.finalists + len(settings.baselines)
    is_repeating = bool(results) and max(results, key=_number).repeat_of is not None
    due = most if done < wanted and not is_repeating else _due(history, settings)
    return Progress(done, wanted, is_repeating, ended, settings.measure.repeats * due)


def _number(result: TrialResult) -> int:
    return result.number


def _past(result: TrialResult) -> PastTrial:
    """What the search knows of a trial that ended."""
    return PastTrial(
        number=result.number,
        params=result.params,
        spec_hash=result.spec_hash,
        outcome=result.outcome,
        name=result.name,
        retry_of=result.retry_of,
        repeat_of=result.repeat_of,
        values=result.values,
        constraints={str(at): excess for at, excess in enumerate(result.constraints)},
        shares=result.shares,
    )


def _due(history: History, settings: StudySettings) -> int:
    """How many settings are measured again: the finalists and the baselines that have values."""
    best = finalists(history, settings.objectives, settings.measure.finalists)
    named = [trial for trial in measured(history) if trial.name]
    return len({trial.number for trial in (*best, *named)})
