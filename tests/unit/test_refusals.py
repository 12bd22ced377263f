"""What is known not to run before a launch, and what a search says that found nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runner.errors import ConfigError
from runner.expression import Expression
from runner.forecast.refusals import check_runnable, known_refusal
from runner.machine.shape import RefusalKind
from runner.search.stuck import stuck_words, unmeasured_after
from runner.settings import Baseline, Choices, FloatRange, StudySettings
from runner.trial import EngineKind, Outcome, Params
from tests.samples import make_result, make_settings

TOO_SMALL = (Choices("tp_size", (1, 2)), FloatRange("mem_fraction_static", 0.5, 0.9))


def of_kind(kind: EngineKind, args: Params) -> StudySettings:
    settings = make_settings()
    return replace(settings, engine=replace(settings.engine, kind=kind, args=args))


@pytest.mark.parametrize(
    ("kind", "args", "expected"),
    [
        (EngineKind.SIMULATED, {"tp_size": 1}, RefusalKind.MEMORY),
        (EngineKind.EMULATED, {"tp_size": 1}, RefusalKind.MEMORY),
        (EngineKind.SGLANG, {"tp_size": 1}, None),
        (EngineKind.SIMULATED, {"tp_size": 8}, None),
        (EngineKind.SIMULATED, {"tp_size": 2, "ep_size": 8}, RefusalKind.EXPERTS),
        (EngineKind.SGLANG, {"tp_size": 2, "ep_size": 8}, RefusalKind.EXPERTS),
        (EngineKind.SGLANG, {"tp_size": 2, "ep_size": 8, "moe_a2a_backend": "deepep"}, None),
        (EngineKind.SGLANG, {"pp_size": 2, "moe_dp_size": 2}, RefusalKind.VERSION),
    ],
)
def test_what_is_known_of_a_setting(
    kind: EngineKind, args: Params, expected: RefusalKind | None
) -> None:
    refusal = known_refusal(of_kind(kind, args))({})
    assert (refusal.kind if refusal else None) is expected


def test_memory_is_not_known_where_a_flag_of_graphs_may_free_it() -> None:
    """The profile takes graphs for granted that an emulated server leaves out."""
    known = known_refusal(of_kind(EngineKind.EMULATED, {"disable_decode_cuda_graph": True}))
    assert known({"tp_size": 1}) is None
    assert known({"tp_size": 16}) is not None


def test_study_of_which_nothing_can_run_is_refused() -> None:
    settings = make_settings(hardware=replace(make_settings().hardware, gpus=16))
    with pytest.raises(ConfigError, match=r"4 x not enough GPUs: .*hardware\.gpus is 16") as caught:
        check_runnable(settings)
    assert "pp8-auto" not in str(caught.value)


def test_sample_of_an_endless_space_says_it_too() -> None:
    with pytest.raises(ConfigError, match="2000 x out of memory"):
        check_runnable(make_settings(parameters=TOO_SMALL, baselines=()))


def test_space_without_a_setting_is_refused() -> None:
    constraints = (Expression("tp_size > 8"),)
    with pytest.raises(ConfigError, match="keeps its constraints and fits on 8 GPUs"):
        check_runnable(make_settings(constraints=constraints, baselines=()))


def test_one_baseline_that_may_run_is_enough() -> None:
    check_runnable(
        make_settings(parameters=TOO_SMALL, baselines=(Baseline("tp8", {"tp_size": 8}),))
    )


def test_losses_and_re_measurements_are_no_trials_in_a_row() -> None:
    infeasible = make_result(0, None, outcome=Outcome.INFEASIBLE)
    row = unmeasured_after((), infeasible)
    assert unmeasured_after(row, make_result(1, None, outcome=Outcome.LOST)) == row
    assert unmeasured_after(row, make_result(1, None, repeat_of=0)) == row
    assert unmeasured_after(row, make_result(1, 5.0, outcome=Outcome.PRUNED)) == ()


def test_stuck_search_names_each_reason_once_with_its_count() -> None:
    reasons = [
        "no room for 5.5 GB",
        "refused a flag",
        "no room for 17 GB\nmore",
        "no room for 1 GB",
    ]
    row = [
        make_result(n, None, outcome=Outcome.INFEASIBLE, reason=reason)
        for n, reason in enumerate(reasons)
    ]
    lines = stuck_words(row).splitlines()
    assert lines[0] == "4 trials in a row could not be measured, so the search has stopped:"
    assert lines[1].startswith("  3 x infeasible, as #0: ")
    assert lines[1].endswith(": no room for 5.5 GB")
    assert lines[2].startswith("  1 x infeasible, as #1: ")
    assert "constraint" in lines[3]
