"""The study as Optuna stores it: open it, create and end trials, read them as plain values.

A trial comes into being in one transaction, with its parameters and attributes, already running.
So a kill leaves either no trial or a whole one. (Optuna's own enqueue and ask takes several.)
The storage is written through its documented interface; the driver is its only writer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.samplers import RandomSampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from runner.errors import ConfigError, StudyError
from runner.search.history import PastTrial
from runner.search.sampler import directions, distributions
from runner.settings import StudySettings
from runner.trial import Outcome, Params, Stage, TrialLengths, TrialResult

LOCK_WAIT_S = 120
STATES = {
    Outcome.COMPLETE: TrialState.COMPLETE,
    Outcome.PRUNED: TrialState.PRUNED,
    Outcome.INFEASIBLE: TrialState.PRUNED,
    Outcome.FAILED: TrialState.FAIL,
    Outcome.INVALID: TrialState.FAIL,
    Outcome.LOST: TrialState.FAIL,
}


@dataclass(frozen=True, slots=True)
class NewTrial:
    """A trial to create: `found` are its parameters for Optuna, the others as in PastTrial."""

    params: Params
    spec_hash: str
    found: Params
    name: str | None = None
    retry_of: int | None = None
    repeat_of: int | None = None
    drawn: int = 0
    notes: Mapping[str, object] = field(default_factory=dict)
    lengths: TrialLengths = TrialLengths.SEARCH


class TrialStorage:
    """The trials of one Optuna study in a database."""

    def __init__(self, settings: StudySettings, url: str) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._parameters = settings.parameters
        self._storage = open_database(url)
        self._study = optuna.create_study(
            storage=self._storage,
            study_name=settings.name,
            directions=directions(settings),
            sampler=RandomSampler(seed=0),
            load_if_exists=True,
        )
        self._study_id = self._storage.get_study_id_from_name(settings.name)
        self._ids: dict[int, int] = {}
        if self._study.directions != directions(settings):
            found = " and ".join(each.name.lower() for each in self._study.directions)
            wanted = " and ".join(each.direction for each in settings.objectives)
            raise StudyError(
                f"the storage has a study {settings.name} that is to {found}, not {wanted}; "
                "give this study another name"
            )

    def read_all(self) -> list[PastTrial]:
        """All trials that were begun, by number."""
        trials = self._study.get_trials(deepcopy=False)
        return [self._past(trial) for trial in trials if trial.state is not TrialState.WAITING]

    def read(self, number: int) -> PastTrial:
        """One trial as it is stored now."""
        return self._past(self._storage.get_trial(self._id(number)))

    def create(self, new: NewTrial) -> PastTrial:
        """Begin a trial, at once and as a whole."""
        with self._writing():
            template = optuna.create_trial(
                state=TrialState.RUNNING,
                params=dict(new.found),
                distributions=distributions(self._parameters, new.found),
                user_attrs={
                    "spec_hash": new.spec_hash,
                    "params": dict(new.params),
                    "name": new.name,
                    "retry_of": new.retry_of,
                    "repeat_of": new.repeat_of,
                    "lengths": str(new.lengths),
                    "drawn": new.drawn,
                    "notes": sorted(new.notes),
                },
                system_attrs=dict(new.notes),
            )
            trial_id = self._storage.create_new_trial(self._study_id, template_trial=template)
            return self._past(self._storage.get_trial(trial_id))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn what the database says into one message."""
        try:
            yield
        except (SQLAlchemyError, StorageInternalError) as error:
            raise StudyError(
                f"the search storage cannot be written: {cause_of(error)}. "
                "Make room or restore it, then continue the study"
            ) from error

    def report(self, number: int, position: int, value: float) -> None:
        """Store the value of one rung."""
        with self._writing():
            self._storage.set_trial_intermediate_value(self._id(number), position, value)

    def add_params(self, number: int, found: Params) -> None:
        """Add those parameters that the trial does not have yet."""
        with self._writing():
            trial_id = self._id(number)
            present = self._storage.get_trial(trial_id).params
            for name, kind in distributions(self._parameters, found).items():
                if name not in present:
                    value = kind.to_internal_repr(found[name])
                    self._storage.set_trial_param(trial_id, name, value, kind)

    def add_constraints(self, number: int, constraints: Mapping[str, float]) -> None:
        """Add those constraint values that the trial does not have yet."""
        with self._writing():
            trial = optuna.Trial(self._study, self._id(number))
            present = trial.constraints
            for name, excess in constraints.items():
                if name not in present:
                    trial.set_constraint(name, excess)

    def end(self, result: TrialResult, values: Sequence[float] | None) -> None:
        """End a trial; its state is written last."""
        with self._writing():
            trial_id = self._id(result.number)
            self._storage.set_trial_user_attr(trial_id, "outcome", str(result.outcome))
            self._storage.set_trial_user_attr(trial_id, "reason", result.reason)
            self._storage.set_trial_user_attr(trial_id, "stage", result.stage and str(result.stage))
            self._storage.set_trial_user_attr(trial_id, "shares", result.shares)
            self._study.tell(result.number, values, state=STATES[result.outcome])

    def close(self) -> None:
        """Let go of the database."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def _id(self, number: int) -> int:
        if number not in self._ids:
            self._ids[number] = self._storage.get_trial_id_from_study_id_trial_number(
                self._study_id, number
            )
        return self._ids[number]

    def _past(self, trial: FrozenTrial) -> PastTrial:
        attrs = trial.user_attrs
        if not {"spec_hash", "params"} <= attrs.keys():
            raise StudyError(
                f"trial {trial.number} of study {self._study.study_name} in the storage was "
                "written by another program; give this study another name"
            )
        notes = {key: trial.system_attrs[key] for key in attrs["notes"]}
        return PastTrial(
            number=trial.number,
            params=attrs["params"],
            spec_hash=attrs["spec_hash"],
            outcome=Outcome(attrs["outcome"]) if trial.state.is_finished() else None,
            stage=Stage(attrs["stage"]) if attrs.get("stage") else None,
            name=attrs["name"],
            retry_of=attrs["retry_of"],
            repeat_of=attrs["repeat_of"],
            drawn=attrs["drawn"],
            found=dict(trial.params),
            values=tuple(trial.values or ()),
            constraints=dict(trial.constraints),
            reported=dict(trial.intermediate_values),
            notes=notes,
            lengths=TrialLengths(attrs.get("lengths", TrialLengths.SEARCH)),
            shares=attrs.get("shares"),
        )


def move_study(name: str, from_url: str, to_url: str) -> None:
    """Copy a study to another storage, from where it then continues; once copied, do nothing.

    Raises ConfigError when the other storage has another study of that name.
    """
    source, target = open_database(from_url), open_database(to_url)
    try:
        wanted = len(optuna.load_study(study_name=name, storage=source).trials)
        if name not in optuna.get_all_study_names(target):
            optuna.copy_study(from_study_name=name, from_storage=source, to_storage=target)
            return
        found = len(optuna.load_study(study_name=name, storage=target).trials)
        if found != wanted:
            raise ConfigError(
                f"the new storage already has a study {name} with {found} trials, this one has "
                f"{wanted}; delete it there (optuna delete-study), or keep the old storage"
            )
    finally:
        for database in (source, target):
            database.remove_session()
            database.engine.dispose()


def open_database(url: str) -> RDBStorage:
    """Open or create the database of a storage URL; any that Optuna can use."""
    try:
        return RDBStorage(url, engine_kwargs=database_options(url))
    except (SQLAlchemyError, StorageInternalError, ImportError) as error:
        check = "check the storage URL of the study, for example postgresql://HOST/DATABASE"
        if url.startswith("sqlite:"):
            check = f"check that {make_url(url).database} can be written and its disk has space"
        raise ConfigError(
            f"the search storage cannot be opened: {cause_of(error)}; {check}"
        ) from error


def cause_of(error: Exception) -> str:
    """What the database itself said, in one line."""
    return str(error.__cause__ or error).splitlines()[0]


def database_options(url: str) -> dict[str, Any]:
    """How to connect: SQLite waits for its lock, since a dashboard or backup may hold it.

    Connections to a server are tried before use: they may lie idle for as long as a trial takes.
    """
    if make_url(url).get_backend_name() == "sqlite":
        return {"connect_args": {"timeout": LOCK_WAIT_S}}
    return {"pool_pre_ping": True}
