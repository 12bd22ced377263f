from __future__ import annotations

import pytest

from runner.study_file.server_args import (
    ALIASES,
    KNOWN,
    LOOKALIKES,
    OWNED,
    name_mistake,
    settle,
    value_mistake,
)
from runner.trial import ParamValue


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("tp_size", 8, None),
        ("tp_size", 0, "a whole number, 1 or more"),
        ("tp_size", True, "a whole number, 1 or more"),
        ("tp_size", 8.0, "a whole number, 1 or more"),
        ("tp_size", "8", "a whole number, 1 or more"),
        ("pp_async_batch_depth", 0, None),
        ("pp_async_batch_depth", -1, "a whole number between 0 and 1024"),
        ("pp_max_micro_batch_size", 0, "a whole number, 1 or more"),
        ("chunked_prefill_size", -1, None),
        ("chunked_prefill_size", -2, "a whole number, -1 or more"),
        ("mem_fraction_static", 0.88, None),
        ("mem_fraction_static", 1, "a number between 0 and 1"),
        ("mem_fraction_static", 0.0, "a number between 0 and 1"),
        ("watchdog_timeout", 300, None),
        ("watchdog_timeout", 0, "a number above 0"),
        ("cuda_graph", False, None),
        ("cuda_graph", 1, "true or false"),
        ("attention_backend", "triton", None),
        ("attention_backend", True, "text"),
        ("cpu_offload_gb", -5, None),
        ("a_flag_of_next_year", 5, None),
    ],
)
def test_types_and_limits(name: str, value: ParamValue, allowed: str | None) -> None:
    assert value_mistake(name, value) == allowed


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("tp_sise", "tp_size"),
        ("tp-size", "tp_size"),
        ("TP_SIZE", "tp_size"),
        ("max_running_request", "max_running_requests"),
        ("atention_backend", "attention_backend"),
        ("cuda_graphs", "cuda_graph"),
        ("pp_max_microbatch_size", "pp_max_micro_batch_size"),
    ],
)
def test_a_slip_of_the_pen_is_answered_with_the_name(name: str, close: str) -> None:
    mistake = name_mistake(name)
    assert mistake is not None
    assert f"did you mean {close!r}?" in mistake


def test_a_name_far_from_all_is_passed_through() -> None:
    assert name_mistake("kt_num_gpu_experts") is None


def test_other_spellings_and_names_of_this_program_are_refused() -> None:
    assert name_mistake("tp") == "'tp' is written 'tp_size' here"
    assert name_mistake("disable_cuda_graph") == "'disable_cuda_graph' is written 'cuda_graph' here"
    assert "leave it out" in str(name_mistake("base_gpu_id"))
    assert "engine.model" in str(name_mistake("model_path"))


def test_the_tables_do_not_contradict_each_other() -> None:
    assert all(name_mistake(name) is None for name in {*KNOWN, *LOOKALIKES})
    assert not set(KNOWN) & (set(ALIASES) | OWNED | LOOKALIKES)
    assert set(ALIASES.values()) <= set(KNOWN)


def test_a_real_number_stays_one_however_it_is_written() -> None:
    assert type(settle("schedule_conservativeness", 1)) is float
    assert type(settle("tp_size", 1)) is int
    assert settle("cuda_graph", value=True) is True
    assert type(settle("unheard_of", 1)) is int
