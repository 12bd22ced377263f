"""Watches what a ready server says of its decode passes, from a thread of its own.

The log is read a few times a second, by a reader of its own. /metrics is read seldom: to answer it
takes SGLang's HTTP process about 15 ms for each stage, in which it passes on no tokens.
"""

from __future__ import annotations

import threading

from runner.clock import Clock
from runner.engines.sglang.batch_words import (
    DecodeWords,
    LateWords,
    Leaders,
    PauseWords,
    RetractWords,
    read_line,
    read_passes,
)
from runner.engines.sglang.control import Control
from runner.engines.sglang.logs import LogReader
from runner.errors import ServerFailed
from runner.measure.evidence import near
from runner.trial import BatchSample

LINES_PERIOD_S = 0.25
LINES_PERIOD_WALL_S = (0.02, 0.25)  # bounds, whatever the clock's scale
COUNTERS_PERIOD_S = 30.0
SHORTEST_COUNTERS_PERIOD_WALL_S = 0.5


class BatchWatch:
    """Samples of one server, from `start` to `stop`; methods may be called from any thread.

    Args:
        replica: The server's number within its launch.
        log: Reads the server's log from here on; nobody else may read with it.
        control: Asks the server for /metrics; nobody else may ask with it.
        clock: Stamps the samples.
    """

    def __init__(self, replica: int, log: LogReader, control: Control, clock: Clock) -> None:
        self._replica = replica
        self._log = log
        self._control = control
        self._clock = clock
        shortest, longest = LINES_PERIOD_WALL_S
        self._lines_wall_s = min(max(clock.wall_duration_s(LINES_PERIOD_S), shortest), longest)
        self._counters_s = max(COUNTERS_PERIOD_S, SHORTEST_COUNTERS_PERIOD_WALL_S * clock.scale)
        self._counters_due_s = clock.now_s()
        self._has_counters = True
        self._leaders = Leaders()
        self._samples: list[BatchSample] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batch-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the watch; what it has seen stays."""
        self._stopping.set()
        self._thread.join()
        self._control.close()

    def look(self) -> None:
        """Read log and counters now."""
        with self._lock:
            self._read_lines()
            self._read_counters()

    def samples(self, start_s: float, end_s: float) -> tuple[BatchSample, ...]:
        """What was said in [start_s, end_s], with the counters next to it on either side."""
        with self._lock:
            self._read_lines()
            return near(self._samples, start_s, end_s)

    def _run(self) -> None:
        while not self._stopping.wait(self._lines_wall_s):
            with self._lock:
                self._read_lines()
                if self._clock.now_s() >= self._counters_due_s:
                    self._read_counters()

    def _read_lines(self) -> None:
        lines = self._log.read_lines()
        now_s = self._clock.now_s()
        for said in map(read_line, lines):
            if said is None or not self._leaders.is_leader(said[0]):
                continue
            rank, words = said
            match words:
                case DecodeWords(running, waiting, in_graph, kv_usage):
                    sample = BatchSample(
                        *(now_s, self._replica, rank.dp, running, waiting, in_graph, kv_usage)
                    )
                case RetractWords(retracted):
                    sample = BatchSample(now_s, self._replica, rank.dp, retracted=retracted)
                case PauseWords(paused_s):
                    sample = BatchSample(now_s, self._replica, rank.dp, paused_s=paused_s)
                case LateWords(late_share):
                    sample = BatchSample(now_s, self._replica, rank.dp, late_share=late_share)
            self._samples.append(sample)

    def _read_counters(self) -> None:
        """A server that is busy or dying does not answer: it told nothing, which is no failure."""
        if not self._has_counters:
            return
        asked_s = self._clock.now_s()
        self._counters_due_s = asked_s + self._counters_s
        try:
            text = self._control.metrics()
        except ServerFailed:
            return
        self._has_counters = text is not None
        time_s = (asked_s + self._clock.now_s()) / 2
        self._samples += (
            BatchSample(time_s, self._replica, dp_rank, graph_passes=graph, eager_passes=eager)
            for dp_rank, (graph, eager) in read_passes(text or "").items()
        )
