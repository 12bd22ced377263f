from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from runner.config import parse_study
from runner.settings import StudySettings
from runner.space import canonical, enumerate_space, is_active, satisfies
from runner.trial import Params

DEPTH, CAP = "pp_async_batch_depth", "pp_max_micro_batch_size"
PARAMETERS: dict[str, Any] = {
    "tp_size": {"choices": [1, 2, 4, 8]},
    "pp_size": {"choices": [1, 2, 4, 8]},
    DEPTH: {"int": [0, 2], "when": "pp_size > 1"},
    CAP: {"choices": [1, 4], "when": f"{DEPTH} > 0"},
}


def study(
    parameters: dict[str, Any] = PARAMETERS,
    constraints: tuple[str, ...] = (),
    **sections: Any,  # noqa: ANN401
) -> StudySettings:
    engine = {"profile": "any", "args": sections.pop("args", {})}
    document = {"name": "space", "engine": engine, "parameters": parameters, **sections}
    return parse_study({**document, "constraints": list(constraints)})


def test_a_parameter_is_active_where_its_condition_is_true() -> None:
    _, _, depth, cap = study().parameters
    assert is_active(depth, {"pp_size": 2})
    assert not is_active(depth, {"pp_size": 1})
    assert is_active(cap, {"pp_size": 2, DEPTH: 1})
    assert not is_active(cap, {"pp_size": 2, DEPTH: 0})


def test_a_condition_on_an_absent_parameter_is_not_true() -> None:
    _, _, depth, cap = study().parameters
    assert not is_active(depth, {})
    assert not is_active(cap, {"pp_size": 1})


def test_canonical_drops_what_does_not_count_through_a_chain_of_conditions() -> None:
    full: Params = {CAP: 4, DEPTH: 1, "pp_size": 1, "tp_size": 8}
    assert canonical(study(), full) == {"tp_size": 8, "pp_size": 1}
    assert canonical(study(), {**full, "pp_size": 2, DEPTH: 0}) == {
        "tp_size": 8,
        "pp_size": 2,
        DEPTH: 0,
    }


def test_canonical_keeps_names_that_the_study_does_not_declare() -> None:
    params: Params = {"max_running_requests": 64, "pp_size": 1, "tp_size": 8}
    kept = canonical(study(), params)
    assert kept == params
    assert list(kept) == ["tp_size", "pp_size", "max_running_requests"]


def test_constraints_know_gpus_nodes_and_fixed_arguments() -> None:
    settings = study(
        constraints=("tp_size * pp_size <= gpus * nodes", "tp_size <= page_size"),
        hardware={"gpus": 8, "nodes": 1},
        args={"page_size": 4},
    )
    assert satisfies(settings, {"tp_size": 4, "pp_size": 2})
    assert not satisfies(settings, {"tp_size": 8, "pp_size": 1})


def test_a_constraint_that_needs_an_absent_parameter_is_kept() -> None:
    settings = study(constraints=(f"{CAP} > 1",))
    assert satisfies(settings, {"tp_size": 1, "pp_size": 1})
    assert not satisfies(settings, {"tp_size": 1, "pp_size": 2, DEPTH: 1, CAP: 1})


def test_a_server_larger_than_a_node_is_in_no_space() -> None:
    assert not satisfies(study(), {"tp_size": 8, "pp_size": 2})
    assert satisfies(study(hardware={"gpus": 16}), {"tp_size": 8, "pp_size": 2})
    assert not satisfies(study(hardware={"gpus": 8, "nodes": 2}), {"tp_size": 8, "pp_size": 2})


def test_the_space_has_each_setting_once() -> None:
    found = enumerate_space(study(constraints=("tp_size * pp_size == 8",)), limit=100)
    assert found is not None
    # pp 1: one setting; pp 2, 4, 8: depth 0, and depths 1 and 2 with two caps each.
    assert len(found) == 1 + 3 * (1 + 2 * 2)
    assert len({tuple(sorted(params.items())) for params in found}) == len(found)
    assert {"tp_size": 8, "pp_size": 1} in found


def test_a_step_is_counted_from_low() -> None:
    found = enumerate_space(study({"max_queued_requests": {"int": [1, 8], "step": 3}}), limit=9)
    assert found == [{"max_queued_requests": value} for value in (1, 4, 7)]


@pytest.mark.parametrize(
    "parameter",
    [{"float": [0.1, 0.9]}, {"float": [0.1, 0.9], "log": True}],
)
def test_a_continuous_space_is_not_enumerated(parameter: dict[str, Any]) -> None:
    assert enumerate_space(study({"mem_fraction_static": parameter}), limit=100) is None


def test_a_range_of_one_number_is_finite() -> None:
    found = enumerate_space(study({"mem_fraction_static": {"float": [0.5, 0.5]}}), limit=1)
    assert found == [{"mem_fraction_static": 0.5}]


def test_the_limit_is_the_last_size_that_is_listed() -> None:
    settings = study({"max_queued_requests": {"int": [1, 8]}})
    assert enumerate_space(settings, limit=7) is None
    assert len(enumerate_space(settings, limit=8) or ()) == 8


def test_a_search_for_few_settings_in_a_vast_product_gives_up() -> None:
    vast = {f"free_{letter}": {"int": [0, 10**6]} for letter in "abc"}
    settings = study(vast, ("free_a * free_b * free_c == -1 or free_a + free_b == 2000000",))
    assert enumerate_space(settings, limit=10) is None


@hypothesis_settings(max_examples=50, deadline=None)
@given(
    depth_when=st.sampled_from(["pp_size > 1", "tp_size == 1", "pp_size > tp_size", "gpus > 9"]),
    cap_when=st.sampled_from([f"{DEPTH} > 0", f"{DEPTH} < pp_size", "tp_size < 4 and pp_size > 2"]),
    constraint=st.sampled_from(
        ["tp_size * pp_size == 8", f"{CAP} > 1", f"pp_size == 1 or {DEPTH} != 1", "gpus == 8"]
    ),
)
def test_enumeration_is_the_product_filtered(
    depth_when: str, cap_when: str, constraint: str
) -> None:
    parameters = {
        **PARAMETERS,
        DEPTH: {"int": [0, 2], "when": depth_when},
        CAP: {"choices": [1, 4], "when": cap_when},
    }
    settings = study(parameters, (constraint,))
    everything = (
        canonical(settings, {"tp_size": tp, "pp_size": pp, DEPTH: depth, CAP: cap})
        for tp, pp, depth, cap in product((1, 2, 4, 8), (1, 2, 4, 8), (0, 1, 2), (1, 4))
    )
    wanted = {tuple(sorted(p.items())) for p in everything if satisfies(settings, p)}
    found = enumerate_space(settings, limit=1000)
    assert found is not None
    assert len(found) == len(wanted)
    assert {tuple(sorted(params.items())) for params in found} == wanted
