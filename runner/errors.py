"""Everything that can go wrong, typed where it happens.

RunnerError
├── ConfigError            the user's input is wrong: exit 2, one message, no traceback
├── StudyError             the study cannot go on: exit 1
├── Interrupted            the user asked to stop: exit 130, the study can be continued
├── TrialError             this setting failed; becomes a Failure at the run_trial boundary
│   ├── Infeasible         cannot fit, unsupported or a refused flag: learned by launching
│   ├── ServerFailed       exited, hung, or was not ready by its deadline
│   ├── LoadFailed         too many requests failed
│   └── Invalid            measured, but not a fair measurement
└── ClusterLost            an actor, node or port was lost; says nothing about the setting

Every class takes positional arguments only and survives pickling (they cross Ray).
"""

from __future__ import annotations


class RunnerError(Exception):
    """Root of all expected errors; `str(error)` is the message for the user."""


class ConfigError(RunnerError):
    """The user's input is wrong: what was found, what was expected, what to do."""


class StudyError(RunnerError):
    """The study cannot go on (five losses or thirty unmeasured trials in a row, no GPUs)."""


class Interrupted(RunnerError):
    """The user asked to stop; what was measured is kept."""


class TrialError(RunnerError):
    """This setting failed. `log_path` names the file that shows why, if there is one."""

    def __init__(self, message: str, log_path: str | None = None) -> None:
        super().__init__(message, log_path)
        self.message = message
        self.log_path = log_path

    def __str__(self) -> str:
        return self.message


class Infeasible(TrialError):
    """The setting cannot run here: out of memory, unsupported backend, refused flag."""


class ServerFailed(TrialError):
    """A server exited, hung, or was not ready by its deadline."""


class LoadFailed(TrialError):
    """More requests failed than the limit allows."""


class Invalid(TrialError):
    """The measurement is not fair: client-limited, throttled, disturbed."""


class ClusterLost(RunnerError):
    """An actor or node died under a living driver, or a port was taken."""
