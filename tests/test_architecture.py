"""The rules of ARCHITECTURE.md that a machine can hold."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "runner"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the top down. A module or folder may import those after it, never those before.
LAYERS = (
    "cli",
    "commands",
    "load_command",
    "session",
    "tune",
    "held_launch",
    "load_check",
    "session_gpus",
    "sharing",
    "verdict",
    "run_trial",
    "insight",
    "calibration",
    "record",
    "search",
    "forecast",
    "plans",
    "cluster",
    "engines",
    "load",
    "measure",
    "config",
    "study_file",
    "pipeline",
    "machine",
    "space",
    "launch",
    "settings",
    "expression",
    "label",
    "trial",
    "result",
    "canary",
    "lengths",
    "kinds",
    "clock",
    "errors",
)

# Who may import a third-party library. numpy and psutil are everybody's.
OWNERS = {
    "ray": ["cluster/*"],
    "optuna": ["search/*"],
    "mlflow": ["record/*"],
    "pyarrow": ["record/*"],
    "pynvml": ["measure/power.py"],
    "pydantic": ["config.py", "study_file/*", "machine/profile.py"],
    "pydantic_core": ["config.py", "study_file/*", "machine/profile.py"],
    "yaml": ["config.py", "study_file/*", "machine/profile.py"],
    "simpleeval": ["expression.py"],
    "requests": ["engines/sglang/control.py"],
    "aiohttp": ["engines/emulator/*"],
    "httptools": ["load/*"],
    "uvloop": ["load/*", "engines/emulator/*"],
    "rich": ["insight/*"],
    "scipy": ["calibration/fit.py"],
    "numpy": ["*"],
    "psutil": ["*"],
    "sqlalchemy": ["record/*", "search/*"],  # the errors that MLflow's and Optuna's stores raise
}
HEAVY = ("ray", "optuna", "mlflow", "pynvml", "pyarrow", "numpy", "scipy")
RUN_TRIAL_WORDS = {"runner.trial", "runner.errors"}
MOST_FILE_LINES, MOST_FUNCTION_LINES = 400, 60


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def room(path: Path) -> str:
    """The module or folder below runner/ that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> Iterator[str]:
    """Every imported module, also those imported inside functions."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by the full name, not relative"
            assert node.module is not None
            if node.module == "runner":
                yield from (f"runner.{alias.name}" for alias in node.names)
            else:
                yield node.module


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_module_has_its_layer() -> None:
    rooms = {room(path) for path in FILES} - {"__init__"}
    assert rooms == set(LAYERS), "keep LAYERS in step with the modules of runner/"


def test_no_import_points_up() -> None:
    upward = [
        f"{name_of(path)} imports {module}"
        for path in FILES
        for module in imports(path)
        if module.startswith("runner.") and module.split(".")[1] not in at_or_below(room(path))
    ]
    assert upward == []


def at_or_below(own: str) -> tuple[str, ...]:
    return LAYERS[LAYERS.index(own) :] if own in LAYERS else ()


def test_a_library_is_imported_by_its_owner_only() -> None:
    assert [stranger for path in FILES for stranger in strangers(path)] == []


def strangers(path: Path) -> list[str]:
    """Libraries that a file imports without owning them."""
    where = path.relative_to(PACKAGE).as_posix()
    tops = {module.split(".")[0] for module in imports(path)}
    libraries = tops - {"runner"} - set(sys.stdlib_module_names)
    return [
        f"{where} imports {top}"
        for top in libraries
        if not any(fnmatch(where, pattern) for pattern in OWNERS.get(top, []))
    ]


def test_run_trial_knows_the_words_only() -> None:
    found = {m for m in imports(PACKAGE / "run_trial.py") if m.startswith("runner")}
    assert found <= RUN_TRIAL_WORDS


def test_no_file_is_too_long() -> None:
    lengths = {name_of(path): len(path.read_text("utf-8").splitlines()) for path in FILES}
    assert {name: n for name, n in lengths.items() if n > MOST_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    too_long = [
        f"{name_of(path)}: {node.name} has {length(node)} lines"
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and length(node) > MOST_FUNCTION_LINES
    ]
    assert too_long == []


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body without its docstring."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_nothing_is_caught_broadly_but_to_be_raised_again() -> None:
    swallowing = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler)
        and is_broad(node)
        and not isinstance(node.body[-1], ast.Raise)
    ]
    assert swallowing == []


def is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return bool(names & {"Exception", "BaseException"})


def test_imports_are_not_hidden_from_the_interpreter() -> None:
    hiding = [
        name_of(path)
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Name) and node.id == "TYPE_CHECKING"
    ]
    assert hiding == []


def test_package_files_hold_no_code() -> None:
    files = [path for path in FILES if path.name == "__init__.py"]
    nodes = [(name_of(path), node) for path in files for node in tree(path).body]
    assert [name for name, node in nodes if not isinstance(node, ast.Expr)] == []


@pytest.mark.parametrize("module", ["runner.cli", "runner.config"])
def test_reading_a_study_file_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
