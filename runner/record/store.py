"""The files of a study: settings, launches, trials, results. Layout: one folder per study.

Raw records are on disk before anything judges them, and result.json comes last, by rename: its
presence says that the trial is finished, and from then on its folder is never rewritten.
"""

from __future__ import annotations

import difflib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from runner.canary import CanaryRecord
from runner.clock import ClockAnchor
from runner.cluster.executor import LaunchReport
from runner.errors import ConfigError, StudyError
from runner.measure.idle import IdleGpu
from runner.record import rung_file
from runner.record.canary_files import CanaryFiles
from runner.record.codec import Json, decode, encode, fields_of
from runner.record.files import damaged, read_json, write_json, write_whole
from runner.record.lock import LockHeld, LockMode, hold_lock
from runner.record.sessions import SessionLog
from runner.trial import LaunchSpec, PowerSample, RungRecord, TrialResult, TrialSpec

T = TypeVar("T")
SCHEMA_VERSION = 1
NAME = re.compile(r"[a-z0-9._-]+")
TAKEN = re.compile(r"\.+|mlflow\.db.*|mlartifacts")
RESULT_KEYS = (
    "schema_version",
    "number",
    "name",
    "params",
    "resolved",
    "outcome",
    "reason",
    "retry_of",
    "repeat_of",
    "values",
    "rungs",
)
BATCH_FILE = "server.parquet"
ONLY_SHOWN = "Move it away: only its display is lost"
KEEP_OUT = (
    "Restore it: the trial's run in MLflow keeps a copy among its artifacts, and so may your backup"
)


