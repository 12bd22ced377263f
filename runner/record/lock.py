"""A lock between processes that the kernel frees when its holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from runner.errors import RunnerError, StudyError

TRIES = 10
TRY_INTERVAL_S = 0.02


class LockHeld(RunnerError):
    """Another process holds the lock; `pid` is what it wrote into the file, if anything."""

    def __init__(self, path: str, pid: str) -> None:
        super().__init__(path, pid)
        self.path = path
        self.pid = pid

    def __str__(self) -> str:
        return f"{self.path} is locked by process {self.pid or 'unknown'}"


class LockMode(StrEnum):
    """TRY: fail when it is taken. WAIT: until it is free. LOOK: only see whether it is free."""

    TRY = "try"
    WAIT = "wait"
    LOOK = "look"


@contextmanager
def hold_lock(path: Path, mode: LockMode) -> Iterator[None]:
    """Hold a lock on `path`; the file stays behind, holding the pid of its last holder.

    Raises LockHeld when it is taken and `mode` is not WAIT.
    """
    try:
        if mode is LockMode.LOOK:  # readers may have no right to write
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StudyError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        _acquire(descriptor, path, mode)
        if mode is not LockMode.LOOK:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, mode: LockMode) -> None:
    if mode is LockMode.WAIT:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return
    kind = fcntl.LOCK_SH if mode is LockMode.LOOK else fcntl.LOCK_EX
    # Whoever looks holds a shared lock for an instant, which must not turn a driver away.
    for tries_left in reversed(range(1 if mode is LockMode.LOOK else TRIES)):
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not tries_left:
                raise LockHeld(str(path), os.pread(descriptor, 32, 0).decode().strip()) from error
            time.sleep(TRY_INTERVAL_S)
        else:
            return
