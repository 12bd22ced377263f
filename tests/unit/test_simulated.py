"""Simulated servers: the contract of RunningServers, and exactness."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from runner.engines.simulated import SimulatedServers, place_on_clock
from runner.errors import ConfigError, Infeasible
from runner.launch import plan_launch
from runner.measure.evidence import evidence_of
from runner.measure.metrics import judge_rung
from runner.plans import rung_plans, warmup_plan
from runner.run_trial import run_trial
from runner.settings import StudySettings
from runner.trial import (
    Arrivals,
    LaunchSpec,
    Lengths,
    LoadPlan,
    LoadProtocol,
    LoadRun,
    Measurement,
    Params,
    RequestStatus,
    RungRecord,
    RunningServers,
    TrialSpec,
)
from runner.verdict import RungKeeper
from tests.samples import make_settings

SETTINGS = make_settings()
PP8: Params = {"tp_size": 1, "pp_size": 8, "pp_async_batch_depth": 8, "cuda_graph": True}
CPU = replace(
    SETTINGS,
    engine=replace(SETTINGS.engine, profile="cpu-blocking-pp2"),
    hardware=replace(SETTINGS.hardware, gpus=2),
)
CPU_PP2: Params = {"pp_size": 2, "pp_async_batch_depth": 2, "max_running_requests": 16}


def servers_of(params: Params, settings: StudySettings = SETTINGS) -> SimulatedServers:
    plan = plan_launch(settings, params)
    launch = LaunchSpec(1, plan.key, plan.server_args, plan.replicas, plan.gpus_per_replica)
    return SimulatedServers(settings, launch)


def make_plan(**changes: object) -> LoadPlan:
    plan = LoadPlan(
        phase="rung-0-0",
        protocol=LoadProtocol.CLOSED_LOOP,
        concurrency=8,
        prompt_tokens=Lengths.fixed(16),
        output_tokens=Lengths("uniform", 10, 30),
        seed=7,
        min_window_s=0.5,
        max_window_s=3.0,
    )
    return replace(plan, **changes)  # type: ignore[arg-type] # any field of LoadPlan


def judged(servers: SimulatedServers, plan: LoadPlan) -> RungRecord:
    load = servers.run_load(plan)
    power = servers.read_power(load.window_start_s, load.window_end_s)
    return RungRecord(0, plan.concurrency, (load,), power)


def test_a_closed_loop_keeps_its_requests_in_flight() -> None:
    rung = judged(servers_of(CPU_PP2, CPU), make_plan())
    result = judge_rung(rung, (), make_plan())
    assert result.valid, result.reasons
    assert result.achieved_concurrency == pytest.approx(8, rel=0.05)
    assert result.window_s >= 0.5
    cut = [record for record in rung.loads[0].records if record.status is RequestStatus.CUT]
    assert len(cut) == 8


def test_records_add_up() -> None:
    load = servers_of(CPU_PP2, CPU).run_load(make_plan())
    for record in load.records:
        assert record.output_tokens == len(record.token_s)
        times_s = [record.send_s, *record.token_s]
        assert all(a < b for a, b in pairwise(times_s))
        if record.status is RequestStatus.OK:
            assert record.output_tokens == record.wanted_tokens
            assert (record.first_token_s, record.end_s) == (record.token_s[0], record.token_s[-1])


def test_requests_are_dealt_to_the_replicas_in_turn() -> None:
    servers = servers_of({"pp_size": 1, "max_running_requests": 16}, CPU)
    load = servers.run_load(make_plan(concurrency=3, is_warmup=True))
    assert [record.replica for record in load.records] == [0, 1, 0]


def test_a_data_parallel_server_deals_to_its_engines() -> None:
    servers = servers_of({"dp_size": 2, "max_running_requests": 1}, CPU)
    load = servers.run_load(make_plan(concurrency=2, is_warmup=True))
    assert {record.replica for record in load.records} == {0}
    first, second = load.records
    assert second.token_s[0] < first.token_s[-1], "one engine would serve one after the other"


@pytest.mark.parametrize("changes", [{"is_warmup": True}, {"protocol": LoadProtocol.BURST}])
def test_warmup_and_burst_send_each_stream_one_request(changes: dict[str, object]) -> None:
    load = servers_of(CPU_PP2, CPU).run_load(make_plan(**changes))
    assert [record.status for record in load.records] == [RequestStatus.OK] * 8
    assert load.is_steady
    assert load.window_end_s == max(record.end_s for record in load.records)


def test_an_open_loop_sends_at_its_rate() -> None:
    plan = make_plan(
        protocol=LoadProtocol.OPEN_LOOP, rate=40.0, min_window_s=5.0, max_window_s=20.0
    )
    load = servers_of(CPU_PP2, CPU).run_load(plan)
    sent = [r for r in load.records if load.window_start_s < r.send_s <= load.window_end_s]
    assert len(sent) / (load.window_end_s - load.window_start_s) == pytest.approx(40.0, rel=0.25)


def test_a_shared_prefix_is_served_from_the_cache() -> None:
    plan = make_plan(shared_prefix=0.5)
    load = servers_of(CPU_PP2, CPU).run_load(plan)
    assert {record.cached_tokens for record in load.records if record.token_s} == {8}
    without = servers_of({**CPU_PP2, "disable_radix_cache": True}, CPU).run_load(plan)
    assert {record.cached_tokens for record in without.records} == {0}


def test_power_is_sampled_on_every_gpu_around_the_window() -> None:
    servers = servers_of(PP8)
    rung = judged(servers, make_plan(concurrency=4))
    by_gpu = {
        uuid: [s for s in rung.power if s.gpu_uuid == uuid]
        for uuid in (f"GPU-sim-{index}" for index in range(8))
    }
    assert sum(len(samples) for samples in by_gpu.values()) == len(rung.power)
    for samples in by_gpu.values():
        assert samples[0].time_s <= rung.loads[0].window_start_s
        assert samples[-1].time_s >= rung.loads[0].window_end_s
        gaps_s = [b.time_s - a.time_s for a, b in pairwise(samples)]
        assert gaps_s == pytest.approx([0.1] * len(gaps_s))
        assert all(88.0 <= (s.power_w or 0.0) <= 600.0 for s in samples)
        energies_j = [s.energy_j or 0.0 for s in samples]
        assert energies_j == sorted(energies_j)


def test_energy_counters_do_not_fall_from_rung_to_rung() -> None:
    servers = servers_of(CPU_PP2, CPU)
    first = judged(servers, make_plan())
    second = judged(servers, make_plan(phase="rung-1-0"))
    assert first.power[-1].time_s < second.power[0].time_s
    assert (first.power[-1].energy_j or 0.0) < (second.power[0].energy_j or 0.0)


def test_a_phase_does_not_depend_on_what_ran_before() -> None:
    fresh, used = servers_of(CPU_PP2, CPU), servers_of(CPU_PP2, CPU)
    used.set_live({"pp_max_micro_batch_size": 2})
    used.run_load(make_plan(phase="warmup", is_warmup=True))
    used.run_load(make_plan(phase="rung-0-0", seed=3))
    used.set_live({})
    plan = make_plan(phase="rung-1-0")
    assert judged(used, plan) == judged(fresh, plan)


def test_phases_and_seeds_have_noise_of_their_own() -> None:
    servers = servers_of(CPU_PP2, CPU)
    plans = [make_plan(), make_plan(seed=8), make_plan(phase="rung-1-0")]
    firsts_s = set()
    for run in map(servers.run_load, plans):
        first_s = run.records[0].first_token_s
        assert first_s is not None
        firsts_s.add(first_s - run.started_s)
    assert len(firsts_s) == 3


def test_rungs_have_their_place_on_the_clock() -> None:
    phases = ["rung-0-0", "rung-0-1", "rung-0-6", "rung-1-0", "rung-2-0"]
    starts_s = [place_on_clock(make_plan(phase=phase)) for phase in phases]
    # A warm-up takes 18 s at most, any other load 1,806 s; a rung has 7 loads at most.
    assert starts_s == [18.0 + 1806.0 * place for place in (0, 1, 6, 7, 14)]
    assert place_on_clock(make_plan(phase="warmup", is_warmup=True)) == 0.0


def test_the_clock_stands_behind_the_last_load() -> None:
    servers = servers_of(CPU_PP2, CPU)
    load = servers.run_load(make_plan())
    assert servers.now_s() > load.window_end_s


def test_the_cap_is_set_live_within_its_range() -> None:
    servers = servers_of({**PP8, "max_running_requests": 64})
    assert servers.set_live({"pp_max_micro_batch_size": 4})["pp_max_micro_batch_size"] == 4
    assert servers.set_live({})["pp_max_micro_batch_size"] == 8
    for cap in (0, 9):
        with pytest.raises(Infeasible, match=r"out of the valid range \[1, 8\]"):
            servers.set_live({"pp_max_micro_batch_size": cap})
    with pytest.raises(Infeasible, match="pp_size cannot be changed"):
        servers.set_live({"pp_size": 1})


def test_a_live_limit_above_what_the_cache_holds_is_clipped_as_the_flag_is() -> None:
    servers = servers_of({"max_running_requests": 16}, CPU)
    assert servers.set_live({"max_running_requests": 8})["pp_max_micro_batch_size"] == 8
    assert servers.set_live({"max_running_requests": 400})["pp_max_micro_batch_size"] == 16
    assert servers.set_live({})["pp_max_micro_batch_size"] == 16


def test_the_cap_changes_what_is_measured() -> None:
    servers = servers_of({**PP8, "max_running_requests": 64})
    plan = make_plan(protocol=LoadProtocol.BURST, concurrency=32, max_window_s=60.0)
    wide = servers.run_load(plan)
    servers.set_live({"pp_max_micro_batch_size": 4})
    narrow = servers.run_load(plan)
    assert wall_s(narrow) < 0.95 * wall_s(wide)


def wall_s(load: LoadRun) -> float:
    return load.window_end_s - load.window_start_s


def test_defaults_are_resolved_and_unknown_arguments_kept() -> None:
    servers = servers_of({**PP8, "trust_remote_code": True})
    assert servers.set_live({}) == {
        "tp_size": 1,
        "pp_size": 8,
        "dp_size": 1,
        "ep_size": 1,
        "pp_async_batch_depth": 8,
        "pp_max_micro_batch_size": 8,
        "max_running_requests": 64,
        "max_total_tokens": servers.resolved.max_total_tokens,
        "chunked_prefill_size": 8192,
        "mem_fraction_static": 0.88,
        "attention_backend": "triton",
        "cuda_graph": True,
        "cuda_graph_max_bs": 64,
        "trust_remote_code": True,
    }
    assert servers.server_info()["model"] == "Kimi-K2.6"
    assert servers.phase_s["load_weights"] > 10


@pytest.mark.parametrize(
    ("params", "settings", "message"),
    [
        ({"tp_size": 4}, SETTINGS, "out of memory"),
        ({"tp_size": 8, "attention_backend": "fa3"}, SETTINGS, "fa3 does not run"),
        ({"pp_size": 2}, replace(CPU, hardware=SETTINGS.hardware), "set hardware.gpus to 2"),
    ],
)
def test_what_cannot_start_is_infeasible(
    params: Params, settings: StudySettings, message: str
) -> None:
    with pytest.raises(Infeasible, match=message):
        servers_of(params, settings)


def test_a_profile_is_needed() -> None:
    settings = replace(SETTINGS, engine=replace(SETTINGS.engine, profile=None))
    with pytest.raises(ConfigError, match=r"engine\.profile: missing"):
        servers_of(PP8, settings)


def test_a_whole_trial_runs_on_them() -> None:
    servers: RunningServers = servers_of(CPU_PP2, CPU)
    measure = replace(CPU.measure, min_window_s=0.5, max_window_s=120.0)
    settings = replace(CPU, measure=measure)
    rungs = rung_plans(settings, 4)
    trial = TrialSpec(4, CPU_PP2, {}, rungs, warmup_plan(settings, 4), spec_hash="0")
    seen: list[RungRecord] = []
    keeper = RungKeeper(
        settings=settings,
        plans=rungs,
        keep=seen.append,
        should_stop=lambda *_: None,
        on_judged=lambda _: None,
    )
    outcome = run_trial(trial, servers, keeper)
    assert isinstance(outcome, Measurement)
    assert outcome.rungs_measured == len(seen) == 3
    assert all(judge_rung(r, (), p).valid for r, p in zip(seen, rungs, strict=True))


@pytest.mark.parametrize("arrivals", Arrivals)
def test_an_open_loop_says_when_requests_were_due(arrivals: Arrivals) -> None:
    plan = make_plan(protocol=LoadProtocol.OPEN_LOOP, rate=4.0, arrivals=arrivals, max_window_s=8.0)
    run = servers_of(CPU_PP2, CPU).run_load(plan)

    due_s = [record.due_s for record in run.records if record.due_s is not None]
    assert len(due_s) == len(run.records) > 4
    assert all(0 <= r.send_s - due < 0.001 for r, due in zip(run.records, due_s, strict=True))
    gaps_s = [round(later - earlier, 9) for earlier, later in pairwise(due_s)]
    assert (set(gaps_s) == {0.25}) == (arrivals is Arrivals.CONSTANT)


def test_a_closed_loop_has_no_times_to_keep() -> None:
    run = servers_of(CPU_PP2, CPU).run_load(make_plan())
    assert {record.due_s for record in run.records} == {None}


def test_every_decode_pass_is_told_with_the_counters_so_far() -> None:
    servers = servers_of({**CPU_PP2, "decode_log_interval": 1}, CPU)
    load = servers.run_load(make_plan(concurrency=1))
    told = servers.read_batches(load.started_s, load.window_end_s)
    tokens = [s for record in load.records for s in record.token_s[1:] if s <= load.window_end_s]
    assert abs(len(told) - len(tokens)) <= 1  # the last one may be told and not yet delivered
    assert [sample.eager_passes for sample in told] == list(range(1, len(told) + 1))
    assert {(s.running, s.waiting, s.in_graph, s.graph_passes) for s in told} == {(1, 0, False, 0)}


def test_samples_are_one_in_so_many_passes_of_each_scheduler() -> None:
    servers = servers_of({"dp_size": 2, "max_running_requests": 16}, CPU)
    load = servers.run_load(make_plan())
    told = servers.read_batches(*load.window)
    assert {(sample.replica, sample.dp_rank) for sample in told} == {(0, 0), (0, 1)}
    assert {(sample.eager_passes or 0) % 17 for sample in told} == {0}
    assert [sample.time_s for sample in told] == sorted(sample.time_s for sample in told)
    assert told == servers.read_batches(*servers.run_load(make_plan()).window)


@pytest.mark.parametrize(
    ("params", "low", "high", "largest"),
    [
        ({"cuda_graph": False}, 0.0, 0.0, 8),
        ({"cuda_graph": True}, 1.0, 1.0, 7),
        ({"cuda_graph": True, "cuda_graph_max_bs": 4}, 0.01, 0.99, 7),
    ],
)
def test_graphs_serve_batches_up_to_their_size(
    params: Params, low: float, high: float, largest: int
) -> None:
    shape: Params = {"pp_size": 8, "max_running_requests": 64, **params}
    servers, plan = servers_of(shape), make_plan(concurrency=32, max_window_s=10.0)
    load = servers.run_load(plan)
    told = evidence_of(servers.read_batches(*load.window), [load.window])
    assert told.graph_share is not None
    assert low <= told.graph_share <= high
    assert told.batch_max == largest


def test_a_cap_too_low_for_the_load_shows_as_a_queue_and_a_small_cache_as_retractions() -> None:
    servers = servers_of(CPU_PP2, CPU)
    servers.set_live({"pp_max_micro_batch_size": 1})
    load = servers.run_load(make_plan())
    told = evidence_of(servers.read_batches(*load.window), [load.window])
    assert (told.batch_max, told.retractions) == (1, 0)
    assert told.queue_mean == pytest.approx(4.0, abs=0.5)  # four slots of one, eight in flight

    servers = servers_of({**CPU_PP2, "max_total_tokens": 160}, CPU)
    load = servers.run_load(make_plan(output_tokens=Lengths.fixed(60)))
    whole = (load.started_s, load.window_end_s)
    told = evidence_of(servers.read_batches(*whole), [whole])
    assert told.retractions
    assert told.kv_usage_max is not None
    assert told.kv_usage_max > 0.5
