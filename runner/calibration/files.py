"""The files of a calibration: `calibration/` in the study's folder, each written by rename."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.calibration.calibrate import Calibration
from runner.cluster.executor import LaunchReport
from runner.errors import ConfigError, StudyError
from runner.kinds import EngineKind
from runner.machine.hardware import Profile
from runner.machine.profile import load_profile, profile_names, profile_text
from runner.measure.idle import IdleGpu
from runner.record.files import write_json, write_whole
from runner.record.store import StudyStore
from runner.settings import StudySettings
from runner.trial import LaunchSpec

SCHEMA_VERSION = 1
ENDING = ".yaml"


@dataclass(frozen=True, slots=True)
class CalibrationFiles:
    """Where a calibration is kept; `out` is another place for the profile."""

    folder: Path
    out: Path | None = None

    @property
    def profile(self) -> Path:
        """The profile: where the user wants it, and in the study's folder in any case."""
        return self.folder / "profile.yaml" if self.out is None else self.out

    @property
    def residuals(self) -> Path:
        """Every point: measured, before, after and left out."""
        return self.folder / "residuals.json"

    def write(self, calibration: Calibration) -> None:
        """Write both; what an earlier calibration left is replaced.

        Raises StudyError when they cannot be written, ConfigError when `out` cannot.
        """
        names = " ".join(calibration.studies)
        heading = f"Made by `runner calibrate {names}` from {calibration.start.name}."
        text = profile_text(calibration.profile, heading).encode()
        write_whole(self.folder / "profile.yaml", text)
        points = point_documents(calibration)
        write_json(self.residuals, {"schema_version": SCHEMA_VERSION, "points": points})
        if self.out is not None:
            try:
                write_whole(self.out, text)
            except StudyError as error:
                why = error.__cause__ or error
                raise ConfigError(f"--out {self.out}: cannot be written: {why}") from error


def check_out(out: Path | None) -> Path | None:
    """The whole path of `--out`; raises ConfigError when it could not be used as a profile."""
    if out is None:
        return None
    if out.suffix != ENDING:
        raise ConfigError(f"--out {out}: a profile's file ends in {ENDING}")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: expected a file in a folder that exists")
    return out.absolute()


def starting_profile(studies: Sequence[StudySettings], given: str | None) -> Profile:
    """The profile to start from: the given one, else the studies'; raises ConfigError."""
    check_alike(studies)
    if given is not None:
        return load_profile(given)
    profiles = {study.engine.profile: study.name for study in studies}
    if len(profiles) > 1:
        raise ConfigError(
            "the studies name different hardware profiles: "
            + ", ".join(f"{study} {profile or 'none'}" for profile, study in profiles.items())
            + "; say which one to start from: --profile"
        )
    profile, study = next(iter(profiles.items()))
    if profile is None:
        raise ConfigError(
            f"study {study} names no hardware profile to start from; give one that is near "
            f"your machine: --profile {' or '.join(profile_names())}, or the path of a .yaml file"
        )
    return load_profile(profile)


def check_alike(studies: Sequence[StudySettings]) -> None:
    """Raise ConfigError where studies measured different things: no profile can hold for both."""
    first = studies[0]
    names = [study.name for study in studies]
    is_real = first.engine.kind is EngineKind.SGLANG
    alike = ("kind", "model") if is_real else ("kind", "model", "profile")
    for other in studies[1:]:
        if names.count(other.name) > 1:
            raise ConfigError(f"study {other.name} is named twice; name each study once")
        for name in alike:
            found = getattr(first.engine, name), getattr(other.engine, name)
            if found[0] != found[1]:
                raise ConfigError(
                    f"studies of one machine and model are expected: engine.{name} of "
                    f"{first.name} is {found[0]}, that of {other.name} {found[1]}; calibrate them "
                    "one by one"
                )


def idle_of(stores: Sequence[StudyStore]) -> list[IdleGpu]:
    """The idle GPUs of studies; raises ConfigError when they are of different models."""
    found: list[IdleGpu] = []
    owners: dict[str, str] = {}
    for store in stores:
        gpus = store.read_idle() or ()
        found += gpus
        owners |= {gpu.name: store.name for gpu in gpus}
    if len(owners) > 1:
        raise ConfigError(
            "studies of one GPU model are expected: "
            + ", ".join(f"{name} was measured on {gpu}" for gpu, name in owners.items())
            + "; calibrate them one by one"
        )
    return found


def launches_of(store: StudyStore) -> list[tuple[LaunchSpec, LaunchReport]]:
    """The launches of a study that came up."""
    found = (store.read_launch(number) for number in store.launch_numbers())
    return [(each[0], each[1]) for each in found if each is not None and each[1] is not None]


def point_documents(calibration: Calibration) -> list[dict[str, object]]:
    """Every point in JSON."""
    evidence = calibration.evidence
    return [
        {
            "study": calibration.studies[each.point.cell.study],
            "trial": each.point.trial,
            "setting": evidence.settings[each.point.cell.setting].label,
            "lengths": str(each.point.cell.lengths),
            "concurrency": each.point.cell.level,
            "quantity": str(each.point.quantity),
            "measured": each.point.measured,
            "before": each.before,
            "after": each.after,
            "left_out": each.left_out,
        }
        for each in calibration.points
    ]
