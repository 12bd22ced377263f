"""How an emulated server dies: SGLang's last words, then SIGKILL by its own hand."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from runner.engines.emulator.log import ServerLog

_FRAMES = """\
  File "sglang/srt/managers/scheduler.py", line 4623, in run_scheduler_process
    scheduler = Scheduler(
  File "sglang/srt/managers/scheduler.py", line 431, in __init__
    self.init_model_worker()"""

_HIT = "Scheduler hit an exception: Traceback (most recent call last):"
_PEER_LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]"


def write_exception(log: ServerLog, reason: str, pp_rank: int = 0, tp_rank: int = 0) -> None:
    """A scheduler's exception; `reason` is the traceback's last line, with its class."""
    log.write_rank(_HIT, pp_rank, tp_rank)
    log.write_raw(f"{_FRAMES}\n{reason}\n")


def die_together(log: ServerLog, reason: str, first_pp_rank: int) -> NoReturn:
    """All ranks fail at once: one with `reason`, the others since they lost it.

    Their tracebacks run into each other in the log, as those of separate processes do; only the
    first rank's says why.
    """
    ranks = [(pp, tp) for pp in range(log.ranks.pp_size) for tp in range(log.ranks.tp_size)]
    ranks.sort(key=lambda rank: rank[0] != first_pp_rank)
    ends = [reason, *[_PEER_LOST] * (len(ranks) - 1)]
    for rank in ranks:
        log.write_rank(_HIT, *rank)
    for lines in zip(*((*_FRAMES.splitlines(), end, "") for end in ends), strict=True):
        for line in lines:
            log.write_raw(line)
    log.write("Received sigquit from a child process. It usually means the child failed.")
    kill_self(log)


def die_at_start(log: ServerLog, reason: str, pp_rank: int = 0, tp_rank: int = 0) -> NoReturn:
    """The way a server goes whose scheduler could not be made."""
    write_exception(log, reason, pp_rank, tp_rank)
    log.write("Received sigquit from a child process. It usually means the child failed.")
    kill_self(log)


def kill_self(log: ServerLog) -> NoReturn:
    """SGLang's parent ends its process tree and itself; the exit code is -9 whatever happened."""
    pid = os.getpid()
    log.write(f"kill_process_tree called: parent_pid={pid}, include_parent=True, pid={pid}")
    os.kill(pid, signal.SIGKILL)
    raise SystemExit(1)  # not reached: SIGKILL cannot be ignored
