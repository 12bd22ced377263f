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


def write_exception(log: ServerLog, reason: str, pp_rank: int = 0, tp_rank: int = 0) -> None:
    """A scheduler's exception; `reason` is the traceback's last line, with its class."""
    log.write_rank(
        "Scheduler hit an exception: Traceback (most recent call last):", pp_rank, tp_rank
    )
    log.write_raw(f"{_FRAMES}\n{reason}\n")


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
