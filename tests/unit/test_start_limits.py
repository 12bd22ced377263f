"""How long a start may take, phase by phase, and which phase its log says it is in."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runner.engines.sglang.logs import PhaseTimes
from runner.engines.sglang.start_limits import (
    PHASE_LIMITS,
    WATCHDOG_TIMEOUT_S,
    PhaseLimit,
    limits_for,
    with_allowance,
)


def phase_after(*lines: str) -> str:
    phases = PhaseTimes(started_s=0.0)
    for line in lines:
        phases.note(line, 1.0)
    return phases.current()


def said(text: str, *ranks: str) -> list[str]:
    return [f"[2026-03-04 09:11:08 {rank}] {text}" for rank in ranks]


BEGIN, END = "Load weight begin. avail mem=1.00 GB", "Load weight end. elapsed=2.00 s"
POOL = "Memory pool end. avail mem=1.00 GB"
CAPTURE = "Capture target decode CUDA graph begin. backend=full"
CAPTURED = "Capture target decode CUDA graph end. bs=[1, 2], elapsed=2.00 s"
PREFILL = "Capture target prefill CUDA graph begin."
PREFILLED = "Capture target prefill CUDA graph end."
SIZES = "max_total_num_tokens=8192, chunked_prefill_size=4096"


def test_every_phase_has_a_limit() -> None:
    phases = [phase_after(*lines) for lines in STARTS.values()]
    assert set(phases) == set(PHASE_LIMITS)


def test_the_warm_up_ends_before_sglangs_watchdog_can_be_late() -> None:
    assert PHASE_LIMITS["warmup"].most_s < 1.5 * WATCHDOG_TIMEOUT_S


def test_a_load_may_take_hours_while_it_progresses() -> None:
    slowest_bytes_per_s = 548e9 / PHASE_LIMITS["load_weights"].most_s
    assert slowest_bytes_per_s < 25e6
    assert PHASE_LIMITS["load_weights"].quiet_s <= 900.0


STARTS: dict[str, Sequence[str]] = {
    "import": (),
    "init": said("Init parallel begin.", "PP0"),
    "load_weights": said(BEGIN, "PP0", "PP1"),
    "kv_cache": [*said(BEGIN, "PP0"), *said(END, "PP0")],
    "cuda_graph": [*said(BEGIN, "PP0"), *said(END, "PP0"), *said(POOL, "PP0")],
    "warmup": said(SIZES, "PP0"),
}


@pytest.mark.parametrize(("phase", "lines"), STARTS.items())
def test_the_log_tells_the_phase(phase: str, lines: Sequence[str]) -> None:
    assert phase_after(*lines) == phase


def test_a_phase_lasts_until_its_last_rank_has_ended_it() -> None:
    loading = [*said(BEGIN, "PP0 TP0", "PP0 TP1", "PP1 TP0"), *said(END, "PP0 TP0", "PP1 TP0")]
    assert phase_after(*loading) == "load_weights"
    assert phase_after(*loading, *said(END, "PP0 TP1")) == "kv_cache"
    capturing = [*said(CAPTURE, "PP0", "PP1"), *said(CAPTURED, "PP0"), *said(SIZES, "PP0")]
    assert phase_after(*capturing) == "cuda_graph"
    assert phase_after(*capturing, *said(CAPTURED, "PP1"), *said(SIZES, "PP1")) == "warmup"


def test_a_second_capture_or_load_opens_the_phase_again() -> None:
    first = [*said(PREFILL, "TP0"), *said(PREFILLED, "TP0")]
    assert phase_after(*first, *said(CAPTURE, "TP0")) == "cuda_graph"
    drafted = [*said(BEGIN, "TP0"), *said(END, "TP0"), *said(POOL, "TP0"), *said(BEGIN, "TP0")]
    assert phase_after(*drafted) == "load_weights"


def test_an_open_port_ends_all_but_the_warm_up() -> None:
    lost = said(CAPTURE, "TP0", "TP1")  # a rank's last line may be lost in its buffer
    port = "[2026-03-04 09:11:08] INFO:     Uvicorn running on http://127.0.0.1:22001"
    assert phase_after(*lost, port) == "warmup"


@pytest.mark.parametrize(("timeout", "factor"), [(None, 1), (30, 1), (300, 1), (900, 3), (True, 1)])
def test_a_patient_watchdog_makes_the_warm_up_patient(timeout: int | None, factor: int) -> None:
    args = {} if timeout is None else {"watchdog_timeout": timeout}
    limits = limits_for(PHASE_LIMITS, args)
    usual = PHASE_LIMITS["warmup"]
    assert limits["warmup"] == PhaseLimit(factor * usual.most_s, factor * usual.quiet_s)
    assert limits["init"] == PHASE_LIMITS["init"]


def test_an_allowance_is_added_to_every_limit() -> None:
    assert with_allowance({"init": PhaseLimit(10.0, 5.0)}, 3.0) == {"init": PhaseLimit(13.0, 8.0)}
