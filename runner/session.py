"""One session of a study: open what is there, end what a dead driver left, tune, close.

A study has many sessions when it is cut off; each is one process, the driver.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from runner.clock import Clock
from runner.cluster.executor import Executor
from runner.config import MAY_CHANGE, complete, diff, dump
from runner.engines.lease import end_orphans, end_own
from runner.engines.sglang.parameter_check import check_parameters
from runner.errors import ConfigError, Interrupted, RunnerError, StudyError
from runner.held_launch import HeldLaunch
from runner.insight.live import Note, StudyEnded, StudyStarted, View
from runner.insight.ranking import rank
from runner.insight.report import print_report, report_document
from runner.insight.terminal import view_for
from runner.load_check import check_load
from runner.measure.idle import require_power
from runner.record.background import BackgroundTracker
from runner.record.environment import describe_environment
from runner.record.store import StudyState, StudyStore
from runner.record.tracking import Tracker
from runner.search.storage import move_study
from runner.search.study import Search
from runner.session_gpus import know_gpus
from runner.settings import StudySettings
from runner.sharing import Sharing
from runner.trial import Outcome
from runner.tune import Study, tune

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHOW_CURSOR = "\x1b[?25h"  # the live view hides it


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What the command line asked for. `command` continues the study when it is cut off;
    `home_option` makes any printed command find it.
    """

    settings: StudySettings
    home: Path
    open_executor: Callable[[StudySettings, StudyStore], Executor]
    command: str
    home_option: str
    as_json: bool


def run_session(request: SessionRequest) -> int:
    """Start or continue the study; prints the report at its end. Returns the exit code."""
    settings = request.settings
    store = StudyStore(request.home, settings.name)
    view = view_for(sys.stderr)
    with store.lock():
        check_study(store, settings)
        for lease in end_orphans(store.leases_folder):
            view.handle(Note(f"ended the server of a dead run: pid {lease.pid}"))
        search = open_search(store, settings)
        uri = settings.tracking_uri or store.mlflow_uri
        tracker = BackgroundTracker(lambda: Tracker(uri, store, settings))
        clock = Clock(settings.engine.time_scale)
        launches = HeldLaunch(lambda: open_machine(request, store, view), store, view, clock)
        sharing = Sharing(settings, store)
        study = Study(settings, store, search, tracker, launches, view, sharing)
        with interruptible(launches, store, request.command):
            drive(study, request.command)
        search.close()
    show_report(request)
    return 0 if any(r.outcome is Outcome.COMPLETE for r in store.results()) else 1


def open_machine(request: SessionRequest, store: StudyStore, view: View) -> Executor:
    """Open the executor; what it needs of its machine is tried before the first launch.

    The servers' flags each time, each GPU once per study, the load generators once per start of
    the machine.

    Raises ConfigError for a parameter that the servers do not have, or GPUs of another model than
    the study ran on; StudyError when others use the study's GPUs, or when it asks for power that
    they do not tell.
    """
    executor = request.open_executor(request.settings, store)
    try:
        environment = executor.server_environment()
        if environment is not None:
            check_parameters(request.settings, environment)
            if environment.note is not None:
                view.handle(Note(environment.note))
        executor.check_gpus()
        require_power(request.settings, know_gpus(executor, request.settings, store, view))
        check_load(executor, request.settings, store, view)
    except RunnerError:
        executor.close()
        raise
    return executor


def drive(study: Study, command: str) -> None:
    """Tune with the view open; raises Interrupted with the command that continues the study."""
    state = StudyState.STOPPED
    try:
        results = tuple(study.store.results())
        study.view.handle(StudyStarted(study.settings, results, command))
        with closing(study.launches):
            tune(study)
        state = StudyState.FINISHED
    except Interrupted as error:
        state = StudyState.INTERRUPTED
        raise Interrupted(f"{error}; continue with: {command}") from error
    except StudyError as error:
        raise StudyError(f"{error}\ncontinue with: {command}") from error
    finally:
        with closing(study.view):
            end(study, state)


def end(study: Study, state: StudyState) -> None:
    """Write down how the session ended, in the study's folder and in MLflow."""
    study.store.write_state(state, study.settings.search.trials)
    study.view.handle(StudyEnded(state))
    best = rank(study.store.results(), study.settings).best
    study.tracker.finish(state, None if best is None else best.number)


def open_search(store: StudyStore, settings: StudySettings) -> Search:
    """Open the search; study.json is written only once that worked."""
    document = dump(settings)
    old = complete(store.read_study()["settings"]) if store.exists() else document
    before, now = (str(each["storage"] or store.optuna_url) for each in (old, document))
    if before != now and store.has_measured():
        move_study(settings.name, before, now)
    search = Search(settings, now)
    if old != document or not store.exists():
        store.create(document, describe_environment())
    return search


def check_study(store: StudyStore, settings: StudySettings) -> None:
    """The study on disk must be the one asked for; one that measured nothing starts anew."""
    if not store.exists():
        return
    document = dump(settings)
    old = complete(store.read_study()["settings"])
    changes = diff(old, document)
    if changes and not store.has_measured() and old["storage"] is None:
        store.start_anew()
        return
    refused = [line for line in changes if not line.startswith(tuple(MAY_CHANGE))]
    if refused:
        shown = "\n  ".join(refused)
        raise ConfigError(
            f"study {settings.name} exists with other settings:\n  {shown}\n"
            f"Only {', '.join(sorted(MAY_CHANGE))} may change when a study continues. "
            f"Give the study another name, undo the change, or delete {store.folder} to start anew"
        )


@contextmanager
def interruptible(launches: HeldLaunch, store: StudyStore, command: str) -> Iterator[None]:
    """Ctrl-C (or SIGTERM) once ends what runs and stops; twice ends everything at once."""
    asked = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            end_own(store.leases_folder)
            cursor = SHOW_CURSOR if sys.stderr.isatty() else ""
            print(f"{cursor}\nstopped at once; continue with: {command}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(130)
        asked = True
        print("\nstopping; press Ctrl-C again to stop at once", file=sys.stderr)
        launches.interrupt()

    before = {each: signal.signal(each, on_signal) for each in STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def show_report(request: SessionRequest) -> None:
    """Print the report: the table, or one JSON document."""
    settings = request.settings
    store = StudyStore(request.home, settings.name)
    results, idle = store.results(), store.read_idle() or ()
    state = store.progress().state
    if request.as_json:
        print(json.dumps(report_document(results, settings, idle, state)))
        return
    print_report(results, settings, sys.stdout, state, request.home_option, idle)
