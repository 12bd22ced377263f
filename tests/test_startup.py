"""`runner --help` answers at once: a ratio of medians in one run, since machines differ."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

REPEATS = 5
MOST_BARE_STARTS = 20.0


def median_s(*command: str) -> float:
    """The median time of a command; the first run warms the file cache and does not count."""
    times_s = []
    for _ in range(REPEATS + 1):
        start_s = time.monotonic()
        subprocess.run(command, check=True, capture_output=True)
        times_s.append(time.monotonic() - start_s)
    return statistics.median(times_s[1:])


def test_help_takes_less_than_twenty_bare_interpreter_starts() -> None:
    bare_s = median_s(sys.executable, "-I", "-S", "-c", "pass")
    help_s = median_s(sys.executable, "-m", "runner.cli", "--help")
    assert help_s / bare_s < MOST_BARE_STARTS
