"""Log lines in SGLang's formats."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from runner.engines.emulator.log import BatchLog, Ranks, ServerLog
from runner.pipeline import BatchReport

DATE = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")


class Capture:
    """A log that writes into a pipe."""

    def __init__(self, ranks: Ranks) -> None:
        self._reader, self._writer = os.pipe()
        self.log = ServerLog(ranks, self._writer)

    def lines(self) -> list[str]:
        """What was written since the last call, each line's date replaced by [DATE."""
        self.log.write("end")
        text = os.read(self._reader, 1 << 16).decode()
        return [DATE.sub("[DATE", line) for line in text.splitlines()[:-1]]

    def close(self) -> None:
        os.close(self._writer)
        os.close(self._reader)


@pytest.fixture
def capture() -> Iterator[Capture]:
    capture = Capture(Ranks(pp_size=2, tp_size=1, ep_size=1))
    yield capture
    capture.close()


def prefill(time_s: float, tokens: int = 16) -> BatchReport:
    return BatchReport(
        time_s, 0, is_prefill=True, new_seqs=2, new_tokens=tokens, running=1, queue=3,
        cuda_graph=False, tokens_used=164, cached_tokens=30, pending_tokens=48,
    )  # fmt: skip


def decode(time_s: float, running: int = 4) -> BatchReport:
    return BatchReport(
        time_s, 0, is_prefill=False, new_seqs=0, new_tokens=0, running=running, queue=12,
        cuda_graph=True, tokens_used=819,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "prefix"),
    [
        (Ranks(1, 1, 1), ""),
        (Ranks(8, 1, 1), " PP3"),
        (Ranks(1, 8, 1), " TP5"),
        (Ranks(4, 8, 1), " PP3 TP5"),
        (Ranks(1, 8, 8), " TP5 EP5"),
        (Ranks(1, 8, 4), " TP5 EP2"),
    ],
)
def test_a_rank_names_only_dimensions_above_one(ranks: Ranks, prefix: str) -> None:
    assert ranks.prefix(3, 5) == prefix


def test_replicas_are_named_first(capture: Capture) -> None:
    ranks = Ranks(pp_size=2, tp_size=1, ep_size=1, dp_size=2)
    assert ranks.prefix(1, 0, 1) == " DP1 PP1"
    capture.log.ranks = ranks
    capture.log.of(1).write_stages("x")
    assert capture.lines() == ["[DATE DP1 PP0] x", "[DATE DP1 PP1] x"]


def test_lines_of_the_main_process_and_of_all_ranks(capture: Capture) -> None:
    capture.log.write("hello")
    capture.log.write_ranks("Init parallel begin.")
    capture.log.write_raw("ValueError: x")
    assert capture.lines() == [
        "[DATE] hello",
        "[DATE PP0] Init parallel begin.",
        "[DATE PP1] Init parallel begin.",
        "ValueError: x",
    ]


def test_a_prefill_line(capture: Capture) -> None:
    batches = BatchLog(capture.log, 40, 8192, "cpu")
    batches.start(10.0)
    batches.record(prefill(12.0))
    first, second = capture.lines()
    assert first == (
        "[DATE PP0] Prefill batch, #new-seq: 2, #new-token: 16, #cached-token: 30, token usage: "
        "0.02, #running-req: 1, #queue-req: 3, #pending-token: 48, cpu graph: False, "
        "input throughput (token/s): 8.00"
    )
    assert second == first.replace("PP0", "PP1")


def test_a_decode_line_counts_the_tokens_since_the_line_before(capture: Capture) -> None:
    batches = BatchLog(capture.log, 2, 8190, "cuda")
    batches.start(10.0)
    for number, running in enumerate((4, 3, 2, 1), start=1):
        batches.record(decode(10.0 + number, running))
    first, other_stage, second, _ = capture.lines()
    assert other_stage == first.replace("PP0", "PP1")
    assert first == (
        "[DATE PP0] Decode batch, #running-req: 3, #token: 819, token usage: 0.10, cuda graph: "
        "True, gen throughput (token/s): 3.50, #queue-req: 12"
    )
    assert second == first.replace("req: 3,", "req: 1,").replace("3.50", "1.50")
    assert batches.gen_throughput == 1.5


def test_only_decodes_count_towards_the_interval(capture: Capture) -> None:
    batches = BatchLog(capture.log, 2, 8190, "cuda")
    batches.record(decode(1.0))
    batches.record(prefill(2.0))
    batches.record(prefill(3.0))
    batches.record(decode(4.0))
    kinds = [line.split()[2] for line in capture.lines() if "PP0" in line]
    assert kinds == ["Prefill", "Prefill", "Decode"]


def test_a_log_that_nobody_reads_stops_nobody() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ServerLog(Ranks(1, 1, 1), writer).write("lost")
    os.close(writer)
