"""Lines and counters in the formats of SGLang 0.5.16 to 0.5.23."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner.engines.sglang.batch_words import (
    DecodeWords,
    LateWords,
    Leaders,
    PauseWords,
    Rank,
    RetractWords,
    read_line,
    read_passes,
)

LOG = Path(__file__).parents[1] / "data" / "server_logs" / "http-stops-h200.log"
NEW_SEQS = re.compile(r"Prefill batch, #new-seq: (\d+),")

H200 = (
    "[2026-11-29 13:47:34] Decode batch, #running-req: 12, #token: 279, token usage: 0.07, "
    "cuda graph: True, gen throughput (token/s): 119.49, #queue-req: 3"
)
CPU_PP2 = (
    "[2026-11-29 12:39:49 PP0] Decode batch, #running-req: 1, #token: 47, token usage: 0.01, "
    "cpu graph: False, gen throughput (token/s): 1.58, #queue-req: 0"
)
HYBRID = (
    "[2026-11-29 12:39:49.123 DP1 PP0 ATTN_CP0 TP4 EP4] Decode batch [77], #running-req: 2, "
    "#full token: 10, full token usage: 0.30, #swa token: 5, swa token usage: 0.60, accept len: "
    "1.90, accept rate: 0.63, npu graph: True, gen throughput (token/s): 1.58, #queue-req: 0, "
    "est. decode TFLOPS/s (per GPU): 1.00"
)
RETRACT = (
    "[2026-11-29 12:39:49 PP0] KV cache pool is full. Retract requests. #retracted_reqs: 3, "
    "#aborted_retracted_reqs: 0, #new_token_ratio: 0.4 -> 0.9"
)

PAUSE = (
    "[2026-11-30 05:08:57] LONG GARBAGE COLLECTION DETECTED | Generation 2 | Duration: 0.4545s | "
    "# Objects: gen0=5, gen1=0, gen2=786720 | This may cause latency jitter. Consider calling the "
    "freeze_gc API after sending a few warmup requests."
)


LATE = (
    "[2026-11-30 05:08:57] The emulation is behind its schedule by 60.0 ms of real time on "
    "average, 35% of a token's time; a smaller --time-scale gives it more time."
)


@pytest.mark.parametrize(
    ("text", "rank", "words"),
    [
        (PAUSE, Rank(0, 0), PauseWords(0.4545)),
        (PAUSE.replace("57]", "57 DP1 TP2]"), Rank(1, 2), PauseWords(0.4545)),
        (LATE, Rank(0, 0), LateWords(0.35)),
        ("[2026-11-30 05:08:57] The emulation has caught up.", Rank(0, 0), LateWords(0.0)),
        (H200, Rank(0, 0), DecodeWords(12, 3, True, 0.07)),
        (CPU_PP2, Rank(0, 0), DecodeWords(1, 0, False, 0.01)),
        (CPU_PP2.replace("PP0", "PP0 TP3"), Rank(0, 3), DecodeWords(1, 0, False, 0.01)),
        (HYBRID, Rank(1, 4), DecodeWords(2, 0, True, 0.6)),
        (
            "[2026-11-29 12:39:49] Decode batch, #running-req: 5, token usage: nan, cuda graph: ?",
            Rank(0, 0),
            DecodeWords(5, None, None, None),
        ),
        (RETRACT, Rank(0, 0), RetractWords(3)),
    ],
)
def test_what_a_line_says(text: str, rank: Rank, words: DecodeWords | RetractWords) -> None:
    assert read_line(text) == (rank, words)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[2026-11-29 12:39:47 PP0] Prefill batch, #new-seq: 1, #running-req: 0, #queue-req: 0",
        "[2026-11-29 12:39:47] a request said: Decode batch, #running-req: 99",
        "Decode batch, #running-req: 99, #queue-req: 1",
        CPU_PP2.replace("PP0", "PP1"),
        "h, #running-req: 99, cuda graph: True, #queue-req: 0",
        "[2026-11-29 12:39:47 PP0] Decode batch, #running-req: many",
        "[2026-11-29 12:39:47 PP0] KV cache pool is full. Retract requests.",
    ],
)
def test_other_lines_and_parts_of_lines_say_nothing(text: str) -> None:
    assert read_line(text) is None


def largest_prefill(lines: list[str]) -> int:
    return max(int(found[1]) for line in lines if (found := NEW_SEQS.search(line)))


def test_a_server_that_stops_while_its_scheduler_goes_on() -> None:
    """Cut from the log of an H200 with 128 streams: three stops of its HTTP process.

    Replies end meanwhile and nobody takes their places; then all new prompts come at once.
    """
    lines = LOG.read_text().splitlines()
    told = [found[1] for line in lines if (found := read_line(line)) is not None]
    pauses = [words.paused_s for words in told if isinstance(words, PauseWords)]
    assert pauses == [0.4133, 0.4287, 0.4384]
    running = [words.running if isinstance(words, DecodeWords) else -1 for words in told]
    assert running[: running.index(-1)][-5:] == [57, 53, 44, 35, 28]
    first = next(place for place, line in enumerate(lines) if "GARBAGE" in line)
    assert largest_prefill(lines[:first]) == 1
    assert largest_prefill(lines[first:]) == 32


def test_the_first_rank_speaks_for_each_data_parallel_rank() -> None:
    leaders = Leaders()
    asked = [(0, 0), (0, 1), (1, 5), (1, 4), (1, 5), (1, 4)]
    said = [leaders.is_leader(Rank(*each)) for each in asked]
    assert said == [True, False, True, True, False, True]


def passes(mode: str, value: str, **labels: str) -> str:
    named = {"engine_type": "unified", "mode": mode, "model_name": "/m, {x}", **labels}
    inside = ",".join(f'{name}="{text}"' for name, text in sorted(named.items()))
    return f"sglang:cuda_graph_passes_total{{{inside}}} {value}"


FIRST = {"pp_rank": "0", "tp_rank": "0"}
SECOND = {"pp_rank": "1", "tp_rank": "0"}


def test_counters_of_the_first_rank_alone() -> None:
    text = "\n".join(
        (
            "# HELP sglang:cuda_graph_passes_total Total number of forward passes.",
            "# TYPE sglang:cuda_graph_passes_total counter",
            passes("prefill_none", "3.0", **SECOND),
            passes("decode_none", "9.0", **SECOND),
            passes("prefill_cuda_graph", "45.0", **FIRST),
            passes("decode_cuda_graph", "3165.0", **FIRST),
            passes("decode_none", "9.0", **FIRST),
            'sglang:num_running_reqs{pp_rank="0",tp_rank="0"} 1.0',
        )
    )
    assert read_passes(text) == {0: (3165, 9)}


def test_a_mode_that_never_ran_is_zero_and_other_names_of_graphs_are_graphs() -> None:
    assert read_passes(passes("decode_cuda_graph", "7.0", **FIRST)) == {0: (7, 0)}
    assert read_passes(passes("prefill_none", "7.0", **FIRST)) == {0: (0, 0)}
    text = "\n".join(
        passes(mode, "1e3", **FIRST)
        for mode in ("decode_full", "decode_breakable", "decode_eager", "decode_none")
    )
    assert read_passes(text) == {0: (2000, 2000)}


def test_each_data_parallel_rank_has_its_own_counters() -> None:
    text = "\n".join(
        passes("decode_none", value, pp_rank="0", dp_rank=dp, tp_rank=tp)
        for dp, tp, value in (("0", "0", "1"), ("0", "1", "2"), ("1", "5", "3"), ("1", "4", "4"))
    )
    assert read_passes(text) == {0: (0, 1), 1: (0, 4)}


@pytest.mark.parametrize(
    "text", ["", "<html>busy</html>", "sglang:cuda_graph_passes_total 1.0", "# nothing"]
)
def test_no_counters_are_none(text: str) -> None:
    assert read_passes(text) == {}


def test_a_value_that_is_no_count_counts_nothing() -> None:
    assert read_passes(passes("decode_none", "NaN", **FIRST)) == {0: (0, 0)}
