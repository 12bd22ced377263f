"""What a server's log says: how far the start has come, and why the server died.

An SGLang server dies with exit code -9 for most reasons, so the first cause is read from its log.
This is the only place where text is searched for meaning; every row of TABLE has a test made of
real lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from threading import Lock

_TAIL_BYTES = 2 * 1024 * 1024
_LINE_CHARS = 300
_USAGE_EXIT = 2  # argparse's


class Verdict(StrEnum):
    """Whose fault a death is."""

    INFEASIBLE = "infeasible"  # the setting cannot run here
    PORT = "port"  # someone else has the port: start again with another
    FAILED = "failed"  # a crash or a hang; may not happen again


@dataclass(frozen=True, slots=True)
class Row:
    """One known cause. `pattern` is sought in the line of the cause, `inside` in its traceback."""

    verdict: Verdict
    message: str
    pattern: re.Pattern[str]
    inside: re.Pattern[str] | None = None


@dataclass(frozen=True, slots=True)
class Death:
    """Why a server died, for the user."""

    verdict: Verdict
    message: str


def _row(verdict: Verdict, message: str, pattern: str, inside: str | None = None) -> Row:
    return Row(verdict, message, re.compile(pattern), re.compile(inside) if inside else None)


_REFUSAL = r"^(?:AssertionError|ValueError|NotImplementedError|RuntimeError|ImportError)\b"

TABLE: tuple[Row, ...] = (
    _row(
        Verdict.PORT,
        "a port was taken",
        r"(?i)address already in use|EADDRINUSE|port at \d+ is not available",
    ),
    _row(
        Verdict.INFEASIBLE,
        "the server does not know the flag",
        r"\berror: unrecognized arguments: (?P<detail>.+)",
    ),
    _row(Verdict.INFEASIBLE, "the server refused a flag", r"^[\w ./-]+: error: (?P<detail>.+)"),
    _row(
        Verdict.INFEASIBLE,
        "no GPU memory is left for the KV cache",
        r"leave no GPU memory for the KV cache|Not enough memory.*--mem-fraction-static"
        r"|Not enough memory to allocate KV cache",
    ),
    _row(
        Verdict.INFEASIBLE,
        "out of GPU memory",
        r"(?i)out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
    ),
    _row(Verdict.INFEASIBLE, "the server wants GPUs it was not given", r"invalid device ordinal"),
    _row(
        Verdict.INFEASIBLE,
        "the sizes do not fit the model",
        _REFUSAL + r".*(?:divisible|greater than the number of)",
    ),
    _row(
        Verdict.INFEASIBLE,
        "not supported here",
        _REFUSAL + r"(?i:.*(?:support|requires? SM|incompatible|can only be used))",
    ),
    _row(
        Verdict.INFEASIBLE,
        "the server refused its arguments",
        r"^(?:AssertionError|ValueError|NotImplementedError)\b",
        inside=r'File "[^"]*(?:server_args\.py|/arg_groups/)',
    ),
    _row(Verdict.FAILED, "the server hung", r"(?i)watchdog timeout"),
    _row(
        Verdict.FAILED,
        "a GPU fault",
        r"CUDA error|illegal memory access|device-side assert|NCCL error|Triton Error \[CUDA\]",
    ),
    _row(
        Verdict.FAILED,
        "a process of the server was killed, perhaps because the machine is out of memory",
        r"^(?P<detail>Subprocess \S+ \(pid=\d+\) crashed with exit code -?\d+)"
        r"|scheduler died during initialization|Connection (?:closed|reset) by peer",
    ),
    _row(
        Verdict.FAILED,
        "the server's own warm-up failed",
        r"Initialization failed\. warmup error: (?P<detail>.+)",
    ),
    _row(Verdict.FAILED, "the server could not be executed", r"^(?P<detail>cannot start .+)"),
    _row(Verdict.FAILED, "the server crashed", r"."),
)

_PREFIX = re.compile(r"^\[\d{4}-\d\d-\d\d [^\]]*\] ")
_TRACEBACK = "Traceback (most recent call last):"
_SCHEDULER_DIED = re.compile(r"\bhit an exception: Traceback")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*)?(?:Error|Exception|Interrupt|Exit|Timeout)\b")
_ARGPARSE = re.compile(r"^[\w ./-]+: error: ")
# Fatal lines that come without a traceback of their own.
_STANDALONE = re.compile(
    r"\[Errno 98\] error while attempting to bind|crashed with exit code"
    r"|Initialization failed\. warmup error|^cannot start ",
    re.IGNORECASE,
)
# The echo of our own requests: no sign that a server gets on.
_ACCESS = re.compile(r'\bINFO: +\S+ - "[A-Z]+ \S+ HTTP/1\.\d" \d{3}\b')
# What follows a death; never its reason.
_SECONDARY = re.compile(
    r"Received sigquit|SIGQUIT received|kill_process_tree called|Sleeping \d+ seconds before crash"
    r"|No live scheduler processes|destroy_process_group\(\) was not called"
)
_DEATH_SIGN = re.compile(r"\bhit an exception: Traceback|crashed with exit code|SIGQUIT received")
# How a rank dies of another one that is gone; the cause only where no other is told.
_LOST_PEER = re.compile(r"Connection (?:closed|reset) by peer")
_HANG_SIGN = re.compile(r"watchdog timeout \((?!.*soft=True)", re.IGNORECASE)


def shows_death(line: str) -> bool:
    """Whether a line tells of a dead part, seconds before the main process ends."""
    return _DEATH_SIGN.search(line) is not None


def shows_hang(line: str) -> bool:
    """Whether a line tells that the server's own watchdog has found a hang and will end it."""
    return _HANG_SIGN.search(line) is not None


