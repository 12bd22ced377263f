"""Scripts stay thin: logic that is worth a test lives in runner/."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCED = ROOT / "scripts" / "env"
CALLED = sorted({*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"} - {SOURCED})
MOST_LINES = 20


def script_id(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("path", CALLED, ids=script_id)
def test_a_script_is_short_executable_and_stops_at_errors(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert any(line.startswith("set -") and "uo pipefail" in line for line in lines)
    assert len(lines) <= MOST_LINES
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize("path", [*CALLED, SOURCED], ids=script_id)
def test_a_script_is_valid_bash(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_a_failing_check_fails_its_caller(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".ci").mkdir()
    run = tmp_path / ".ci" / "run"
    run.write_bytes((ROOT / ".ci" / "run").read_bytes())
    closing = "===== 1 failed, 2 passed in 0.10s ====="
    _script(tmp_path / "scripts" / "check", "exit 0")
    _script(tmp_path / "scripts" / "test", f"echo '{closing}'; echo noise after it; exit 1")
    done = subprocess.run(["bash", str(run)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == closing
    _script(tmp_path / "scripts" / "check", "exit 3")
    assert subprocess.run(["bash", str(run)], capture_output=True, check=False).returncode == 3


def _script(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
