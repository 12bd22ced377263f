"""The best settings by prediction: the closed form finds candidates, simulation orders them.

A layout is a setting without its cap; the ranking has one row for each, at its best cap. The
simulations are those of `runner predict`, under fewer seeds, so that both say the same. They share
one budget of estimated work, so that a plan takes about as long for any space and says the same on
any machine. What the budget does not reach keeps the closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from runner.forecast.equivalence import load_key, may_be_near, near
from runner.forecast.estimate import Estimator
from runner.forecast.predict import EFFORT, Progress
from runner.forecast.prediction import Basis, RungPrediction
from runner.forecast.reasons import reason_words
from runner.forecast.setting import MODELLED, PlannedSetting
from runner.forecast.simulate import Job, Sample, combine, make_job, run_jobs
from runner.launch import CAP
from runner.settings import Direction, StudySettings
from runner.trial import LoadProtocol

MOST_WORK = 16.0e6
EQUIVALENCE_WORK = 2.0e6  # kept for settings that look alike
SEEDS = 3
SPARE = 3  # candidates beyond the best of each layout
CHECKED_SEEDS = 2
CHECKED = 2  # of the settings that look like one that is shown, how many are simulated
CLOSED_FORM_WORK = 200.0  # microseconds of one ordinary core, as the work of simulations
NOTE_EVERY = 256


@dataclass(frozen=True, slots=True)
class Ranked:
    """One setting with its predicted rungs, in the order of the ladder.

    `objective` is the value of the study's first objective, and `reason` why it is so. `alike` is
    how many other caps the closed form puts within `NEAR` of it at the objective's rung.
    """

    planned: PlannedSetting
    name: str | None
    objective: float
    basis: Basis
    reason: str
    rungs: tuple[RungPrediction, ...]
    misses_slo: bool
    alike: int


class Forecaster:
    """Predicts settings of one study within a budget of simulated work."""

    def __init__(
        self,
        settings: StudySettings,
        estimator: Estimator,
        on_progress: Callable[[Progress], None],
        most_work: float = MOST_WORK,
    ) -> None:
        self._settings = settings
        self._estimator = estimator
        self._on_progress = on_progress
        self._most_work = most_work
        self._work = 0.0
        self._done_work = 0.0
        self._total_work = most_work
        self._estimates: dict[int, RungPrediction] = {}
        self._keys: dict[int, Hashable] = {}
        self._samples: dict[tuple[Hashable, float], list[Sample]] = {}

    @property
    def objective_level(self) -> float:
        """The rung of the first objective."""
        return self._settings.objectives[0].concurrency

    def simulate(
        self, settings: Iterable[PlannedSetting], levels: Sequence[float], seeds: int
    ) -> None:
        """Simulate each setting at each of the rungs under the seeds it lacks.

        Settings in their order, until the budget is spent; a rung that no longer fits is left out
        for every seed still to come. Settings that the load cannot tell apart are simulated once.
        """
        jobs: list[tuple[tuple[Hashable, float], Job]] = []
        begun: dict[tuple[Hashable, float], int] = {}
        for planned in settings:
            for level in levels:
                key = (self._key(planned), level)
                for seed in range(begun.get(key, len(self._of(planned, level))), seeds):
                    job = make_job(self._settings, self._estimator, planned, level, seed, EFFORT)
                    if self._work + job.work > self._most_work:
                        break
                    self._work += job.work
                    jobs.append((key, job))
                    begun[key] = seed + 1
        samples = run_jobs([job for _, job in jobs], self._note)
        for (key, _), sample in zip(jobs, samples, strict=True):
            self._samples.setdefault(key, []).append(sample)

    def estimate(self, settings: Sequence[PlannedSetting]) -> None:
        """Put the objective's rung of each by the closed form where it is looked up."""
        total = self._most_work + EQUIVALENCE_WORK + CLOSED_FORM_WORK * len(settings)
        for place, planned in enumerate(settings):
            self._estimates[id(planned)] = self._estimator.rung(planned, self.objective_level)
            if place % NOTE_EVERY == 0:
                self._on_progress(Progress(CLOSED_FORM_WORK * place, total))
        self._done_work = CLOSED_FORM_WORK * len(settings)
        self._total_work = total

    def allow(self, work: float) -> None:
        """Let simulations cost this much more."""
        self._most_work += work

    def _note(self, work: float) -> None:
        self._done_work += work
        self._on_progress(Progress(self._done_work, self._total_work))

    def agree(self, one: PlannedSetting, other: PlannedSetting) -> bool:
        """Whether two settings were simulated to be near, at every rung, under each shared seed."""
        for level in self._settings.workload.ladder:
            pairs = zip(self._of(one, level), self._of(other, level), strict=False)
            if not all(near(mine.output_throughput, its.output_throughput) for mine, its in pairs):
                return False
        return self.is_simulated(one) and self.is_simulated(other)

    def _of(self, planned: PlannedSetting, level: float) -> list[Sample]:
        return self._samples.get((self._key(planned), level), [])

    def _key(self, planned: PlannedSetting) -> Hashable:
        """Equal for settings that the load cannot tell apart."""
        known = self._keys.get(id(planned))
        if known is None:
            known = load_key(self._settings, self._estimator.profile, planned)
            self._keys[id(planned)] = known
        return known

    def rung(self, planned: PlannedSetting, level: float) -> RungPrediction:
        """A rung by what is known of it best."""
        samples = self._of(planned, level)
        if samples:
            found = combine(level, samples)
            if found.objectives:
                return found
            # A short window may have shown nothing of a latency.
            return replace(found, objectives=self._estimator.rung(planned, level).objectives)
        if level == self.objective_level:
            return self._estimate(planned)
        return self._estimator.rung(planned, level)

    def looks_like(self, one: PlannedSetting, other: PlannedSetting) -> bool:
        """Whether the closed form puts two settings within `NEAR` at the objective's rung."""
        mine, its = self._estimate(one), self._estimate(other)
        return near(mine.output_throughput, its.output_throughput)

    def _estimate(self, planned: PlannedSetting) -> RungPrediction:
        known = self._estimates.get(id(planned))
        return known or self._estimator.rung(planned, self.objective_level)

    def rungs(self, planned: PlannedSetting) -> tuple[RungPrediction, ...]:
        """All rungs, in the order of the ladder."""
        return tuple(self.rung(planned, level) for level in self._settings.workload.ladder)

    def is_simulated(self, planned: PlannedSetting) -> bool:
        """Whether every rung was simulated."""
        return all(self._of(planned, level) for level in self._settings.workload.ladder)

    def goodness(self, rung: RungPrediction) -> tuple[bool, float]:
        """A sort key, best first: limits kept, then the first objective."""
        value = objective_value(rung)
        is_up = self._settings.objectives[0].direction is Direction.MAXIMIZE
        return rung.misses_slo, -value if is_up else value

    def ordered(self, settings: Iterable[PlannedSetting]) -> list[PlannedSetting]:
        """Best first by what is known; the simulated ones before the others."""

        def key(planned: PlannedSetting) -> tuple[bool, bool, float]:
            rung = self.rung(planned, self.objective_level)
            return (rung.basis is not Basis.SIMULATION, *self.goodness(rung))

        return sorted(settings, key=key)

    def ranked(self, planned: PlannedSetting, name: str | None, alike: int) -> Ranked:
        """A setting as a row of the ranking."""
        protocol: LoadProtocol = self._settings.workload.protocol
        rungs = self.rungs(planned)
        at = next(rung for rung in rungs if rung.level == self.objective_level)
        return Ranked(
            planned=planned,
            name=name,
            objective=objective_value(at),
            basis=at.basis,
            reason=reason_words(self._estimator.profile, planned, at, protocol),
            rungs=rungs,
            misses_slo=at.misses_slo,
            alike=alike,
        )


