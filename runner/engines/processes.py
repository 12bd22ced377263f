"""Processes and process groups as /proc shows them: who runs, since when, and how a group is ended.

A pid alone names nobody, since the kernel hands it out again; a pid with its start time does.
Nothing here ends a process that it cannot prove to be ours.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

LEASE_VARIABLE = "SGLANG_RUNNER_LEASE"
"""Environment variable that marks a server and all its children with their lease's token."""
START_VARIABLE = "SGLANG_RUNNER_START"
"""Environment variable that tells a server which start it is: LAUNCH/REPLICA/ATTEMPT."""

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_POLL_WALL_S = 0.02
_LEAVE_WALL_S = 2.0
_KILL_WALL_S = 30.0
_DEAD_STATES = ("Z", "X")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of this boot; `start_time` in clock ticks since boot, as /proc gives it."""

    pid: int
    start_time: int


@dataclass(frozen=True, slots=True)
class GroupWork:
    """What a group has done so far: CPU seconds, and bytes read from files, pipes and disks."""

    cpu_s: float
    read_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """What /proc/PID/stat says, as far as we need it; `cpu_s` with that of reaped children."""

    process: ProcessId
    state: str
    group: int
    cpu_s: float

    @property
    def is_dead(self) -> bool:
        """A zombie holds no memory and no port; whether it is reaped depends on its parent."""
        return self.state in _DEAD_STATES


def read_stat(pid: int) -> ProcessStat | None:
    """Read one process; None when there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return ProcessStat(
        process=ProcessId(pid, int(fields[19])),
        state=fields[0],
        group=int(fields[2]),
        cpu_s=sum(map(int, fields[11:15])) / _TICKS_PER_S,
    )


def this_process() -> ProcessId:
    """The identity of the calling process."""
    return identify(os.getpid())


def identify(pid: int) -> ProcessId:
    """The identity of a running process; raises ProcessLookupError when there is none."""
    stat = read_stat(pid)
    if stat is None:
        raise ProcessLookupError(f"no process {pid}")
    return stat.process


def is_running(process: ProcessId) -> bool:
    """Whether this very process still runs (a zombie does not)."""
    stat = read_stat(process.pid)
    return stat is not None and stat.process == process and not stat.is_dead


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The group a server leads; `token` is what its environment carries in LEASE_VARIABLE."""

    leader: ProcessId
    token: str

    def members(self) -> tuple[ProcessStat, ...]:
        """The running processes of the group that are ours, the leader's death notwithstanding."""
        group = [stat for stat in _all_stats() if stat.group == self.leader.pid]
        running = tuple(stat for stat in group if not stat.is_dead)
        leader = read_stat(self.leader.pid)
        if leader is not None:
            return running if leader.process == self.leader else ()
        if any(_is_foreign(stat.process.pid, self.token) for stat in running):
            return ()
        return running

    def listeners(self, port: int) -> frozenset[ProcessId]:
        """The running members that listen on a TCP port; empty also when that cannot be seen."""
        members = (stat.process for stat in self.members())
        return frozenset(process for process in members if _listens(process.pid, port))

    def work(self) -> GroupWork:
        """What the running members, and the children that they have waited for, have done."""
        members = self.members()
        return GroupWork(
            cpu_s=sum(stat.cpu_s for stat in members),
            read_bytes=sum(_read_bytes(stat.process.pid) for stat in members),
        )

    def end(self) -> bool:
        """Kill the leader, then what does not follow it; False if something refuses to die.

        A server has nothing to lose, and one that is asked to end takes 5 to 20 s only to kill
        itself in the end. SGLang's processes die with their parent, and what they shared (memory,
        semaphores) is freed by a helper that sees the leader die first.
        """
        if is_running(self.leader):
            self._kill(os.kill)
            if self._wait_gone(_LEAVE_WALL_S):
                return True
        self._kill(os.killpg)
        return self._wait_gone(_KILL_WALL_S)

    def _kill(self, kill: Callable[[int, int], None]) -> None:
        if self.members():
            with contextlib.suppress(ProcessLookupError):  # it ended by itself in between
                kill(self.leader.pid, signal.SIGKILL)

    def _wait_gone(self, limit_wall_s: float) -> bool:
        deadline_s = time.monotonic() + limit_wall_s
        while self.members():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_WALL_S)
        return True


def _read_bytes(pid: int) -> int:
    """Bytes a process has read: by calls, and from disks by mapped pages. 0: it is not told."""
    try:
        lines = (_PROC / str(pid) / "io").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    counts = {name: int(value) for name, _, value in (line.partition(":") for line in lines)}
    return counts.get("rchar", 0) + counts.get("read_bytes", 0)


def _listens(pid: int, port: int) -> bool:
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)


def _all_stats() -> list[ProcessStat]:
    pids = (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())
    return [stat for stat in map(read_stat, pids) if stat is not None]


def _is_foreign(pid: int, token: str) -> bool:
    """Whether a process proves not to be ours.

    SGLang's children rename themselves, which overwrites their environment: one that shows no
    environment at all is believed to belong to the group it is in.
    """
    try:
        environ = (_PROC / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    mark = f"{LEASE_VARIABLE}={token}".encode()
    return b"=" in environ and mark not in environ.split(b"\0")
