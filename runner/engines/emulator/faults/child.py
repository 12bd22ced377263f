"""A child process that outlives its server, as a scheduler does whose parent was killed."""

from __future__ import annotations

import signal
import subprocess

from runner.engines.processes import ProcessId, identify

TITLE = "sglang::scheduler_PP0"
LIFETIME_WALL_S = 600  # nobody has to live with a forgotten one for longer


def leave_child(*, own_session: bool) -> ProcessId:
    """Start it; it hears no SIGTERM and carries the lease's mark as every child does.

    In its server's process group, so that ending the group ends it, unless `own_session`.
    """
    child = subprocess.Popen(
        (TITLE, str(LIFETIME_WALL_S)),
        executable="/bin/sleep",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=own_session,
        preexec_fn=_ignore_sigterm,  # noqa: PLW1509 - the server has no threads yet
    )
    return identify(child.pid)


def _ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
