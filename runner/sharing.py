"""Trials whose servers resolve to the same share one measurement.

What was asked for is not what runs: a default and the same value written out, a backend that the
server replaces. The identity of a trial is what its servers resolved to, the cap that is set on
them, how many there are and the law of lengths. It is known once a launch with the same key has
been up, in any session: from then on such a trial needs no launch. Simulated servers start in no
time and never share.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from runner.engines.sglang.identity import cap_of, lasting_state
from runner.launch import LaunchPlan, live_cap
from runner.record.store import StudyStore
from runner.settings import StudySettings
from runner.trial import EngineKind, LaunchSpec, Outcome, TrialLengths, TrialResult


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the launches of one key resolve to: a digest, and the cap before any is set."""

    digest: str
    cap: object


class Sharing:
    """Finds the trial whose measurement another one may show."""

    def __init__(self, settings: StudySettings, store: StudyStore) -> None:
        self._store = store
        self._is_on = settings.engine.kind is not EngineKind.SIMULATED
        self._by_key: dict[str, Resolved] = {}
        self._newest = -1

    def note(self, launch: LaunchSpec | None) -> None:
        """Learn what a launch that is up, or was, resolved to; once for each."""
        if launch is None or not self._is_on or launch.number <= self._newest:
            return
        for number in range(self._newest + 1, launch.number + 1):
            self._read(number)
        self._newest = launch.number

    def note_all(self) -> None:
        """Learn from the launches of earlier sessions."""
        for number in self._store.launch_numbers() if self._is_on else ():
            self._read(number)
            self._newest = number

    def identity(self, plan: LaunchPlan, lengths: TrialLengths) -> str | None:
        """What a trial on such a launch comes to; None: no such launch has been up."""
        known = self._by_key.get(plan.key)
        if known is None:
            return None
        live: object = dict(plan.live)
        if isinstance(known.cap, int):
            live = live_cap(plan.live, known.cap)
        return _digest([known.digest, live, plan.replicas, lengths])

    def original(self, identity: str | None) -> TrialResult | None:
        """The complete trial of the search that was measured with this identity."""
        if identity is None:
            return None
        return next((each for each in self._store.results() if _is_source(each, identity)), None)

    def _read(self, number: int) -> None:
        stored = self._store.read_launch(number)
        spec, report = stored or (None, None)
        if spec is None or report is None or not report.server_info:
            return
        info = report.server_info[0]
        digest = _digest(lasting_state(info, spec.server_args))
        self._by_key[spec.key] = Resolved(digest, cap_of(info))


def _is_source(result: TrialResult, identity: str) -> bool:
    is_measured = result.shares is None and result.repeat_of is None
    return is_measured and result.outcome is Outcome.COMPLETE and result.identity == identity


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
