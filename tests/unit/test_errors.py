"""Every error crosses Ray, so every error must survive pickling."""

import pickle

import pytest

from runner import errors
from runner.errors import RunnerError, TrialError
from runner.trial import Failure, Outcome, Stage, outcome_of

TREE = [value for value in vars(errors).values() if isinstance(value, type)]


@pytest.mark.parametrize("kind", TREE)
def test_errors_survive_pickling(kind: type[RunnerError]) -> None:
    with_log = issubclass(kind, TrialError)
    error = kind("why", "server.log") if with_log else kind("why")

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is kind
    assert str(copy) == "why"
    assert getattr(copy, "log_path", None) == ("server.log" if with_log else None)


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        (errors.Infeasible, Outcome.INFEASIBLE),
        (errors.ServerFailed, Outcome.FAILED),
        (errors.LoadFailed, Outcome.FAILED),
        (errors.Invalid, Outcome.INVALID),
        (errors.ClusterLost, Outcome.LOST),
    ],
)
def test_each_failure_has_one_outcome(kind: type[RunnerError], outcome: Outcome) -> None:
    assert outcome_of(kind("why")) is outcome


@pytest.mark.parametrize("kind", [errors.ConfigError, errors.StudyError, errors.Interrupted])
def test_errors_of_the_study_are_no_outcome(kind: type[RunnerError]) -> None:
    with pytest.raises(kind):
        Failure.of(kind("why"), Stage.START)
