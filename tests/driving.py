"""Runs the `runner` command as a user does: a process of its own, in a home of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

LIMIT_S = 240.0


@dataclass(frozen=True)
class Home:
    """A folder that holds studies, and the study file in it."""

    folder: Path
    document: Mapping[str, Any]
    limit_s: float = LIMIT_S

    @property
    def study_file(self) -> Path:
        path = self.folder / "study.yaml"
        path.write_text(yaml.safe_dump(dict(self.document)), encoding="utf-8")
        return path

    @property
    def study_folder(self) -> Path:
        return self.folder / "studies" / str(self.document["name"])

    def tune(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Tune to the end."""
        return self.run("tune", str(self.study_file), *options)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """One command, to its end."""
        return subprocess.run(
            self._argv(*words),
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=self.limit_s,
            check=False,
        )

    def start(self, *options: str) -> subprocess.Popen[str]:
        """A driver in a process group of its own, as a shell starts it."""
        return subprocess.Popen(
            self._argv("tune", str(self.study_file), *options),
            env=self._environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def results(self) -> list[dict[str, Any]]:
        """Every result.json, by number."""
        paths = sorted(self.study_folder.glob("trials/*/result.json"))
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    def servers(self) -> list[psutil.Process]:
        """The emulated servers of this home that are alive."""
        mark = str(self.study_folder)
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "runner.engines.emulator" in words and any(word.startswith(mark) for word in words):
                found.append(process)
        return found

    def _argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "runner.cli", *words, "--home", str(self.folder)]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONUNBUFFERED": "1"}


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait until it holds."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {limit_s:.0f} s: {what}")
        time.sleep(0.05)


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL, and wait until it is gone."""
    process.send_signal(signal.SIGKILL)
    process.communicate()
