"""What a profile says of measured settings: by the closed form, and by simulation as in `predict`.

The closed form is quick enough to be fitted, and off where slots of a pipeline fill by chance. So
it is multiplied by what the simulation gives over it, found at a profile near by.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from runner.calibration.points import Cell, Evidence, Quantity
from runner.forecast.estimate import Estimator
from runner.forecast.prediction import RungPrediction
from runner.forecast.simulate import Effort, Job, combine, make_job, run_jobs
from runner.machine.hardware import Profile
from runner.machine.profile import profile_text
from runner.plans import at_lengths
from runner.trial import LoadStart, TrialLengths

EFFORT = Effort(lives=2.0, most_work=0.4e6, start=LoadStart.GRADUAL)
SEEDS = 3
MOST_SIMULATED = 120
"""Rungs that are simulated at most; the closed form stands for the others."""

P10_TO_P90 = 2.56  # standard deviations
Values: TypeAlias = Mapping[Quantity, float]


@dataclass(frozen=True, slots=True)
class Simulated:
    """One rung: the median over seeds, and how far its rate differs between them (relative)."""

    values: Values
    spread: float


class CellModel:
    """The model of measured settings, each under the load of its study."""

    def __init__(self, evidence: Evidence) -> None:
        self._studies = {
            (place, lengths): at_lengths(study, lengths)
            for place, study in enumerate(evidence.studies)
            for lengths in TrialLengths
        }
        self._evidence = evidence
        cells = evidence.cells
        step = -(-len(cells) // MOST_SIMULATED)
        self.simulated = cells[::step]

    def closed_form(self, profile: Profile, cells: Sequence[Cell]) -> dict[Cell, Values]:
        """The closed form of each cell."""
        estimators = {load: Estimator(study, profile) for load, study in self._studies.items()}
        return {
            cell: values_of(
                estimators[load_of(cell)].rung(self._evidence.planned(cell), cell.level)
            )
            for cell in cells
        }

    def simulate(
        self, profile: Profile, on_progress: Callable[[float], None]
    ) -> dict[Cell, Simulated]:
        """The cells that are simulated, under each seed; `on_progress` is told the share done."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "candidate.yaml"  # the simulated engine reads it as any other
            path.write_text(profile_text(profile), encoding="utf-8")
            jobs = self._jobs(profile, path)
            total, done = sum(job.work for job in jobs), 0.0

            def note(work: float) -> None:
                nonlocal done
                done += work
                on_progress(done / total)

            samples = run_jobs(jobs, note)
        found: dict[Cell, Simulated] = {}
        for place, cell in enumerate(self.simulated):
            rung = combine(cell.level, samples[place * SEEDS : (place + 1) * SEEDS])
            found[cell] = Simulated(values_of(rung), rung.spread / P10_TO_P90)
        return found

    def _jobs(self, profile: Profile, path: Path) -> list[Job]:
        studies = {
            load: replace(study, engine=replace(study.engine, profile=str(path)))
            for load, study in self._studies.items()
        }
        estimators = {load: Estimator(study, profile) for load, study in studies.items()}
        return [
            make_job(
                studies[load_of(cell)],
                estimators[load_of(cell)],
                self._evidence.planned(cell),
                cell.level,
                seed,
                EFFORT,
            )
            for cell in self.simulated
            for seed in range(SEEDS)
        ]


def load_of(cell: Cell) -> tuple[int, TrialLengths]:
    """What decides the load of a cell: its study and the law of lengths."""
    return cell.study, cell.lengths


def values_of(rung: RungPrediction) -> Values:
    """The quantities that are compared."""
    return {quantity: getattr(rung, str(quantity)) for quantity in Quantity}
