"""The words that have a few values: enums, and what a parameter may be; for everyone."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeAlias

ParamValue: TypeAlias = bool | int | float | str
Params: TypeAlias = Mapping[str, ParamValue]


class EngineKind(StrEnum):
    """What is measured: the model, emulated servers, real ones."""

    SIMULATED = "simulated"
    EMULATED = "emulated"
    SGLANG = "sglang"


class LoadProtocol(StrEnum):
    """How requests arrive."""

    CLOSED_LOOP = "closed_loop"
    BURST = "burst"
    OPEN_LOOP = "open_loop"


class LoadStart(StrEnum):
    """How the streams of a closed loop begin."""

    GRADUAL = "gradual"  # one after another, spread over several request durations
    TOGETHER = "together"  # all at once, like a herd


class Arrivals(StrEnum):
    """How the requests of an open loop follow each other."""

    POISSON = "poisson"
    CONSTANT = "constant"


class TrialLengths(StrEnum):
    """Whose lengths the replies of a trial have: those of the search, or the user's own."""

    SEARCH = "search"
    WORKLOAD = "workload"


class Outcome(StrEnum):
    """How a trial ended."""

    COMPLETE = "complete"
    PRUNED = "pruned"
    INFEASIBLE = "infeasible"
    FAILED = "failed"
    INVALID = "invalid"
    LOST = "lost"


class Stage(StrEnum):
    """Where in its life a trial is, or ended."""

    PLACE = "place"
    START = "start"
    LIVE = "live"
    CANARY = "canary"
    WARMUP = "warmup"
    MEASURE = "measure"
    JUDGE = "judge"


class RequestStatus(StrEnum):
    """How one request ended."""

    OK = "ok"
    CUT = "cut"  # still running when the load was stopped on purpose; not an error
    FAILED = "failed"
