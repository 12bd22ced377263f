"""Which numbers of a profile may move, and that a written profile reads as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runner.calibration.parameters import Parameter, parameters_of, with_values
from runner.machine.profile import load_profile, profile_names, profile_text

H200 = load_profile("h200-llama-3.1-8b")
KIMI = load_profile("rtx-pro-6000-x8-kimi-k2.6")


def test_what_is_zero_or_absent_stays() -> None:
    names = {parameter.name for parameter in parameters_of(H200, ["fa3"])}
    assert "gpu.tail_w" in names
    assert {"kernels.split_cost", "kernels.batch_s", "model.routing_overlap"}.isdisjoint(names)
    assert "gpu.tail_w" not in {parameter.name for parameter in parameters_of(KIMI, ["triton"])}


def test_only_backends_that_were_measured_can_move() -> None:
    names = {p.name for p in parameters_of(H200, ["fa3", "flashinfer", "unheard-of"])}
    moved = {name for name in names if name.startswith("backends.")}
    assert "backends.flashinfer.sequence_s" in moved
    assert not any("triton" in name or "torch_native" in name for name in moved)


def test_factors_that_compare_backends_leave_one_as_the_unit() -> None:
    names = {p.name for p in parameters_of(H200, ["fa3", "triton", "flashinfer"])}
    assert "backends.triton.eager_factor" not in names, "its 1 is the unit"
    assert {"backends.fa3.eager_factor", "backends.flashinfer.eager_factor"} <= names
    alone = {p.name for p in parameters_of(H200, ["flashinfer"])}
    assert "backends.flashinfer.eager_factor" not in alone
    assert "backends.flashinfer.kv_factor" in alone


def test_numbers_are_replaced_by_their_names() -> None:
    changed = with_values(
        H200, {"gpu.memory_bound_w": 600.0, "host.http_s": 0.01, "backends.fa3.kv_factor": 2.0}
    )
    assert (changed.gpu.memory_bound_w, changed.host.http_s) == (600.0, 0.01)
    assert changed.backends["fa3"].kv_factor == 2.0
    assert changed.backends["triton"] == H200.backends["triton"]
    assert with_values(changed, {}) == changed


def test_a_step_is_a_prior_deviation() -> None:
    cost = Parameter("host.http_s", 0.005, 0.5)
    assert cost.value(0.0) == 0.005
    assert cost.value(1.0) == pytest.approx(0.005 * 1.6487, rel=1e-3)
    share = Parameter("model.routing_overlap", 0.55, 0.5, is_share=True)
    assert share.value(0.0) == 0.55
    assert 0.0 < share.value(-6.0) < 0.55 < share.value(6.0) < 1.0
    for parameter in (cost, share):
        for steps in (-2.5, 0.0, 3.5):
            assert parameter.steps(parameter.value(steps)) == pytest.approx(steps, abs=1e-9)


@pytest.mark.parametrize("name", profile_names())
def test_a_written_profile_reads_as_it_was(name: str, tmp_path: Path) -> None:
    profile = replace(load_profile(name), fit="one: two # three")
    path = tmp_path / "p.yaml"
    path.write_text(profile_text(profile, "made by\nhand: yes"), encoding="utf-8")
    assert load_profile(str(path)) == profile
    assert path.read_text(encoding="utf-8").startswith("# made by\n# hand: yes\nname: ")
