"""The emulated server's log: SGLang's lines, in SGLang's formats.

Dates are real ones; durations and rates are in emulated seconds. SGLang writes one process per
rank; here one process writes the lines of all ranks it stands for, batch lines for rank 0 only.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from runner.pipeline import BatchReport


@dataclass(frozen=True, slots=True)
class Ranks:
    """The sizes that decide which ranks a line names: a dimension of size 1 is not written."""

    pp_size: int
    tp_size: int
    ep_size: int

    def prefix(self, pp_rank: int, tp_rank: int) -> str:
        """What follows the date for this rank, e.g. " PP3 TP0"."""
        words = []
        if self.pp_size > 1:
            words.append(f" PP{pp_rank}")
        if self.tp_size > 1:
            words.append(f" TP{tp_rank}")
        if self.ep_size > 1:
            words.append(f" EP{tp_rank * self.ep_size // self.tp_size}")
        return "".join(words)


class ServerLog:
    """Writes lines to a file descriptor (stderr), each at once and whole."""

    def __init__(self, ranks: Ranks, descriptor: int = 2) -> None:
        self.ranks = ranks
        self._descriptor = descriptor
        self._second = -1
        self._is_silent = False
        self._date = ""

    def write(self, text: str) -> None:
        """A line of the main process."""
        self._write(f"[{self._now()}] {text}\n")

    def write_rank(self, text: str, pp_rank: int = 0, tp_rank: int = 0) -> None:
        """A line of one scheduler."""
        self._write(f"[{self._now()}{self.ranks.prefix(pp_rank, tp_rank)}] {text}\n")

    def write_ranks(self, text: str) -> None:
        """The same line of every scheduler."""
        for pp_rank in range(self.ranks.pp_size):
            for tp_rank in range(self.ranks.tp_size):
                self.write_rank(text, pp_rank, tp_rank)

    def write_stages(self, text: str) -> None:
        """The same line of the first scheduler of every stage."""
        for pp_rank in range(self.ranks.pp_size):
            self.write_rank(text, pp_rank)

    def write_raw(self, text: str) -> None:
        """Text without a date, such as a traceback."""
        self._write(text + "\n")

    def silence(self) -> None:
        """Write nothing any more."""
        self._is_silent = True

    def _write(self, text: str) -> None:
        if self._is_silent:
            return
        rest = text.encode()
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BrokenPipeError:  # nobody reads the log any more; the server goes on
            return

    def _now(self) -> str:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return self._date


class BatchLog:
    """Logs micro-batches as the scheduler's rank 0 does, and keeps the gauges that follow.

    Every prefill is logged; of all slots' decodes together every `decode_interval`-th, whatever
    slot that is. A rate is over the time since the line before.
    """

    def __init__(
        self, log: ServerLog, decode_interval: int, token_capacity: int, graph_label: str
    ) -> None:
        self._log = log
        self._interval = max(1, decode_interval)
        self._capacity = token_capacity
        self._label = graph_label
        self._decodes = 0
        self._generated = 0
        self._last_decode_s: float | None = None
        self._last_prefill_s: float | None = None
        self.gen_throughput = 0.0
        self.running = 0
        self.queue = 0
        self.tokens_used = 0

    def start(self, now_s: float) -> None:
        """The first rates are since now."""
        self._last_decode_s = self._last_prefill_s = now_s

    def record(self, batch: BatchReport) -> None:
        """Take one micro-batch in."""
        if batch.is_prefill:
            self._prefill(batch)
        else:
            self._decode(batch)

    def _prefill(self, batch: BatchReport) -> None:
        rate = _rate(batch.new_tokens, self._last_prefill_s, batch.time_s)
        self._last_prefill_s = batch.time_s
        self._keep(batch)
        self._log.write_rank(
            f"Prefill batch, #new-seq: {batch.new_seqs}, #new-token: {batch.new_tokens}, "
            f"#cached-token: 0, token usage: {self.usage:.2f}, "
            f"#running-req: {batch.running}, #queue-req: {batch.queue}, #pending-token: 0, "
            f"{self._label} graph: {batch.cuda_graph}, input throughput (token/s): {rate:.2f}"
        )

    def _decode(self, batch: BatchReport) -> None:
        self._decodes += 1
        self._generated += batch.running
        if self._decodes % self._interval:
            return
        self.gen_throughput = _rate(self._generated, self._last_decode_s, batch.time_s)
        self._last_decode_s = batch.time_s
        self._generated = 0
        self._keep(batch)
        self._log.write_rank(
            f"Decode batch, #running-req: {batch.running}, #token: {batch.tokens_used}, "
            f"token usage: {self.usage:.2f}, {self._label} graph: {batch.cuda_graph}, "
            f"gen throughput (token/s): {self.gen_throughput:.2f}, #queue-req: {batch.queue}"
        )

    @property
    def usage(self) -> float:
        """Share of the KV cache in use, as of the last line."""
        return self.tokens_used / self._capacity if self._capacity else 0.0

    def _keep(self, batch: BatchReport) -> None:
        self.running = batch.running
        self.queue = batch.queue
        self.tokens_used = batch.tokens_used


def _rate(tokens: int, since_s: float | None, now_s: float) -> float:
    if since_s is None or now_s <= since_s:
        return 0.0
    return tokens / (now_s - since_s)
