"""One server process: started so that it dies with its owner, ended with its whole group."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from runner.engines.processes import LEASE_VARIABLE, ProcessGroup, identify

_WRAPPER = Path(__file__).with_name("wrapper.py")
_REAP_WALL_S = 5.0
_NOT_INHERITED = ("OMP_NUM_THREADS",)
_NOT_INHERITED_PREFIX = "RAY_"


@dataclass(frozen=True, slots=True)
class Command:
    """What to run; `token` marks the process and its children as the lease's.

    `keep_fds`: descriptors that the process inherits and keeps open.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    log_path: Path
    token: str
    keep_fds: tuple[int, ...] = ()


class ServerProcess:
    """A started server; it leads a session and a process group of its own."""

    def __init__(
        self, popen: subprocess.Popen[bytes], group: ProcessGroup, log_start_bytes: int
    ) -> None:
        self._popen = popen
        self.group = group
        self.log_start_bytes = log_start_bytes

    @property
    def pid(self) -> int:
        """The pid of the server's main process."""
        return self.group.leader.pid

    def exit_code(self) -> int | None:
        """How the main process ended (minus the signal number if killed); None while it runs."""
        return self._popen.poll()

    def wait_exit(self, limit_wall_s: float) -> int | None:
        """Wait a moment for the main process to end."""
        try:
            return self._popen.wait(limit_wall_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> bool:
        """End every process of the group; False if something refuses to die."""
        is_gone = self.group.end()
        self.wait_exit(_REAP_WALL_S)
        return is_gone


def inherited_environment() -> dict[str, str]:
    """Our environment without what Ray puts there: a server is the same whoever starts it.

    Ray gives its actors one OpenMP thread each; a study that wants a number says so itself.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED and not name.startswith(_NOT_INHERITED_PREFIX)
    }


def cache_home(environment: Mapping[str, str]) -> Path:
    """Our folder for what may be kept from one study to the next and made again."""
    home = Path(environment.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".cache") / "sglang-runner"


def spawn(command: Command, before_exec: Callable[[ProcessGroup], None]) -> ServerProcess:
    """Start a server; `before_exec` is called with its identity before it runs (the lease).

    The kernel ties the death signal to the thread that spawned, so one thread, which lives as
    long as this process, spawns all servers.
    """
    return _spawner(os.getpid()).submit(_spawn, command, before_exec).result()


@functools.cache
def _spawner(_pid: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")


def _spawn(command: Command, before_exec: Callable[[ProcessGroup], None]) -> ServerProcess:
    go_read, go_write = os.pipe()
    try:
        popen, log_start_bytes = _start_wrapper(command, go_read)
        try:
            group = ProcessGroup(identify(popen.pid), command.token)
            before_exec(group)
            os.write(go_write, b"!")
        except BaseException:
            popen.kill()  # no lease, no server
            popen.wait()
            raise
    finally:
        os.close(go_read)
        os.close(go_write)
    return ServerProcess(popen, group, log_start_bytes)


def _start_wrapper(command: Command, go_fd: int) -> tuple[subprocess.Popen[bytes], int]:
    command.log_path.parent.mkdir(parents=True, exist_ok=True)
    wrapper = [sys.executable, "-I", "-S", str(_WRAPPER), str(go_fd), str(os.getpid()), "--"]
    with command.log_path.open("ab") as log:
        log_start_bytes = log.tell()
        popen = subprocess.Popen(
            [*wrapper, *command.argv],
            env={**command.env, LEASE_VARIABLE: command.token},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(go_fd, *command.keep_fds),
        )
    return popen, log_start_bytes
