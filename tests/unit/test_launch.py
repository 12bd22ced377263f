from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.config import parse_study
from runner.errors import ConfigError
from runner.launch import highest_of, launch_key, live_cap, plan_launch, spec_hash, world_size
from runner.settings import StudySettings

CAP = "pp_max_micro_batch_size"
LIMIT = "max_running_requests"
CAP_RANGE = {"int": [1, 64], "log": True, "when": "pp_size > 1"}


def study(
    *,
    args: Mapping[str, object] | None = None,
    hardware: Mapping[str, object] | None = None,
    cap: Mapping[str, object] | None = CAP_RANGE,
    baselines: tuple[Mapping[str, object], ...] = (),
) -> StudySettings:
    parameters: dict[str, object] = {
        "tp_size": {"choices": [1, 2, 4, 8]},
        "pp_size": {"choices": [1, 2, 4, 8]},
    }
    if cap is not None:
        parameters[CAP] = cap
    return parse_study(
        {
            "name": "launches",
            "engine": {"profile": "any", "args": dict(args or {})},
            "hardware": dict(hardware or {}),
            "parameters": parameters,
            "baselines": [dict(each) for each in baselines],
        }
    )


def test_every_cap_of_the_range_is_live_on_one_launch() -> None:
    settings = study()
    plans = [plan_launch(settings, {"pp_size": 8, CAP: cap}) for cap in (1, 7, 64)]
    assert [dict(plan.live) for plan in plans] == [{CAP: 1}, {CAP: 7}, {CAP: 64}]
    assert len({plan.key for plan in plans}) == 1
    assert plans[0].server_args == {"pp_size": 8, "max_running_requests": 512}


def test_a_re_measurement_starts_with_all_its_flags() -> None:
    setting = {"pp_size": 8, CAP: 4}
    searched = plan_launch(study(), setting)
    repeated = plan_launch(study(), setting, is_repeat=True)
    assert repeated.live == {}
    assert repeated.server_args == {**searched.server_args, CAP: 4}


def test_the_room_follows_the_number_of_stages() -> None:
    plans = [plan_launch(study(), {"pp_size": pp, CAP: 4}) for pp in (2, 4, 8)]
    assert [plan.server_args["max_running_requests"] for plan in plans] == [128, 256, 512]
    assert len({plan.key for plan in plans}) == 3


def test_a_cap_above_the_range_is_a_launch_argument() -> None:
    plan = plan_launch(study(), {"pp_size": 8, CAP: 65})
    assert plan.live == {}
    assert plan.server_args == {"pp_size": 8, CAP: 65, "max_running_requests": 512}


def test_a_fixed_max_running_requests_limits_the_live_caps() -> None:
    settings = study(args={"max_running_requests": 64})
    at_limit, above = (plan_launch(settings, {"pp_size": 8, CAP: cap}) for cap in (8, 9))
    assert dict(at_limit.live) == {CAP: 8}
    assert at_limit.server_args == {"max_running_requests": 64, "pp_size": 8}
    assert above.live == {}
    assert above.server_args == {"max_running_requests": 64, "pp_size": 8, CAP: 9}


def test_a_searched_max_running_requests_is_left_alone() -> None:
    plan = plan_launch(study(), {"pp_size": 2, CAP: 9, "max_running_requests": 16})
    assert plan.server_args == {"pp_size": 2, CAP: 9, "max_running_requests": 16}


@pytest.mark.parametrize("params", [{"pp_size": 1, CAP: 4}, {"tp_size": 8, CAP: 4}])
def test_without_a_pipeline_the_cap_bounds_what_runs_all_the_same(params: dict[str, int]) -> None:
    plan = plan_launch(study(), params)
    assert plan.live == {CAP: 4}
    assert plan.server_args["max_running_requests"] == 64
    assert plan_launch(study(args={CAP: 4}, cap=None), {"tp_size": 8}).server_args[CAP] == 4


def limited(*, baselines: tuple[Mapping[str, object], ...] = ()) -> StudySettings:
    return parse_study(
        {
            "name": "limits",
            "engine": {"profile": "any"},
            "hardware": {"gpus": 2},
            "parameters": {
                "pp_size": {"choices": [1, 2]},
                "max_running_requests": {"choices": [128, 8, 32]},
            },
            "baselines": [dict(each) for each in baselines],
        }
    )


def test_without_a_pipeline_a_searched_limit_is_set_live_as_a_cap() -> None:
    low, middle, high = (
        plan_launch(limited(), {"pp_size": 1, "max_running_requests": n}) for n in (8, 32, 128)
    )
    assert [dict(plan.live) for plan in (low, middle, high)] == [{LIMIT: 8}, {LIMIT: 32}, {}]
    assert low.key == middle.key == high.key
    assert low.server_args == {"pp_size": 1, "max_running_requests": 128}
    assert low.live_names == {"max_running_requests"}


def test_attention_data_parallelism_shares_the_limit_among_its_ranks() -> None:
    plan = plan_launch(limited(), {"pp_size": 1, "attn_dp_size": 2, "max_running_requests": 8})
    assert plan.live == {}
    assert plan.server_args["max_running_requests"] == 8