def explain_death(text: str, exit_code: int | None) -> Death:
    """Find the first cause in a log; `exit_code` speaks only where the log is silent."""
    cause = _first_cause(text.splitlines(), is_usage_error=exit_code == _USAGE_EXIT)
    if cause is None:
        last = last_line(text)
        ended = "is dying" if exit_code is None else f"ended with exit code {exit_code}"
        told = f"its last line: {last}" if last else "its log is empty"
        return Death(Verdict.FAILED, f"the server {ended} and names no reason; {told}")
    row = next(row for row in TABLE if _matches(row, cause))
    found = row.pattern.search(cause.line)
    detail = found.groupdict().get("detail") if found else None
    return Death(row.verdict, f"{row.message}: {(detail or cause.line)[:_LINE_CHARS]}")


def last_line(text: str) -> str:
    """The last line that says something."""
    for line in reversed(text.splitlines()):
        if line.strip() and not _SECONDARY.search(line) and not _ACCESS.search(line):
            return line.strip()[:_LINE_CHARS]
    return ""


@dataclass(frozen=True, slots=True)
class _Cause:
    line: str
    traceback: str = ""


def _matches(row: Row, cause: _Cause) -> bool:
    is_inside = row.inside is None or row.inside.search(cause.traceback) is not None
    return is_inside and row.pattern.search(cause.line) is not None


def _first_cause(lines: list[str], *, is_usage_error: bool) -> _Cause | None:
    """The first death of a child, else a fatal line, else an exception of the main process.

    A hang that a watchdog found counts as a death: ranks that wait for the hung one die of that. A
    rank that was killed tells nothing, and another may die of its loss before it is missed.
    """
    lost_peer: _Cause | None = None
    for number, line in enumerate(lines):
        if _HANG_SIGN.search(line):
            return _Cause(_bare(line))
        if _SCHEDULER_DIED.search(line):
            cause = _exception_after(lines, number) or _Cause(_bare(line))
            if not _LOST_PEER.search(cause.line):
                return cause
            lost_peer = lost_peer or cause
    for number, line in enumerate(lines):
        if (is_usage_error and _ARGPARSE.search(line)) or _STANDALONE.search(_bare(line)):
            return _with_exception(lines, number)
    if lost_peer is not None:
        return lost_peer
    for number, line in enumerate(lines):
        if _TRACEBACK in line:
            return _exception_after(lines, number)
    return None


def _with_exception(lines: list[str], number: int) -> _Cause:
    """A fatal line; where it ends in a traceback, the exception says more than that."""
    line = _bare(lines[number])
    raised = _exception_after(lines, number) if _TRACEBACK in line else None
    return _Cause(line if raised is None else line.replace(_TRACEBACK, raised.line))


def _exception_after(lines: list[str], start: int) -> _Cause | None:
    """The line that names the exception: the first at column 0 that looks like one."""
    for number in range(start + 1, len(lines)):
        if _EXCEPTION.match(lines[number]):
            return _Cause(lines[number].strip(), "\n".join(lines[start:number]))
    return None


