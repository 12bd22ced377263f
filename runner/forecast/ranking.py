"""The best settings by prediction: the closed form finds candidates, simulation orders them.

The simulations of a plan share one budget of estimated work, so that a plan takes about as long for
any space and gives the same on any machine. What the budget does not reach keeps the closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from runner.forecast.estimate import Estimator
from runner.forecast.predict import Progress
from runner.forecast.prediction import Basis, RungPrediction
from runner.forecast.reasons import reason_words
from runner.forecast.setting import PlannedSetting
from runner.forecast.simulate import Effort, Job, Sample, combine, make_job, run_jobs
from runner.settings import Direction, StudySettings
from runner.trial import LoadProtocol

EFFORT = Effort(lives=1.5, most_work=0.25e6)
MOST_WORK = 14.0e6
SEEDS = 3
SPARE = 5  # candidates beyond those that are shown


@dataclass(frozen=True, slots=True)
class Ranked:
    """One setting with its predicted rungs, in the order of the ladder.

    `objective` is the value of the study's first objective, and `reason` why it is so.
    """

    planned: PlannedSetting
    name: str | None
    objective: float
    basis: Basis
    reason: str
    rungs: tuple[RungPrediction, ...]
    misses_slo: bool


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
        self._samples: dict[tuple[int, float], list[Sample]] = {}

    @property
    def objective_level(self) -> float:
        """The rung of the first objective."""
        return self._settings.objectives[0].concurrency

    def simulate(
        self, settings: Iterable[PlannedSetting], levels: Sequence[float], seeds: int
    ) -> None:
        """Simulate each setting at each of the rungs under the seeds it lacks.

        Settings in their order, until the budget is spent; a rung that no longer fits is left out
        for every seed still to come.
        """
        jobs: list[tuple[tuple[int, float], Job]] = []
        for planned in settings:
            for level in levels:
                key = (id(planned), level)
                for seed in range(len(self._samples.get(key, ())), seeds):
                    job = make_job(self._settings, self._estimator, planned, level, seed, EFFORT)
                    if self._work + job.work > self._most_work:
                        break
                    self._work += job.work
                    jobs.append((key, job))
        samples = run_jobs([job for _, job in jobs], self._note)
        for (key, _), sample in zip(jobs, samples, strict=True):
            self._samples.setdefault(key, []).append(sample)

    def _note(self, work: float) -> None:
        self._done_work += work
        self._on_progress(Progress(self._done_work, self._most_work))

    def rung(self, planned: PlannedSetting, level: float) -> RungPrediction:
        """A rung by what is known of it best."""
        samples = self._samples.get((id(planned), level))
        return combine(level, samples) if samples else self._estimator.rung(planned, level)

    def rungs(self, planned: PlannedSetting) -> tuple[RungPrediction, ...]:
        """All rungs, in the order of the ladder."""
        return tuple(self.rung(planned, level) for level in self._settings.workload.ladder)

    def is_simulated(self, planned: PlannedSetting) -> bool:
        """Whether every rung was simulated."""
        return all(
            (id(planned), level) in self._samples for level in self._settings.workload.ladder
        )

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

    def ranked(self, planned: PlannedSetting, name: str | None) -> Ranked:
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
        )


def objective_value(rung: RungPrediction) -> float:
    """The value of the first objective; its throughput where it has none."""
    return dict(rung.objectives).get(0, rung.output_throughput)


def rank(
    forecaster: Forecaster,
    ladder: Sequence[float],
    candidates: Sequence[PlannedSetting],
    baselines: Sequence[PlannedSetting],
    top: int,
) -> list[PlannedSetting]:
    """The `top` best of the candidates, best first; simulates them and the baselines.

    `candidates` come in any order; the closed form says which of them are worth simulating.
    """
    objective = [forecaster.objective_level]
    found = forecaster.ordered(candidates)[: top + SPARE]
    forecaster.simulate([*baselines, *found], objective, 1)
    best = forecaster.ordered(found)[:top]
    forecaster.simulate([*baselines, *best], objective, SEEDS)
    best = forecaster.ordered(best)
    others = [level for level in ladder if level not in objective]
    forecaster.simulate([*baselines, *best], others, 1)
    forecaster.simulate([*baselines, *best], others, SEEDS)
    return best
