"""Becomes the server, after it made sure that the server dies with its owner.

Run by path as `wrapper.py GO_FD OWNER_PID -- ARGV...`; standard library only, nothing imports it.
It waits for one byte on GO_FD before it executes ARGV: by then the lease is on disk.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
OWNER_GONE = 125
CANNOT_ARM = 126
CANNOT_EXECUTE = 127


def main(arguments: list[str]) -> int:
    """Arm the death signal, wait for the lease, become the server; returns only on failure."""
    go_fd, owner_pid, argv = int(arguments[0]), int(arguments[1]), arguments[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.stderr.write(f"cannot start: no death signal: {os.strerror(ctypes.get_errno())}\n")
        return CANNOT_ARM
    # The owner may have died before the line above: then no signal comes, and nobody waits.
    if os.getppid() != owner_pid or not os.read(go_fd, 1):
        return OWNER_GONE
    os.close(go_fd)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - becoming the server is the point
    except OSError as error:
        sys.stderr.write(f"cannot start {argv[0]}: {error.strerror}\n")
        return CANNOT_EXECUTE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