class StudyState(StrEnum):
    """How the latest session of a study ended, or that one is running."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class StoredSpec:
    """spec.json: what a trial measures, on which launch (None: not up yet), by which clock."""

    trial: TrialSpec
    launch: LaunchSpec | None
    anchor: ClockAnchor


@dataclass(frozen=True, slots=True)
class StudyProgress:
    """What the files say of a study that may be running now.

    `running` are the trials that have begun and are not finished; `state` is RUNNING exactly
    when a driver holds the study's lock, and None when no session ever ended.
    """

    state: StudyState | None
    driver_pid: int | None
    running: tuple[int, ...]
    minutes_used: float
    launches_used: int


class StudyStore:
    """One study's folder. A driver holds `lock()`; readers need nothing."""

    def __init__(self, home: Path, name: str, wall_s: Callable[[], float] = time.time) -> None:
        if not NAME.fullmatch(name) or TAKEN.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot be the name of a study: use small letters, digits, '.', '_' and "
                "'-', and neither mlartifacts nor mlflow.db"
            )
        self.name = name
        self.studies_folder = _home(home) / "studies"
        self.folder = self.studies_folder / name
        self.machine_folder = self.folder / "machine"
        self.leases_folder = self.folder / "leases"
        self.study_path = self.folder / "study.json"
        self.mlflow_path = self.studies_folder / "mlflow.db"
        self.mlflow_lock_path = self.studies_folder / "mlflow.db.lock"
        self.artifacts_folder = self.studies_folder / "mlartifacts"
        self.optuna_url = f"sqlite:///{self.folder / 'optuna.db'}"
        self.mlflow_uri = f"sqlite:///{self.mlflow_path}"
        self._lock_path = self.folder / "driver.lock"
        self._state_path = self.folder / "state.json"
        self._idle_path = self.machine_folder / "idle.json"
        self._sessions = SessionLog(self.folder / "sessions", wall_s)
        self.canary = CanaryFiles(self.folder)
        self._results: dict[int, TrialResult] = {}

    def exists(self) -> bool:
        """Whether the study was ever started."""
        return self.study_path.exists()

    def create(self, document: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        """Write study.json whole; on a study that continues it replaces the old one."""
        content = {
            "schema_version": SCHEMA_VERSION,
            "settings": document,
            "environment": environment,
        }
        write_json(self.study_path, content)

    def read_study(self) -> dict[str, Any]:
        """`{"settings": ..., "environment": ...}`.

        Raises ConfigError when there is no such study, or its file is damaged.
        """
        try:
            study = read_json(self.study_path, "Restore it from a copy, or start under a new name")
        except FileNotFoundError:
            raise ConfigError(self._missing()) from None
        except StudyError as error:
            raise ConfigError(str(error)) from error
        if not isinstance(study.get("settings"), dict):
            raise ConfigError(f"{self.study_path} is damaged: it holds no settings")
        return study

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the study's one driver; a crash frees the lock. Raises ConfigError when taken."""
        try:
            with hold_lock(self._lock_path, LockMode.TRY), self._sessions.session():
                yield
        except LockHeld as error:
            raise ConfigError(
                f"study {self.name} is being run by process {error.pid}; wait for it or stop it"
            ) from error

    def write_state(self, state: str, trials: int) -> None:
        """Note how this session ended and how many trials the study wants."""
        write_json(self._state_path, {"state": StudyState(state), "trials": trials})

    def progress(self) -> StudyProgress:
        """How far the study is, and whether a driver runs it now."""
        pid = self._driver_pid()
        return StudyProgress(
            state=self._last_state() if pid is None else StudyState.RUNNING,
            driver_pid=pid,
            running=self._unfinished(),
            minutes_used=self.minutes_used(),
            launches_used=self.launches_used(),
        )

    def write_idle(self, gpus: Sequence[IdleGpu]) -> None:
        """Keep what the GPUs drew before the study's first launch."""
        write_json(self._idle_path, {"schema_version": SCHEMA_VERSION, "gpus": list(gpus)})

    def read_idle(self) -> tuple[IdleGpu, ...] | None:
        """What write_idle wrote; None when there is nothing."""
        remedy = "Delete it: it is read again, or only not shown"
        document = _read(self._idle_path, remedy)
        if document is None:
            return None
        return _decode(tuple[IdleGpu, ...], document.get("gpus"), self._idle_path, remedy)

    def minutes_used(self) -> float:
        """Wall-clock minutes of all sessions, this one included."""
        return self._sessions.seconds() / 60

    def launches_used(self) -> int:
        """How many launches were begun."""
        return len(self.launch_numbers())

    def has_measured(self) -> bool:
        """Whether any rung of any trial was measured, or any trial has ended."""
        trials = self.folder / "trials"
        return any(trials.glob("*/rung-*.parquet")) or any(trials.glob("*/result.json"))

    def start_anew(self) -> None:
        """Forget what a study that measured nothing left: begun trials, launches, its search."""
        for folder in ("trials", "launches", "machine"):
            shutil.rmtree(self.folder / folder, ignore_errors=True)
        (self.folder / "optuna.db").unlink(missing_ok=True)

    def next_launch_number(self) -> int:
        """A launch number that no launch has; its folder is made, so it stays taken."""
        number = max(self.launch_numbers(), default=-1) + 1
        try:
            self.launch_folder(number).mkdir(parents=True)
        except OSError as error:
            raise StudyError(f"{self.launch_folder(number)}: {error.strerror}") from error
        return number

    def launch_folder(self, number: int) -> Path:
        """Where a launch keeps its spec and its server logs."""
        return self.folder / "launches" / f"{number:04d}"

    def launch_numbers(self) -> list[int]:
        """The launches that were begun."""
        return _numbered(self.folder / "launches")

    def write_launch(self, spec: LaunchSpec, report: LaunchReport | None) -> None:
        """Write launch.json: the spec, and once it is up its phase times and /server_info."""
        self._sessions.beat()
        shown = None if report is None else encode(report, lenient=True)
        content = {"schema_version": SCHEMA_VERSION, "spec": spec, "report": shown}
        write_json(self.launch_folder(spec.number) / "launch.json", content)

    def read_launch(self, number: int) -> tuple[LaunchSpec, LaunchReport | None] | None:
        """What write_launch wrote; None when there is nothing."""
        path = self.launch_folder(number) / "launch.json"
        document = _read(path, ONLY_SHOWN)
        if document is None:
            return None
        report = document.get("report")
        spec = _decode(LaunchSpec, document.get("spec", {}), path, ONLY_SHOWN)
        shown = None if report is None else _decode(LaunchReport, report, path, ONLY_SHOWN)
        return spec, shown

    def trial_folder(self, number: int) -> Path:
        """Where a trial keeps its spec, records and result."""
        return self.folder / "trials" / f"{number:04d}"

    def write_spec(self, trial: TrialSpec, launch: LaunchSpec | None, anchor: ClockAnchor) -> None:
        """Write spec.json; again when the launch is up, or when another one continues it."""
        folder = self._open_folder(trial.number)
        spec = {"schema_version": SCHEMA_VERSION, "launch": launch, "anchor": anchor}
        write_json(folder / "spec.json", {**fields_of(trial), **spec})

    def read_spec(self, number: int) -> StoredSpec | None:
        """What write_spec wrote; None when there is nothing."""
        path = self.trial_folder(number) / "spec.json"
        document = _read(path, KEEP_OUT)
        if document is None:
            return None
        launch = document.get("launch")
        return StoredSpec(
            trial=_decode(TrialSpec, document, path),
            launch=None if launch is None else _decode(LaunchSpec, launch, path),
            anchor=_decode(ClockAnchor, document.get("anchor"), path),
        )

    def write_outputs(self, record: CanaryRecord) -> None:
        """Keep what the servers of a trial that is not finished said to the canary's prompts."""
        self.canary.write(self._open_folder(record.trial), record)

    def write_rung(self, number: int, rung: RungRecord) -> None:
        """Keep one measured rung: first the trial's tables of power and batches, then its file."""
        folder = self._open_folder(number)
        table = rung_file.read_power(folder / "power.parquet")
        others = (path for position, path in self._rung_paths(number) if position != rung.position)
        kept = [sample for path in others for sample in rung_file.samples_of(path, table)]
        write_whole(folder / "power.parquet", rung_file.power_bytes([*kept, *rung.power]))
        batches = {**rung_file.read_batches(folder / BATCH_FILE), rung.position: rung.batches}
        write_whole(folder / BATCH_FILE, rung_file.batch_bytes(batches))
        write_whole(folder / rung_file.file_name(rung), rung_file.rung_bytes(rung))

    def measured_rungs(self, number: int) -> list[RungRecord]:
        """The rungs of a trial in measured order, up to the first that is not there."""
        power = rung_file.read_power(self.trial_folder(number) / "power.parquet")
        paths = self._rung_paths(number)
        whole = [path for index, (position, path) in enumerate(paths) if index == position]
        batches = rung_file.read_batches(self.trial_folder(number) / BATCH_FILE)
        return [rung_file.read_rung(path, power, batches) for path in whole]

    def power_samples(self, number: int) -> tuple[PowerSample, ...]:
        """The readings of every rung of a trial, by time."""
        return tuple(rung_file.read_power(self.trial_folder(number) / "power.parquet").values())

    def write_result(self, result: TrialResult) -> None:
        """Write result.json, the last file of a trial: from now on it is finished."""
        write_json(self._open_folder(result.number) / "result.json", _result_document(result))

    def read_result(self, number: int) -> TrialResult | None:
        """The result of a finished trial; None when it is not finished."""
        if number not in self._results:
            path = self.trial_folder(number) / "result.json"
            document = _read(path, KEEP_OUT)
            if document is None:
                return None
            self._results[number] = _decode(TrialResult, document, path)
        return self._results[number]

    def results(self) -> list[TrialResult]:
        """The results of all finished trials, by number."""
        found = (self.read_result(number) for number in _numbered(self.folder / "trials"))
        return [result for result in found if result is not None]

    def _open_folder(self, number: int) -> Path:
        """The folder of a trial that may still be written to."""
        self._sessions.beat()
        folder = self.trial_folder(number)
        if (folder / "result.json").exists():
            raise StudyError(f"trial {number} is finished; {folder} is never rewritten")
        return folder

    def _rung_paths(self, number: int) -> list[tuple[int, Path]]:
        found = self.trial_folder(number).glob("rung-*.parquet")
        return sorted((int(path.name.split("-")[1]), path) for path in found)

    def _unfinished(self) -> tuple[int, ...]:
        folders = ((n, self.trial_folder(n)) for n in _numbered(self.folder / "trials"))
        return tuple(n for n, folder in folders if not (folder / "result.json").exists())

    def _last_state(self) -> StudyState | None:
        remedy = "Delete it: the next session writes it again"
        document = _read(self._state_path, remedy)
        if document is None:
            return None
        if document.get("state") not in list(StudyState):
            raise damaged(self._state_path, f"state {document.get('state')!r}", remedy)
        return StudyState(str(document["state"]))

    def _driver_pid(self) -> int | None:
        if not self._lock_path.exists():
            return None
        try:
            with hold_lock(self._lock_path, LockMode.LOOK):
                return None
        except LockHeld as error:
            return int(error.pid or 0)

    def _missing(self) -> str:
        folders = self.studies_folder.glob("*/study.json")
        names = sorted(path.parent.name for path in folders)
        if not names:
            return (
                f"no study {self.name}: {self.studies_folder} holds none. "
                "Start one with runner tune, or name the right folder with --home"
            )
        near = difflib.get_close_matches(self.name, names, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(names)}"
        return f"no study {self.name} in {self.studies_folder}; {hint}"


def _home(home: Path) -> Path:
    """The folder that holds studies/; ConfigError when it cannot be one."""
    try:
        whole = home.expanduser().resolve()
    except RuntimeError as error:
        raise ConfigError(f"--home {home}: {error}") from error
    if whole.exists() and not whole.is_dir():
        raise ConfigError(f"--home {home}: this is a file, a folder is expected")
    if odd := sorted(set("?%") & set(str(whole))):
        raise ConfigError(
            f"--home {whole}: {' and '.join(odd)} cannot be in the path of a database; "
            "use another folder"
        )
    return whole


def _numbered(folder: Path) -> list[int]:
    if not folder.exists():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def _read(path: Path, remedy: str) -> dict[str, Json] | None:
    try:
        document = read_json(path, remedy)
    except FileNotFoundError:
        return None
    version = document.get("schema_version", SCHEMA_VERSION)
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise StudyError(
            f"{path} has schema_version {version}, this runner knows {SCHEMA_VERSION}; "
            "use the newer runner that wrote it"
        )
    return document


def _decode(kind: type[T], value: Json, path: Path, remedy: str = KEEP_OUT) -> T:
    try:
        return decode(kind, value)
    except ValueError as error:
        raise damaged(path, error, remedy) from error


def _result_document(result: TrialResult) -> dict[str, object]:
    """The fields of a result, those of the contract first and in its order."""
    fields = fields_of(result)
    first = {name: fields.pop(name) for name in RESULT_KEYS}
    return {**first, **fields}
