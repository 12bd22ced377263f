"""The emulated server's log: SGLang's lines, in SGLang's formats.

Dates are real ones; durations and rates are in emulated seconds. SGLang writes one process per
rank; here one process writes the lines of all the ranks it stands for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from runner.pipeline import BatchReport


@dataclass(frozen=True, slots=True)
class Ranks:
    """The sizes that decide which ranks a line names: a dimension of size 1 is not written."""

    pp_size: int
    tp_size: int
    ep_size: int
    dp_size: int = 1

    def prefix(self, pp_rank: int, tp_rank: int, dp_rank: int = 0) -> str:
        """What follows the date for this rank, e.g. " PP3 TP0"."""
        words = []
        if self.dp_size > 1:
            words.append(f" DP{dp_rank}")
        if self.pp_size > 1:
            words.append(f" PP{pp_rank}")
        if self.tp_size > 1:
            words.append(f" TP{tp_rank}")
        if self.ep_size > 1:
            words.append(f" EP{tp_rank * self.ep_size // self.tp_size}")
        return "".join(words)


class Output:
    """Where lines go: a file descriptor, each at once and whole."""

    def __init__(self, descriptor: int) -> None:
        self.is_silent = False
        self._descriptor = descriptor
        self._second = -1
        self._date = ""

    def write(self, text: str) -> None:
        """Write all of it, unless nothing is to be written any more."""
        rest = b"" if self.is_silent else text.encode()
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BrokenPipeError:  # nobody reads the log any more; the server goes on
            return

    def date(self) -> str:
        """Date and time as SGLang writes them."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return self._date


class ServerLog:
    """Writes the lines of a server, or of one replica of it, by default to stderr."""

    def __init__(self, ranks: Ranks, descriptor: int = 2) -> None:
        self.ranks = ranks
        self._dp_ranks: Sequence[int] = range(ranks.dp_size)
        self._output = Output(descriptor)

    def of(self, dp_rank: int) -> ServerLog:
        """The same log for one replica: its lines of ranks are that replica's."""
        log = ServerLog(self.ranks)
        log._dp_ranks = (dp_rank,)
        log._output = self._output
        return log

    def write(self, text: str) -> None:
        """A line of the main process."""
        self._output.write(f"[{self._output.date()}] {text}\n")

    def write_rank(self, text: str, pp_rank: int = 0, tp_rank: int = 0) -> None:
        """A line of one scheduler."""
        prefix = self.ranks.prefix(pp_rank, tp_rank, self._dp_ranks[0])
        self._output.write(f"[{self._output.date()}{prefix}] {text}\n")

    def write_ranks(self, text: str) -> None:
        """The same line of every scheduler."""
        self._write_all(text, range(self.ranks.tp_size))

    def write_stages(self, text: str) -> None:
        """The same line of the first scheduler of every stage."""
        self._write_all(text, (0,))

    def write_raw(self, text: str) -> None:
        """Text without a date, such as a traceback."""
        self._output.write(text + "\n")

    def _write_all(self, text: str, tp_ranks: Sequence[int]) -> None:
        """In one piece: these are written while tokens wait."""
        now, ranks = self._output.date(), self.ranks
        lines = [
            f"[{now}{ranks.prefix(pp_rank, tp_rank, dp_rank)}] {text}\n"
            for dp_rank in self._dp_ranks
            for pp_rank in range(ranks.pp_size)
            for tp_rank in tp_ranks
        ]
        self._output.write("".join(lines))

    def silence(self) -> None:
        """Write nothing any more, also not for the replicas."""
        self._output.is_silent = True


class BatchLog:
    """Logs micro-batches as the schedulers do, and keeps the gauges that follow.

    The first scheduler of every stage writes its line. Every prefill is logged; of all slots'
    decodes together every `decode_interval`-th, whatever slot that is. A rate is over the time
    since the line before.
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
        self.pending_tokens = 0

    def start(self, now_s: float) -> None:
        """The first rates are since now."""
        self._last_decode_s = self._last_prefill_s = now_s

    def reset(self) -> None:
        """Count anew, as a flush of the cache does."""
        self._decodes = self._generated = 0

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
        self._log.write_stages(
            f"Prefill batch, #new-seq: {batch.new_seqs}, #new-token: {batch.new_tokens}, "
            f"#cached-token: {batch.cached_tokens}, token usage: {self.usage:.2f}, "
            f"#running-req: {batch.running}, #queue-req: {batch.queue}, "
            f"#pending-token: {batch.pending_tokens}, "
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
        self._log.write_stages(
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
        self.pending_tokens = batch.pending_tokens
        self.tokens_used = batch.tokens_used


def _rate(tokens: int, since_s: float | None, now_s: float) -> float:
    if since_s is None or now_s <= since_s:
        return 0.0
    return tokens / (now_s - since_s)
