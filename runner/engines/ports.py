"""Free ports for servers, each held by a lock file, so that two runners never pick the same.

A server binds its port minutes after it was started. Ports come from below the kernel's ephemeral
range, where no outgoing connection takes them in the meantime; the locks keep other runners away
and are given back by the kernel when their holder dies.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

from runner.errors import ClusterLost

PORTS = range(22000, 30000)
_FOLDER_MODE = 0o1777
_LOCK_MODE = 0o666


class HeldPorts:
    """Ports that no other runner of this machine picks until `release`."""

    def __init__(self, locks: dict[int, int]) -> None:
        self._locks = locks
        self.numbers = tuple(locks)

    def release(self) -> None:
        """Give the ports back; a second call does nothing."""
        while self._locks:
            os.close(self._locks.popitem()[1])


def hold_ports(count: int, folder: Path | None = None, candidates: range = PORTS) -> HeldPorts:
    """Hold `count` distinct free ports; raises ClusterLost when there are not so many.

    Args:
        count: How many.
        folder: Where the lock files are; default one folder for all runners of the machine.
        candidates: Which ports may be taken.
    """
    folder = folder or Path(tempfile.gettempdir()) / "sglang-runner-ports"
    _make_folder(folder)
    locks: dict[int, int] = {}
    # A fresh port each time: a killed server's port may linger.
    for port in random.sample(candidates, len(candidates)):
        if len(locks) == count:
            break
        lock = _lock(folder / f"{port}.lock")
        if lock is None:
            continue
        if is_free(port):
            locks[port] = lock
        else:
            os.close(lock)
    held = HeldPorts(locks)
    if len(held.numbers) < count:
        held.release()
        span = f"{candidates.start}..{candidates.stop - 1}"
        raise ClusterLost(f"{count} free ports needed, {len(held.numbers)} found in {span}")
    return held


def is_free(port: int) -> bool:
    """Whether nothing on this machine listens on `port`."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return
    folder.chmod(_FOLDER_MODE)  # shared by all users of the machine, whatever the umask


def _lock(path: Path) -> int | None:
    """Lock a file and return its descriptor; None when someone else holds it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _LOCK_MODE)
    except PermissionError:
        return None  # another user's lock
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
