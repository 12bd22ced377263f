"""How long a study was worked on: one file per session, touched with everything it writes.

A session that was killed counts up to the last thing it wrote.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runner.record.codec import decode, fields_of
from runner.record.files import read_json, write_json


@dataclass(frozen=True, slots=True)
class Session:
    """What a session's file says."""

    pid: int
    started_s: float


class SessionLog:
    """The sessions of one study. A file's modification time says when the session last wrote."""

    def __init__(self, folder: Path, wall_s: Callable[[], float]) -> None:
        self._folder = folder
        self._wall_s = wall_s
        self._own: Path | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """Count the time inside as worked on."""
        number = len(list(self._folder.glob("*.json")))
        self._own = self._folder / f"{number:04d}.json"
        write_json(self._own, fields_of(Session(os.getpid(), self._wall_s())))
        self.beat()
        try:
            yield
        finally:
            self.beat()
            self._own = None

    def beat(self) -> None:
        """Note that the running session is alive; nothing outside of one."""
        if self._own is not None:
            now_s = self._wall_s()
            with contextlib.suppress(FileNotFoundError):  # cleared away by its user
                os.utime(self._own, (now_s, now_s))

    def seconds(self) -> float:
        """Wall-clock seconds of all sessions."""
        self.beat()
        return sum(_length_s(path) for path in self._folder.glob("*.json"))


def _length_s(path: Path) -> float:
    document = read_json(path, "Delete it: the time of that session is forgotten")
    return max(0.0, path.stat().st_mtime - decode(Session, document).started_s)