def objective_value(rung: RungPrediction) -> float:
    """The value of the first objective; its throughput where it has none."""
    return dict(rung.objectives).get(0, rung.output_throughput)


def layout(planned: PlannedSetting) -> Hashable:
    """A setting without its cap, and without what the model does not know."""
    names = [name for name in planned.params if name != CAP and name in MODELLED]
    return tuple(sorted((name, planned.params[name]) for name in names))


def rank(
    forecaster: Forecaster,
    ladder: Sequence[float],
    candidates: Sequence[PlannedSetting],
    baselines: Sequence[PlannedSetting],
    top: int,
) -> list[PlannedSetting]:
    """The best cap of the `top` best layouts, best first; simulates them and the baselines.

    Of caps that the closed form cannot tell apart the highest is simulated, too: slots that have
    room let requests fall into step, which only a simulation shows.
    """
    objective = [forecaster.objective_level]
    forecaster.estimate(candidates)
    found = forecaster.ordered(candidates)
    leaders = best_of_each(found)[:top]
    chosen = {id(planned) for planned in leaders}
    spare = [planned for planned in found if id(planned) not in chosen][:SPARE]
    alike = lookalikes(forecaster, leaders, candidates)
    tried = [*leaders, *spare, *(max(each, key=attrgetter("cap")) for each in alike if each)]
    forecaster.simulate([*baselines, *tried], objective, 1)
    best = best_of_each(forecaster.ordered(tried))[:top]
    forecaster.simulate([*baselines, *best], objective, SEEDS)
    best = forecaster.ordered(best)
    others = [level for level in ladder if level not in objective]
    forecaster.simulate([*baselines, *best], others, 1)
    return best


def best_of_each(ordered: Iterable[PlannedSetting]) -> list[PlannedSetting]:
    """The first setting of each layout."""
    found: dict[Hashable, PlannedSetting] = {}
    for planned in ordered:
        found.setdefault(layout(planned), planned)
    return list(found.values())


def lookalikes(
    forecaster: Forecaster, best: Sequence[PlannedSetting], candidates: Iterable[PlannedSetting]
) -> list[list[PlannedSetting]]:
    """For each of the best the settings of its layout that the closed form puts next to it."""
    members: dict[Hashable, list[PlannedSetting]] = {layout(each): [] for each in best}
    for planned in candidates:
        if layout(planned) in members:
            members[layout(planned)].append(planned)
    return [
        [
            each
            for each in members[layout(leader)]
            if each is not leader
            and may_be_near(leader, each)
            and forecaster.looks_like(leader, each)
        ]
        for leader in best
    ]
