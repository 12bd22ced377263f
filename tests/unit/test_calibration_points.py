"""Which measurements a calibration takes, and as which setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from runner.calibration.points import (
    MODEL_DEVIATION,
    Evidence,
    Quantity,
    StudyRecord,
    evidence_of,
    knows_ranks_factor,
)
from runner.calibration.starts import fit_starts, with_idle
from runner.cluster.executor import LaunchReport
from runner.errors import ConfigError
from runner.machine.shape import shape_of
from runner.machine.start import start_phases
from runner.measure.idle import IdleGpu
from runner.trial import LaunchSpec, Outcome, Params, TrialLengths, TrialResult
from tests.calibrating import (
    SETTINGS,
    START,
    measured_rungs,
    measured_trial,
    measured_trials,
    small_study,
)

GRAPH = SETTINGS[0]


def evidence(trials: Sequence[TrialResult]) -> Evidence:
    return evidence_of(START, StudyRecord(small_study(), tuple(trials)))


def test_studies_add_up_and_a_setting_of_both_is_one() -> None:
    trials = measured_trials()
    one = StudyRecord(small_study(), tuple(trials[:4]))
    other = StudyRecord(replace(small_study(), name="other"), tuple(trials[2:]))
    found = evidence_of(START, one, other)
    alone, beside = evidence(trials[:4]), evidence(trials[2:])
    assert [study.name for study in found.studies] == [one.settings.name, "other"]
    assert found.trials == alone.trials + beside.trials
    assert len(found.points) == len(alone.points) + len(beside.points)
    assert len(found.settings) == len(evidence(trials).settings)
    assert len(found.cells) == len(alone.cells) + len(beside.cells)  # each under its own load


def test_every_rung_gives_its_four_numbers() -> None:
    found = evidence(measured_trials())
    assert (len(found.settings), found.trials, len(found.points)) == (6, 6, 6 * 2 * 4)
    assert {point.quantity for point in found.points} == set(Quantity)
    assert {point.cell.level for point in found.points} == {1, 32}
    assert not found.skipped


def test_measurements_of_one_setting_are_points_of_one_cell() -> None:
    again = measured_trial(7, GRAPH, repeat_of=0, resolved={**GRAPH, "max_total_tokens": 400_123})
    first = measured_trial(0, GRAPH, resolved={**GRAPH, "max_total_tokens": 400_000})
    found = evidence([first, again])
    assert len(found.settings) == 1
    assert len(found.points) == 2 * 2 * 4
    assert len(found.cells) == 2


def test_what_was_set_live_is_the_same_as_a_flag() -> None:
    """The search sets a cap on servers with room for 256, a re-measurement starts them with 24."""
    params = {**GRAPH, "max_running_requests": 24}
    live = {**params, "max_running_requests": 256, "pp_max_micro_batch_size": 24}
    flagged = {**params, "pp_max_micro_batch_size": 24, "cuda_graph_max_bs": 24}
    trials = [
        measured_trial(0, params, resolved={**live, "cuda_graph_max_bs": 256}),
        measured_trial(1, params, resolved=flagged, repeat_of=0),
        measured_trial(2, {**GRAPH, "max_running_requests": 256}),
    ]
    found = evidence(trials)
    assert [each.planned.most_running for each in found.settings] == [24, 256]


def test_what_counts() -> None:
    trials = [
        measured_trial(0, GRAPH),
        measured_trial(1, SETTINGS[1], outcome=Outcome.PRUNED, rungs=measured_rungs(GRAPH)[:1]),
        measured_trial(2, SETTINGS[2], outcome=Outcome.INVALID),
        measured_trial(3, SETTINGS[3], shares=0),
    ]
    found = evidence(trials)
    assert {point.trial for point in found.points} == {0, 1}
    assert len([point for point in found.points if point.trial == 1]) == 4


def test_a_setting_of_which_no_rung_counts_is_none() -> None:
    cut = tuple(replace(each, valid=False) for each in measured_rungs(SETTINGS[1]))
    found = evidence([measured_trial(0, GRAPH), measured_trial(1, SETTINGS[1], rungs=cut)])
    assert (len(found.settings), found.trials) == (1, 1)
    found = evidence([measured_trial(1, SETTINGS[1], rungs=cut), measured_trial(2, GRAPH)])
    assert {point.cell.setting for point in found.points} == {0}


@pytest.mark.parametrize(
    ("shapes", "is_known"),
    [
        ([{"tp_size": 2}, {}], False),
        ([{"tp_size": 2, "cuda_graph": False}, {}], False),
        ([{"tp_size": 2}, {"cuda_graph": False}], True),
        ([{"cuda_graph": False}, {}], True),
        ([{}], True),
    ],
)
def test_several_ranks_are_compared_with_one_that_is_eager(
    shapes: list[Params], is_known: bool
) -> None:
    """Where nothing has several ranks their factor is kept for that reason."""
    study = small_study()
    study = replace(study, hardware=replace(study.hardware, gpus=2))
    rungs = measured_rungs(GRAPH)
    trials = [measured_trial(n, {**GRAPH, **each}, rungs=rungs) for n, each in enumerate(shapes)]
    assert knows_ranks_factor(evidence_of(START, StudyRecord(study, tuple(trials)))) is is_known


def test_an_unfair_rung_and_missing_power_are_left_out() -> None:
    high, low = measured_rungs(GRAPH)
    rungs = (replace(high, valid=False), replace(low, power_w=None))
    trials = [measured_trial(number, GRAPH, rungs=rungs) for number in range(2)]
    found = evidence(trials)
    assert {point.cell.level for point in found.points} == {1}
    assert {point.quantity for point in found.points} == set(Quantity) - {Quantity.POWER}


def test_the_setting_is_what_the_servers_resolved_to() -> None:
    resolved = {"attention_backend": "flashinfer", "cuda_graph": False, "device": "cuda"}
    trial = measured_trial(0, {"cuda_graph": True}, resolved=resolved)
    found = evidence([trial])
    shape = found.settings[0].planned.shape
    assert shape.attention_backend == "flashinfer"
    assert not shape.cuda_graph


def test_the_lengths_are_those_of_the_trial() -> None:
    trials = [
        measured_trial(0, GRAPH, lengths=TrialLengths.SEARCH),
        measured_trial(1, GRAPH, lengths=TrialLengths.WORKLOAD),
    ]
    found = evidence(trials)
    assert len(found.settings) == 1
    assert len(found.cells) == 4


def test_a_wide_interval_and_a_metastable_rung_count_less() -> None:
    high, low = measured_rungs(GRAPH)
    halfwidth = 0.2 * high.output_throughput
    rungs = (replace(high, output_throughput_halfwidth=halfwidth), replace(low, metastable=True))
    found = evidence([measured_trial(0, GRAPH, rungs=rungs)])
    rate = {p.cell.level: p for p in found.points if p.quantity is Quantity.THROUGHPUT}
    assert rate[32].deviation == pytest.approx((0.04**2 + (0.2 / 1.96) ** 2) ** 0.5)
    assert rate[1].deviation > 2 * MODEL_DEVIATION[Quantity.THROUGHPUT]


def test_settings_that_by_the_profile_cannot_run_are_counted() -> None:
    trials = [
        measured_trial(0, GRAPH),
        measured_trial(1, GRAPH, resolved={"attention_backend": "fa9"}),
    ]
    found = evidence(trials)
    assert found.trials == 1
    ((reason, count),) = found.skipped.items()
    assert "attention backend fa9" in reason
    assert count == 1


def test_too_few_points_are_said() -> None:
    with pytest.raises(ConfigError, match="no measured rung to calibrate from, 2 are needed"):
        evidence([])
    unheard = [measured_trial(0, GRAPH, resolved={"attention_backend": "fa9"})]
    with pytest.raises(ConfigError, match="1 of its trials cannot run: attention backend fa9"):
        evidence(unheard)


def test_parameters_that_the_model_does_not_know_are_named() -> None:
    trial = measured_trial(0, {**GRAPH, "kv_cache_dtype": "fp8_e5m2"})
    assert evidence([trial]).not_modelled == ("kv_cache_dtype",)


def test_starts_are_scaled_by_the_median_launch() -> None:
    spec = LaunchSpec(0, "k", dict(GRAPH), 1, 1)
    phases = start_phases(START, shape_of(GRAPH)).by_name
    slow = {"import": 1.5, "load_weights": 2.0, "cuda_graph": 1.2}
    report = LaunchReport({n: s * slow.get(n, 1.0) for n, s in phases.items()}, (), (), ())
    outlier = LaunchReport({n: 9 * s for n, s in phases.items()}, (), (), ())
    costs, changes = fit_starts(START, [(spec, report), (spec, report), (spec, outlier)])
    assert costs.import_s == pytest.approx(1.5 * START.start.import_s)
    assert costs.load_bytes_per_s == pytest.approx(START.start.load_bytes_per_s / 2)
    assert costs.graph_size_s == pytest.approx(1.2 * START.start.graph_size_s)
    assert costs.warmup_s == pytest.approx(START.start.warmup_s)
    assert {"start.import_s", "start.load_bytes_per_s"} <= {change.name for change in changes}
    assert fit_starts(START, []) == (START.start, ())


def test_measured_idle_watts_are_taken_where_nobody_else_was() -> None:
    def gpu(power_w: float | None, *pids: int) -> IdleGpu:
        return IdleGpu(0, "u", "n", power_w, None, pids)

    changed = with_idle(START, [gpu(70.0), gpu(None), gpu(300.0, 17)]).gpu
    assert changed.idle_w == 70.0
    extra_w = START.gpu.server_idle_w - START.gpu.idle_w
    assert changed.server_idle_w == pytest.approx(70.0 + extra_w)
    assert with_idle(START, [gpu(None)]) == START
