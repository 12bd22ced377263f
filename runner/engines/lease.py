"""Leases: which servers run, who drives them, and how the orphans of a dead driver are ended.

A lease is a JSON file, written before its server executes a single instruction and removed after
the last process of the server is gone.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from runner.engines.processes import ProcessGroup, ProcessId, is_running, this_process
from runner.errors import StudyError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Driver:
    """The process whose death makes a server an orphan."""

    process: ProcessId
    host: str

    @classmethod
    def here(cls) -> Driver:
        """The calling process."""
        return cls(this_process(), platform.node())


@dataclass(frozen=True, slots=True)
class Lease:
    """One running server. Pids mean something on `host` and in boot `boot_id` only."""

    pid: int
    start_time: int
    pgid: int
    gpus: tuple[int, ...]
    port: int
    launch: int
    replica: int
    driver_pid: int
    driver_start_time: int
    driver_host: str
    host: str
    boot_id: str
    token: str

    @property
    def group(self) -> ProcessGroup:
        """The server's process group."""
        return ProcessGroup(ProcessId(self.pid, self.start_time), self.token)

    @property
    def driver(self) -> ProcessId:
        """The process that started the server."""
        return ProcessId(self.driver_pid, self.driver_start_time)


@dataclass(frozen=True, slots=True)
class LeaseFolder:
    """What a lease folder holds; `unreadable` are messages for the user, one per bad file."""

    leases: tuple[Lease, ...]
    unreadable: tuple[str, ...]


def boot_id() -> str:
    """The identity of this boot of this machine."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def write_lease(folder: Path, lease: Lease) -> Path:
    """Write a lease, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, lease)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(asdict(lease), indent=1), encoding="utf-8")
    part.replace(path)
    return path


def remove_lease(folder: Path, lease: Lease) -> None:
    """Remove a lease; one that is gone already is fine."""
    _path(folder, lease).unlink(missing_ok=True)


def read_leases(folder: Path) -> LeaseFolder:
    """Read every lease of a folder; a file that is no lease becomes a message."""
    leases: list[Lease] = []
    unreadable: list[str] = []
    for path in sorted(folder.glob("*.json")):
        try:
            leases.append(_parse(json.loads(path.read_text(encoding="utf-8"))))
        except FileNotFoundError:
            continue  # its server has just ended
        except (OSError, ValueError, TypeError) as error:
            unreadable.append(
                f"{path} is no readable lease ({error}); remove it when no server of it runs"
            )
    return LeaseFolder(tuple(leases), tuple(unreadable))


def end_orphans(folder: Path) -> tuple[Lease, ...]:
    """End the servers of this machine whose driver is dead; returns the leases of those ended.

    A lease of another machine, or with a living driver, is left alone. So is a process that has
    inherited the pid of a server that is gone. Raises StudyError if a server refuses to die.
    """
    ended: list[Lease] = []
    stuck: list[Lease] = []
    for lease in read_leases(folder).leases:
        if not _is_orphan(lease):
            continue
        was_running = lease.boot_id == boot_id() and bool(lease.group.members())
        if was_running and not lease.group.end():
            stuck.append(lease)
            continue
        remove_lease(folder, lease)
        if was_running:
            ended.append(lease)
    if stuck:
        names = ", ".join(f"pid {lease.pid} on GPUs {list(lease.gpus)}" for lease in stuck)
        raise StudyError(f"servers of an earlier run cannot be ended: {names}; end them by hand")
    return tuple(ended)


def end_own(folder: Path) -> None:
    """Kill every server of this machine that the calling process drives, at once."""
    this = Driver.here()
    for lease in read_leases(folder).leases:
        is_own = lease.driver == this.process and lease.driver_host == this.host
        if is_own and lease.host == this.host and lease.group.end():
            remove_lease(folder, lease)


def _is_orphan(lease: Lease) -> bool:
    host = platform.node()
    if lease.host != host:
        return False
    if lease.boot_id != boot_id():
        return True
    return lease.driver_host == host and not is_running(lease.driver)


def _path(folder: Path, lease: Lease) -> Path:
    return folder / f"launch-{lease.launch:04d}-replica-{lease.replica}.json"


def _parse(document: object) -> Lease:
    """Build a lease from JSON; raises TypeError for anything that is none."""
    if not isinstance(document, Mapping):
        raise TypeError("not a JSON object")
    return Lease(
        pid=_whole(document, "pid"),
        start_time=_whole(document, "start_time"),
        pgid=_whole(document, "pgid"),
        gpus=_wholes(document, "gpus"),
        port=_whole(document, "port"),
        launch=_whole(document, "launch"),
        replica=_whole(document, "replica"),
        driver_pid=_whole(document, "driver_pid"),
        driver_start_time=_whole(document, "driver_start_time"),
        driver_host=_text(document, "driver_host"),
        host=_text(document, "host"),
        boot_id=_text(document, "boot_id"),
        token=_text(document, "token"),
    )


def _whole(document: Mapping[str, object], key: str) -> int:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{key} must be a whole number, found {value!r}")
    return value


def _wholes(document: Mapping[str, object], key: str) -> tuple[int, ...]:
    values = document.get(key)
    if not isinstance(values, list):
        raise TypeError(f"{key} must be a list, found {values!r}")
    return tuple(_whole({key: value}, key) for value in values)


def _text(document: Mapping[str, object], key: str) -> str:
    value = document.get(key)
    if not isinstance(value, str):
        raise TypeError(f"{key} must be text, found {value!r}")
    return value
