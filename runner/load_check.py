"""Before the first launch: can the load generators of this machine serve the study's highest rung?

The answer is kept in machine/load-check.json and told in one line. It stops nothing: a rung whose
generator was the limit is judged invalid when it is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.cluster.executor import Executor
from runner.errors import LoadFailed, StudyError
from runner.insight.live import Note, View
from runner.load.self_check import PERIOD_S, LoadCheck
from runner.record.files import read_json, write_json
from runner.record.store import StudyStore
from runner.settings import StudySettings
from runner.trial import EngineKind

FILE = "load-check.json"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def check_load(executor: Executor, settings: StudySettings, store: StudyStore, view: View) -> None:
    """Try the generators and say how they did, unless they passed since this machine started."""
    if settings.engine.kind is EngineKind.SIMULATED:
        return
    streams = max((*settings.workload.concurrency, 1))
    path, boot = store.machine_folder / FILE, BOOT_ID.read_text().strip()
    if has_passed(path, boot, streams):
        return
    try:
        checks = executor.check_load(streams)
    except LoadFailed as error:
        view.handle(Note(f"warning: the load generator could not be tried: {error}"))
        return
    problems = [check.problem for check in checks if check.problem is not None]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        path,
        {
            "boot": boot,
            "streams": streams,
            "token_period_s": PERIOD_S,
            "passed": not problems,
            "problems": problems,
            "generators": checks,
        },
    )
    view.handle(Note(words(streams, checks, problems)))


def has_passed(path: Path, boot: str, streams: int) -> bool:
    """Whether the file says that as many streams were served since the machine started."""
    try:
        told = read_json(path, "Delete it")
    except (FileNotFoundError, StudyError):
        return False  # not tried, or not to be read: it is tried again
    served = told.get("streams")
    is_enough = isinstance(served, int) and served >= streams
    return is_enough and told.get("passed") is True and told.get("boot") == boot


def words(streams: int, checks: Sequence[LoadCheck], problems: Sequence[str]) -> str:
    """One line for people."""
    what = f"{streams} streams of a token per {PERIOD_S * 1000:.0f} ms"
    if problems:
        return (
            f"warning: the load generator did not keep up with {what} on this machine: "
            f"{problems[0]}; leave it more CPU time or lower workload.concurrency: "
            "rungs that it limits are judged invalid"
        )
    share = max(check.cpu_share for check in checks)
    cpu_us = max(check.cpu_us for check in checks)
    most = sum(check.most_streams for check in checks)
    many = f" by each of {len(checks)} generators" if len(checks) > 1 else ""
    return (
        f"load generator: {what} need {share:.0%} of a core{many} ({cpu_us:.0f} us per token); "
        f"it can serve at least about {most} such streams"
    )
