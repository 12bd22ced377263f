"""What each command does: call, print, answer the exit code. The only place that picks executors.

Imported after the command line is parsed; what only one command needs is imported by it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from runner.cluster.address import check_reachable, use_token
from runner.cluster.executor import Executor
from runner.errors import ConfigError
from runner.record.store import StudyStore
from runner.settings import StudySettings

LEAST_URGENT = 19  # as nice(1) counts


def run_tune(args: argparse.Namespace) -> int:
    """`runner tune`: from a study file."""
    from runner.config import load_study

    return tune(args, load_study(args.study, args.overrides), ["tune", str(args.study)])


def run_resume(args: argparse.Namespace) -> int:
    """`runner resume`: from the stored settings."""
    return tune(args, stored_settings(args), ["resume", args.name])


def tune(args: argparse.Namespace, settings: StudySettings, words: list[str]) -> int:
    """Start or continue a study with the chosen executor."""
    from runner.forecast.refusals import check_runnable
    from runner.session import SessionRequest, run_session

    if args.address is not None and args.executor == "inline":
        raise ConfigError(
            "--address names a Ray cluster, --executor inline uses none: leave one out"
        )
    is_local = args.address is None
    check_engine(settings, is_local=is_local)
    if args.address is not None:
        check_reachable(args.address)
    if not StudyStore(args.home, settings.name).has_measured():
        if is_local:
            check_flags(settings)
        check_runnable(settings)
    command = ["runner", *words]
    for flag in ("executor", "address"):
        if getattr(args, flag):
            command += [f"--{flag}", getattr(args, flag)]
    for override in args.overrides:
        command += ["--set", override]
    open_executor = partial(choose_executor, args.executor, args.address)
    return run_session(
        SessionRequest(
            settings=settings,
            home=args.home,
            open_executor=open_executor,
            command=shlex.join(command) + home_option(args.home),
            home_option=home_option(args.home),
            as_json=args.json,
        )
    )


def check_engine(settings: StudySettings, *, is_local: bool) -> None:
    """What the engine needs is there, before anything is begun; raises ConfigError."""
    from runner.machine.profile import load_profile
    from runner.trial import EngineKind

    engine = settings.engine
    if engine.kind is not EngineKind.SGLANG:
        load_profile(engine.profile or "")
        check_faults(settings)
        return
    if is_local and engine.python is not None and shutil.which(engine.python) is None:
        raise ConfigError(
            f"engine.python: {engine.python} is no program here; name the Python that has SGLang"
        )
    if (
        is_local
        and engine.model
        and engine.model.startswith("/")
        and not Path(engine.model).exists()
    ):
        raise ConfigError(f"engine.model: {engine.model} does not exist on this machine")


def check_flags(settings: StudySettings) -> None:
    """The servers have a flag for every parameter, asked of what is installed here.

    It is asked again when the machine is opened; here it is known before anything is begun.
    Raises ConfigError.
    """
    from runner.engines.program import environment_for
    from runner.engines.sglang.parameter_check import check_parameters
    from runner.trial import EngineKind

    kind = settings.engine.kind
    if kind is EngineKind.SIMULATED:
        return  # it knows settings that no flag stands for, and ignores what it has no model of
    if kind is EngineKind.SGLANG:
        print("asking SGLang for its flags; the first time takes a while", file=sys.stderr)
    check_parameters(settings, environment_for(settings.engine))


def check_faults(settings: StudySettings) -> None:
    """The faults that a study asks for can be understood; raises ConfigError."""
    from runner.engines.emulator.flags import read_faults
    from runner.settings import Choices
    from runner.trial import EngineKind

    texts = [
        ("engine.args.fault", settings.engine.args.get("fault")),
        *(
            (f"baseline {each.name}: fault", each.params.get("fault"))
            for each in settings.baselines
        ),
    ]
    for parameter in settings.parameters:
        if parameter.name == "fault" and isinstance(parameter, Choices):
            texts += [("parameters.fault", value) for value in parameter.values]
    asked = [(place, text) for place, text in texts if text is not None]
    if asked and settings.engine.kind is not EngineKind.EMULATED:
        raise ConfigError(
            f"{asked[0][0]}: only emulated servers break on purpose, and engine.kind is "
            f"{settings.engine.kind}; leave it out"
        )
    for place, text in asked:
        try:
            read_faults(str(text))
        except ValueError as error:
            raise ConfigError(f"{place}: {error}") from error


def choose_executor(
    kind: str | None, address: str | None, settings: StudySettings, store: StudyStore
) -> Executor:
    """The executor by its flag; by default inline for simulated studies, else Ray."""
    from runner.cluster.inline import InlineExecutor
    from runner.trial import EngineKind

    if kind is None:
        is_simulated = settings.engine.kind is EngineKind.SIMULATED and address is None
        kind = "inline" if is_simulated else "ray"
    if kind == "inline":
        return InlineExecutor(settings, store.machine_folder, store.leases_folder)
    if address is not None:
        use_token()
    from runner.cluster.ray_executor import RayExecutor

    return RayExecutor(settings, store.machine_folder, store.leases_folder, address)


def home_option(home: Path) -> str:
    """What a printed command needs to find this home again."""
    return "" if str(home) == "." else f" --home {shlex.quote(str(home))}"


def run_status(args: argparse.Namespace) -> int:
    """`runner status`: how far a study is."""
    from runner.insight.progress import progress_of
    from runner.insight.status import best_words, print_status, status_document

    store = StudyStore(args.home, args.name)
    results, settings = store.results(), stored_settings(args)
    document = status_document(results, settings, store.progress())
    if args.json:
        print(json.dumps(document))
    else:
        far = progress_of(results, settings).words
        print_status(document, far, best_words(results, settings), sys.stdout)
    return 0


def run_report(args: argparse.Namespace) -> int:
    """`runner report`: the table, one JSON document, or a page."""
    from runner.insight.page import html_page
    from runner.insight.report import print_report, report_document

    settings = stored_settings(args)
    store = StudyStore(args.home, args.name)
    results, idle = store.results(), store.read_idle() or ()
    if args.html:
        write_page(args.html, html_page(results, settings, idle))
    state = store.progress().state
    if args.json:
        print(json.dumps(report_document(results, settings, idle, state)))
    elif args.html:
        print(f"wrote {args.html}")
    else:
        print_report(results, settings, sys.stdout, state, home_option(args.home), idle)
    return 0


def write_page(path: Path, page: str) -> None:
    """Write the HTML report; a path that cannot be written is the user's to correct."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def run_ui(args: argparse.Namespace) -> int:
    """`runner ui`: MLflow's pages on the store, until Ctrl-C."""
    from runner.record.ui import serve

    return serve(args.home, args.name, args.port)


