"""MLflow's pages on a study's store: starts MLflow's server, says where it is, ends it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from runner.errors import ConfigError, StudyError
from runner.record.lock import LockHeld, LockMode, hold_lock
from runner.record.run_views import page
from runner.record.store import StudyStore
from runner.record.tracking_store import sqlite_path, store_lock

HOST = "127.0.0.1"
USUAL_PORT = 5000
PORTS_TRIED = 100
START_S = 180.0  # two imports of MLflow, slow on a machine that is measuring
STOP_S = 5.0
POLL_S = 0.2
LOG_LINES = 15
# Its job queue would start seven further processes, which outlive the server; none is needed.
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def serve(home: Path, name: str | None, port: int | None) -> int:
    """Show the store of a home (one study's page first) until Ctrl-C; returns the exit code."""
    uri, artifacts = tracking_of(home, name)
    if sqlite_path(uri) is None:
        _say(f"The study is shown by the MLflow server it logs to: {uri}")
        return 0
    with _ended_by_signals(), contextlib.suppress(KeyboardInterrupt):
        with running_ui(uri, artifacts, port) as (address, process):
            _say(_where(address, name))
            status = process.wait()
        raise StudyError(f"MLflow's server ended by itself with status {status}")
    return 0


def tracking_of(home: Path, name: str | None) -> tuple[str, Path]:
    """The store that shows a study (or the home's own) and its artifacts; ConfigError if none."""
    store = StudyStore(home, name or "any")
    uri = store.mlflow_uri
    if name is not None:
        uri = (store.read_study()["settings"].get("tracking") or {}).get("uri") or uri
    path = sqlite_path(uri)
    if path is not None and not path.exists():
        raise ConfigError(
            f"there is no MLflow store at {path} yet: start a study with runner tune, "
            "or name the right folder with --home"
        )
    return uri, store.artifacts_folder


def ui_command(uri: str, artifacts: Path, port: int) -> list[str]:
    """The command that serves a store on this machine only."""
    options = {
        "--backend-store-uri": uri,
        "--default-artifact-root": artifacts.as_uri(),
        "--host": HOST,  # with this host MLflow answers localhost names only
        "--port": str(port),
        "--workers": "1",
    }
    words = [word for option in options.items() for word in option]
    return [sys.executable, "-m", "mlflow", "server", *words]


@contextmanager
def running_ui(
    uri: str, artifacts: Path, port: int | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of a server that answers, and its process; all of it ends on leaving."""
    with store_lock(uri):
        pass  # a driver may be making the store right now
    with held_port(port) as chosen, tempfile.TemporaryFile() as log:
        address = f"http://{HOST}:{chosen}"
        process = subprocess.Popen(
            ui_command(uri, artifacts, chosen),
            env={**os.environ, **QUIET},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_ready(address, process, log)
            yield address, process
        finally:
            _end_group(process)


@contextmanager
def held_port(wanted: int | None) -> Iterator[int]:
    """`wanted` if it is free, else ConfigError; by default the first free one from 5000 on.

    The server binds its port many seconds after it was chosen; a lock keeps it until then from
    another `runner ui` of this machine.
    """
    tried = range(USUAL_PORT, USUAL_PORT + PORTS_TRIED) if wanted is None else [wanted]
    for port in tried:
        with ExitStack() as stack:
            lock = Path(tempfile.gettempdir()) / f"runner-ui-{os.getuid()}-{port}.lock"
            try:
                stack.enter_context(hold_lock(lock, LockMode.TRY))
            except LockHeld:
                continue
            if is_free(port):
                yield port
                return
    taken = f"port {tried[0]} is" if len(tried) == 1 else f"ports {tried[0]} to {tried[-1]} are"
    raise ConfigError(f"{taken} taken; choose another one with --port")


def is_free(port: int) -> bool:
    """Whether nothing listens on a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def study_page(address: str, name: str, *, charts: bool = False) -> str:
    """Where a running server shows a study: its trials, best first, or their charts."""
    query = urllib.parse.urlencode({"experiment_name": name})
    url = f"{address}/api/2.0/mlflow/experiments/get-by-name?{query}"
    with LOCAL.open(url, timeout=START_S) as answer:
        experiment = json.load(answer)["experiment"]["experiment_id"]
    return page(address, experiment, charts=charts)


def _where(address: str, name: str | None) -> str:
    lines = [f"MLflow runs at {address}/#/experiments"]
    if name is not None:
        lines = [
            f"Trials of {name}, best first: {study_page(address, name)}",
            f"Their charts: {study_page(address, name, charts=True)}",
        ]
    return "\n".join([*lines, "Ctrl-C ends it."])


def _wait_until_ready(address: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StudyError(f"MLflow's server ended while starting:\n{_tail(log)}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            LOCAL.open(f"{address}/health", timeout=START_S).close()
            return
        time.sleep(POLL_S)
    raise StudyError(f"MLflow's server did not answer within {START_S:.0f} s:\n{_tail(log)}")


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-LOG_LINES:])


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the server and its workers, politely first."""
    for number, patience_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A closed terminal or a plain kill ends the server as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