def test_a_live_limit_is_clipped_to_what_servers_hold_and_a_cap_is_not() -> None:
    assert live_cap({LIMIT: 400}, 300) == 300
    assert live_cap({LIMIT: 200}, 300) == 200
    assert live_cap({CAP: 400}, 300) == 400
    assert live_cap({}, 300) == 300


def test_a_searched_limit_is_a_flag_where_it_cannot_be_a_cap() -> None:
    """Stages share their rows; re-measurements and baselines are started as asked."""
    asked = {"pp_size": 1, "max_running_requests": 8}
    staged = plan_launch(limited(), {"pp_size": 2, "max_running_requests": 8})
    repeated = plan_launch(limited(), asked, is_repeat=True)
    named = plan_launch(limited(baselines=({"name": "low", **asked},)), asked)
    for plan in (staged, repeated, named):
        assert plan.server_args["max_running_requests"] == 8
        assert plan.live == {}


def test_a_cap_that_is_not_searched_stays_as_it_was_given() -> None:
    settings = study(args={CAP: 4}, cap=None)
    assert plan_launch(settings, {"pp_size": 8}).server_args == {"pp_size": 8, CAP: 4}


def test_what_a_baseline_leaves_out_is_left_to_sglang() -> None:
    bare = {"pp_size": 8}
    capped = {"pp_size": 8, CAP: 4}
    roomy = {"pp_size": 8, CAP: 4, "max_running_requests": 64}
    named = ({"name": "a", **bare}, {"name": "b", **capped}, {"name": "c", **roomy})
    settings = study(baselines=named)
    assert plan_launch(settings, bare).server_args == bare
    assert plan_launch(settings, capped).server_args == capped
    with_room = plan_launch(settings, roomy)
    assert dict(with_room.live) == {CAP: 4}
    assert with_room.server_args == {"pp_size": 8, "max_running_requests": 64}


def test_other_launch_parameters_make_another_launch() -> None:
    graph, eager = (
        plan_launch(study(), {"pp_size": 8, CAP: 4, "cuda_graph": on}) for on in (True, False)
    )
    assert graph.key != eager.key
    assert graph.live == eager.live


def test_fixed_arguments_are_launch_arguments_and_a_setting_overrides_them() -> None:
    settings = study(args={"trust_remote_code": True, "page_size": 16})
    plan = plan_launch(settings, {"tp_size": 8, "page_size": 32})
    assert plan.server_args == {"trust_remote_code": True, "page_size": 32, "tp_size": 8}


def test_replicas_fill_the_gpus() -> None:
    assert plan_launch(study(), {"tp_size": 2}).replicas == 4
    assert plan_launch(study(), {"tp_size": 2, "pp_size": 4}).replicas == 1
    assert plan_launch(study(), {"tp_size": 2, "dp_size": 2}).gpus_per_replica == 4
    odd = study(hardware={"gpus": 6})
    assert plan_launch(odd, {"tp_size": 4}).replicas == 1


def test_a_server_stays_on_one_node() -> None:
    two = study(hardware={"gpus": 8, "nodes": 2})
    assert plan_launch(two, {"tp_size": 3}).replicas == 4  # not 16 // 3
    with pytest.raises(ConfigError, match="a server of 16 GPUs does not fit on the 8"):
        plan_launch(two, {"tp_size": 8, "pp_size": 2})


def test_expert_parallelism_takes_no_gpus_of_its_own_but_a_launch() -> None:
    one, eight = (plan_launch(study(), {"tp_size": 8, "ep_size": ep}) for ep in (1, 8))
    assert one.gpus_per_replica == eight.gpus_per_replica == 8
    assert one.key != eight.key


def test_a_size_that_is_no_whole_number_is_named() -> None:
    with pytest.raises(ConfigError, match="a size must be a whole number, found True"):
        world_size({"tp_size": True})


def test_the_highest_cap_is_that_of_the_search_space() -> None:
    assert highest_of(study(), CAP) == 64
    assert highest_of(study(cap={"choices": [4, 16, 8]}), CAP) == 16
    assert highest_of(study(cap=None), CAP) is None


def test_hashes_do_not_depend_on_the_order_of_names() -> None:
    assert spec_hash({"a": 1, "b": 2}) == spec_hash({"b": 2, "a": 1})
    assert spec_hash({"a": 1}) != spec_hash({"a": True})
    assert launch_key({"a": 1}, 1) != launch_key({"a": 1}, 2)


@given(
    pp=st.sampled_from([1, 2, 4, 8]),
    cap=st.integers(1, 200),
    fixed=st.none() | st.integers(1, 600),
    graph=st.booleans(),
)
def test_live_and_launch_together_are_the_setting(
    pp: int, cap: int, fixed: int | None, graph: bool
) -> None:
    settings = study(args={} if fixed is None else {"max_running_requests": fixed})
    plan = plan_launch(settings, {"pp_size": pp, CAP: cap, "cuda_graph": graph})
    together = {**plan.server_args, **plan.live}
    together.pop("max_running_requests", None)
    assert not set(plan.server_args) & set(plan.live)
    assert together == {"pp_size": pp, "cuda_graph": graph, CAP: cap}
    if plan.live:
        running = plan.server_args["max_running_requests"]
        assert isinstance(running, int)
        assert cap <= running // pp