def run_clean(args: argparse.Namespace) -> int:
    """`runner clean`: end servers whose driver is dead, in every study of this home."""
    from runner.engines.lease import end_orphans

    if not args.home.is_dir():
        raise ConfigError(f"--home {args.home}: there is no such folder")
    ended = [
        lease
        for folder in sorted(args.home.glob("studies/*/leases"))
        for lease in end_orphans(folder)
    ]
    if args.json:
        print(json.dumps({"ended": [lease.pid for lease in ended]}))
    else:
        print("\n".join(f"ended pid {lease.pid}" for lease in ended) or "nothing to clean")
    return 0


def run_load(args: argparse.Namespace) -> int:
    """`runner load`: the load generator alone, on any running server."""
    from runner.load_command import load

    return load(args)


def run_emulate(args: argparse.Namespace) -> int:
    """`runner emulate -- FLAGS`: the emulated server in this process."""
    from runner.engines.emulator.__main__ import main as serve

    return serve(args.flags)


def stored_settings(args: argparse.Namespace, name: str | None = None) -> StudySettings:
    """The settings of a study on disk; `name` None: the one that the command names."""
    from runner.config import complete, parse_study

    document = StudyStore(args.home, args.name if name is None else name).read_study()
    return parse_study(complete(document["settings"]), getattr(args, "overrides", ()))


def run_predict(args: argparse.Namespace) -> int:
    """`runner predict`: one setting by the model, in the space or not."""
    from runner.config import load_study
    from runner.forecast.given import parse_params
    from runner.forecast.predict import predict
    from runner.forecast.prediction import prediction_document
    from runner.insight.forecast_view import ProgressLine, print_prediction

    settings = load_study(args.study, args.overrides)
    params = parse_params(settings, args.params)
    with closing(ProgressLine(sys.stderr, "simulating")) as line:
        prediction = predict(settings, params, args.seeds, line)
    if args.json:
        print(json.dumps(prediction_document(prediction)))
    else:
        print_prediction(prediction, settings, params, sys.stdout)
    return 0


def run_plan(args: argparse.Namespace) -> int:
    """`runner plan`: what a study would do, without a launch."""
    from runner.config import load_study
    from runner.forecast.plan import make_plan, plan_document
    from runner.insight.forecast_view import ProgressLine
    from runner.insight.plan_view import print_plan

    settings = load_study(args.study, args.overrides)
    with closing(ProgressLine(sys.stderr, "planning")) as line:
        plan = make_plan(settings, args.top, line)
    if args.json:
        print(json.dumps(plan_document(plan)))
    else:
        print_plan(plan, sys.stdout)
    return 0


def run_calibrate(args: argparse.Namespace) -> int:
    """`runner calibrate`: a profile from what studies measured."""
    from runner.calibration.calibrate import calibrate
    from runner.calibration.files import (
        CalibrationFiles,
        check_out,
        idle_of,
        launches_of,
        starting_profile,
    )
    from runner.calibration.points import StudyRecord, evidence_of
    from runner.calibration.starts import fit_starts, with_idle
    from runner.insight.calibration_view import calibration_document, print_calibration
    from runner.insight.forecast_view import ProgressLine

    studies = [stored_settings(args, name) for name in args.name]
    stores = [StudyStore(args.home, name) for name in args.name]
    files = CalibrationFiles(stores[0].folder / "calibration", check_out(args.out))
    start = starting_profile(studies, args.profile)
    records = map(StudyRecord, studies, (tuple(store.results()) for store in stores))
    evidence = evidence_of(start, *records)
    costs, changes = fit_starts(start, [each for store in stores for each in launches_of(store)])
    base = replace(with_idle(start, idle_of(stores)), start=costs)
    if running := [store.name for store in stores if store.progress().driver_pid is not None]:
        os.nice(LEAST_URGENT)
        who = f"study {', '.join(running)} is running"
        print(f"{who}: calibrating with what it leaves of the CPU", file=sys.stderr)
    with closing(ProgressLine(sys.stderr, "calibrating")) as line:
        calibration = calibrate(start, evidence, base, changes, line)
    files.write(calibration)
    if args.json:
        print(json.dumps(calibration_document(calibration, files)))
    else:
        print_calibration(calibration, files, sys.stdout)
    return 0
