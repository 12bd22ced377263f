"""Asks an interpreter which SGLang it has, and that SGLang for its flags. Never imports SGLang.

`--help` imports all of SGLang and takes some 20 s, so its answer is kept under ~/.cache (or
XDG_CACHE_HOME), one file for each installation; what the version query answers, which takes a
moment only, says whether the file still holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from runner.engines.sglang.environment import Flag, ServerEnvironment, Takes, parse_help
from runner.engines.sglang.process import cache_home, inherited_environment
from runner.errors import ConfigError
from runner.measure.visible import VARIABLE

QUERY_LIMIT_S = 60.0
HELP_LIMIT_S = 300.0
SHOWN_LINES = 5
SCHEMA = 1
_NOT_INSTALLED = 3
_VERSION = re.compile(r"[\w.+!-]{1,60}", re.ASCII)

# Runs in the other interpreter. find_spec finds a package without importing it.
_QUERY = f"""
import importlib.metadata, importlib.util, json, os, sys
try:
    found = importlib.metadata.distribution("sglang")
except importlib.metadata.PackageNotFoundError:
    sys.exit({_NOT_INSTALLED})
spec = importlib.util.find_spec("sglang")
folder = os.path.dirname(spec.origin) if spec and spec.origin else ""
paths = [str(found.locate_file(f)) for f in found.files or () if f.match("*.dist-info/RECORD")]
paths.append(os.path.join(folder, "srt", "server_args.py"))
stats = [os.stat(path) for path in paths if os.path.exists(path)]
marks = [[stat.st_mtime_ns, stat.st_size] for stat in stats]
print(json.dumps({{"version": found.version, "folder": folder, "marks": marks}}))
"""


@dataclass(frozen=True, slots=True)
class Installation:
    """One SGLang in one interpreter; `fingerprint` changes when it is installed anew."""

    python: str
    version: str
    folder: str
    fingerprint: str


def read_installed(python: str, env: Mapping[str, str]) -> ServerEnvironment:
    """The SGLang of this interpreter; `env` is added to our environment.

    Raises ConfigError when there is no such program, no SGLang in it, or its --help fails.
    """
    program = shutil.which(python)
    if program is None:
        raise ConfigError(
            f"engine.python: {python} is no program here; name the Python that has SGLang"
        )
    found = _find(program, env)
    path = _cache_path(found)
    kept = _read_kept(path, found)
    if kept is not None:
        return kept
    read = ServerEnvironment(found.version, _read_help(program, env))
    _keep(path, found, read)
    return read


def _find(python: str, env: Mapping[str, str]) -> Installation:
    done = _run((python, "-c", _QUERY), env, QUERY_LIMIT_S)
    if done.returncode == _NOT_INSTALLED:
        raise ConfigError(
            f"engine.python: {python} has no SGLang; name the Python of the environment that it is "
            "installed in, or use --set engine.kind=emulated to try the study without"
        )
    try:
        told = json.loads(done.stdout.splitlines()[-1])
        version, folder, marks = str(told["version"]), str(told["folder"]), told["marks"]
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        version, folder, marks = "", "", None
    if _VERSION.fullmatch(version) is None or not folder.isprintable():
        raise ConfigError(
            f"engine.python: {python} did not say which SGLang it has{_last_words(done)}"
        )
    return Installation(python, version, folder, json.dumps(marks))


def _read_help(python: str, env: Mapping[str, str]) -> tuple[Flag, ...]:
    argv = (python, "-m", "sglang.launch_server", "--help")
    shown = " ".join(argv)
    done = _run(argv, env, HELP_LIMIT_S)
    if done.returncode != 0:
        raise ConfigError(
            f"`{shown}` failed with exit code {done.returncode}; run it by hand and repair that "
            f"installation (variables that it needs belong in engine.env){_last_words(done)}"
        )
    try:
        return parse_help(done.stdout)
    except ConfigError as error:
        raise ConfigError(f"`{shown}`: {error}{_last_words(done)}") from error


def _run(
    argv: tuple[str, ...], env: Mapping[str, str], limit_s: float
) -> subprocess.CompletedProcess[str]:
    try:
        process = subprocess.Popen(
            argv,
            env=_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the driver
        )
        with process:
            try:
                out, err = process.communicate(timeout=limit_s)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # it runs still, with all it has started
                raise
        return subprocess.CompletedProcess(argv, process.returncode, out, err)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"`{argv[0]} {' '.join(argv[1:]) if argv[1] == '-m' else '-c ...'}` did not end "
            f"within {limit_s:.0f} s; run it by hand to see why"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"engine.python: {argv[0]} cannot be run: {error.strerror}; name the Python that has "
            "SGLang"
        ) from error


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """That of a server, and lines of help that are wide enough to be read by a program.

    Ray may hide all GPUs from a process that asked for none, and SGLang looks at them.
    """
    added = {"COLUMNS": "200", "PYTHON_COLORS": "0"}
    whole = {**inherited_environment(), **env, **added}
    return {name: value for name, value in whole.items() if (name, value) != (VARIABLE, "")}


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    text = done.stderr if done.stderr.strip() else done.stdout
    lines = [line.rstrip() for line in text.splitlines() if line.strip()][-SHOWN_LINES:]
    return "".join(f"\n  {line}" for line in lines)


def _cache_path(found: Installation) -> Path:
    where = hashlib.sha256(f"{found.python}\n{found.folder}".encode()).hexdigest()[:12]
    return cache_home(os.environ) / "flags" / f"{found.version}-{where}.json"


def _read_kept(path: Path, found: Installation) -> ServerEnvironment | None:
    """What was kept of this installation; None when there is nothing that can be used."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["schema"] != SCHEMA or told["installation"] != asdict(found):
            return None
        flags = tuple(
            Flag(tuple(map(str, names)), Takes(takes), tuple(map(str, choices)))
            for names, takes, choices in told["flags"]
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None  # not there, or damaged: it is made anew
    return ServerEnvironment(found.version, flags) if flags else None


def _keep(path: Path, found: Installation, read: ServerEnvironment) -> None:
    document = {
        "schema": SCHEMA,
        "installation": asdict(found),
        "flags": [[flag.names, flag.takes, flag.choices] for flag in read.flags],
    }
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(document), encoding="utf-8")
        part.replace(path)
    except OSError:
        return  # a folder that cannot be written costs the next start some seconds, no more