def _bare(line: str) -> str:
    return _PREFIX.sub("", line).strip()


class LogReader:
    """Reads a growing log from `start_bytes` on, whole lines only. Safe to use from threads."""

    def __init__(self, path: Path, start_bytes: int) -> None:
        self.path = path
        self._start_bytes = start_bytes
        self._offset_bytes = start_bytes
        self._rest = b""
        self._lock = Lock()

    def read_lines(self) -> list[str]:
        """The lines completed since the last call; a progress bar's redraws are lines.

        Lines that only echo an HTTP request are left out.
        """
        with self._lock, self.path.open("rb") as log:
            log.seek(self._offset_bytes)
            fresh = log.read()
            self._offset_bytes += len(fresh)
            *lines, self._rest = (self._rest + fresh).replace(b"\r", b"\n").split(b"\n")
        texts = (line.decode("utf-8", errors="replace") for line in lines)
        return [text for text in texts if not ("HTTP/1." in text and _ACCESS.search(text))]

    def read_tail(self) -> str:
        """The log of this start, its last part if it is long."""
        with self.path.open("rb") as log:
            end_bytes = log.seek(0, 2)
            log.seek(max(self._start_bytes, end_bytes - _TAIL_BYTES))
            return log.read().decode("utf-8", errors="replace").replace("\r", "\n")


# How each phase ends: by the first or by the last of these lines, since every rank writes one.
_PHASE_ENDS: tuple[tuple[str, re.Pattern[str], bool], ...] = (
    ("import", re.compile(r"\] Init (?:parallel|torch distributed) begin"), False),
    ("init", re.compile(r"\] Load weight begin"), False),
    ("load_weights", re.compile(r"\] Load weight end"), True),
    ("kv_cache", re.compile(r"\] (?:KV Cache is allocated|Memory pool end)"), True),
    ("cuda_graph", re.compile(r"\] (?:Capture .*graph end|max_total_num_tokens=)"), True),
)
# What every rank begins and ends on its own, and may do again: drafts, prefill and decode graphs.
_RANK_SPANS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("load_weights", re.compile(r"(?P<rank>[^\]]*)\] Load weight (?P<edge>begin|end)")),
    ("cuda_graph", re.compile(r"(?P<rank>[^\]]*)\] Capture .*graph (?P<edge>begin|end)")),
)
_STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S*")
_PORT_OPEN = "Uvicorn running on"


@dataclass(slots=True)
class PhaseTimes:
    """When each start phase ended, on the study's clock."""

    started_s: float
    _ends_s: dict[str, float] = field(default_factory=dict)
    _open: dict[str, set[str]] = field(default_factory=dict)
    _is_port_open: bool = False

    def note(self, line: str, now_s: float) -> None:
        """Look at one line as it appears."""
        self._is_port_open = self._is_port_open or _PORT_OPEN in line
        for phase, pattern in _RANK_SPANS:
            if found := pattern.match(line):
                ranks = self._open.setdefault(phase, set())
                change = ranks.add if found["edge"] == "begin" else ranks.discard
                change(_STAMP.sub("", found["rank"]))
        for phase, pattern, is_last in _PHASE_ENDS:
            if pattern.search(line) and (is_last or phase not in self._ends_s):
                self._ends_s[phase] = now_s

    def current(self) -> str:
        """The phase that runs now: the first that a rank is still in, or after the last that ended.

        An open port ends all of them but the warm-up.
        """
        names = [*(phase for phase, _, _ in _PHASE_ENDS), "warmup"]
        if self._is_port_open:
            return names[-1]
        still = next((phase for phase, _ in _RANK_SPANS if self._open.get(phase)), None)
        if still is not None:
            return still
        ended = [names.index(phase) for phase in self._ends_s]
        return names[min(max(ended, default=-1) + 1, len(names) - 1)]

    def durations_s(self, ready_s: float) -> Mapping[str, float]:
        """Seconds of each phase; a phase without a line counts to the next."""
        durations: dict[str, float] = {}
        previous_s = self.started_s
        ends_s = {**self._ends_s, "warmup": ready_s}
        for phase in (*(phase for phase, _, _ in _PHASE_ENDS), "warmup"):
            if phase in ends_s:
                end_s = max(previous_s, ends_s[phase])
                durations[phase] = end_s - previous_s
                previous_s = end_s
        return {**durations, "total": ready_s - self.started_s}
