from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from runner.measure.metrics import judge_rung
from runner.trial import (
    ClientHealth,
    Lengths,
    LoadPlan,
    LoadProtocol,
    LoadRun,
    PowerSample,
    RequestRecord,
    RequestStatus,
    RungRecord,
)

PLAN = LoadPlan(
    phase="rung-0",
    protocol=LoadProtocol.CLOSED_LOOP,
    concurrency=2,
    prompt_tokens=Lengths.fixed(100),
    output_tokens=Lengths.fixed(2),
    seed=0,
)


def request(number: int, stream: int) -> RequestRecord:
    """Two streams, one request of one second after the other."""
    send_s = float(number)
    return RequestRecord(
        request_id=f"r-{stream}-{number}",
        replica=0,
        send_s=send_s,
        first_token_s=send_s + 0.5,
        end_s=send_s + 1.0,
        token_s=(send_s + 0.5, send_s + 1.0),
        prompt_tokens=100,
        output_tokens=2,
        wanted_tokens=2,
        cached_tokens=0,
        status=RequestStatus.OK,
    )


REQUESTS = tuple(request(number, stream) for number in range(30) for stream in range(2))
POWER = tuple(
    PowerSample(second / 2, "GPU-a", 300.0, None, 0.9, 1000, 2000.0, throttled=False)
    for second in range(62)
)
LOAD = LoadRun(REQUESTS, 0.0, 5.0, 25.0, is_steady=True, client=ClientHealth(0.3, 0.004))
RUNG = RungRecord(0, 2, (LOAD,), POWER)


def reasons(rung: RungRecord, plan: LoadPlan | None = PLAN) -> tuple[str, ...]:
    result = judge_rung(rung, (), plan)
    assert result.valid == (not result.reasons)
    return result.reasons


def with_load(**changes: object) -> RungRecord:
    load = replace(LOAD, **changes)  # type: ignore[arg-type]
    return replace(RUNG, loads=(load,))


def with_first(count: int, **changes: object) -> RungRecord:
    changed = [replace(each, **changes) for each in REQUESTS[:count]]  # type: ignore[arg-type]
    return with_load(records=(*changed, *REQUESTS[count:]))


def test_a_load_that_was_cut_short_has_that_one_reason() -> None:
    """Its window is short: requests may queue through it, and it need not be steady."""
    queued = request(0, 0)
    queued = replace(
        queued,
        send_s=4.0,
        end_s=26.0,
        first_token_s=None,
        token_s=(),
        output_tokens=0,
        status=RequestStatus.CUT,
    )
    records = (*REQUESTS, queued)
    assert any("hung" in reason for reason in reasons(with_load(records=records)))
    rung = with_load(records=records, is_steady=False, cut_below=100.0)
    (reason,) = reasons(rung)
    assert reason.startswith("cut short: at ")
    assert "less than 50% of the 100 it had to reach" in reason


def test_a_fair_rung_has_no_reasons() -> None:
    assert reasons(RUNG) == ()
    assert reasons(RUNG, None) == ()


@pytest.mark.parametrize(
    ("rung", "reason"),
    [
        (with_load(is_steady=False), "not steady: the token rate drifted within its window"),
        (
            with_load(client=ClientHealth(0.95, 0.0)),
            "the load generator was the limit: it used 95% of a core (at most 90%)",
        ),
        (
            with_load(client=ClientHealth(0.1, 0.08)),
            "the load generator was the limit: it ran 80 ms late (at most 50 ms)",
        ),
        (
            with_first(1, status=RequestStatus.FAILED, error="HTTP 500: oops"),
            "error rate: 1 of 60 requests failed (at most 1%); the first: HTTP 500: oops",
        ),
        (
            with_first(3, wanted_tokens=4),
            "3 of 60 requests returned another number of tokens than asked for; the first: 2 of 4",
        ),
        (
            with_first(60, cached_tokens=60),
            "the prefix cache served 60% of the prompt tokens, but prompts share only 0%",
        ),
        (
            replace(RUNG, concurrency=3),
            "only 2.0 of 3 requests were in flight on average (at least 90%)",
        ),
        (
            replace(RUNG, power=tuple(replace(each, throttled=True) for each in POWER)),
            "GPU GPU-a was slowed down by heat or by its power supply",
        ),
        (
            replace(RUNG, power=(*POWER[:20], *POWER[40:])),
            "the power of 1 GPU was not read for 10.5 s",
        ),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_each_unfairness_is_named(rung: RungRecord, reason: str) -> None:
    found = reasons(rung)
    assert len(found) == 1
    assert found[0].startswith(reason)


@pytest.mark.parametrize(
    ("restarts", "drifting", "is_fair"),
    [
        *((1, 1, False), (2, 1, False), (3, 1, True), (3, 2, False)),
        *((4, 2, False), (6, 1, True), (6, 2, True), (6, 3, False)),
    ],
)
def test_a_claim_from_restarts_bears_some_that_drift(
    restarts: int, drifting: int, *, is_fair: bool
) -> None:
    """One of six drifted on an H200, at a rate like the others': 180 s were measured again."""
    loads = [replace(LOAD, is_steady=number >= drifting) for number in range(restarts)]
    result = judge_rung(replace(RUNG, loads=tuple(loads)), (), PLAN)
    assert result.valid == is_fair
    said, which = (result.notes, "drifted") if is_fair else (result.reasons, "not steady")
    assert [which in text and f"in {drifting} of {restarts} restarts" in text for text in said] == (
        [True] if restarts > 1 else [False]
    )
    burst = replace(PLAN, protocol=LoadProtocol.BURST)
    assert not judge_rung(replace(RUNG, loads=tuple(loads)), (), burst).valid


@pytest.mark.parametrize("change", [{"window_end_s": 9.0}, {"started_s": -3000.0}])
def test_a_restart_that_is_unsteady_for_another_reason_than_drift_voids_the_claim(
    change: dict[str, float],
) -> None:
    """Shards that hardly ran together; a ramp-up that was cut off."""
    loads = (LOAD, LOAD, replace(LOAD, is_steady=False, **change))  # type: ignore[arg-type]
    assert not judge_rung(replace(RUNG, loads=loads), (), PLAN).valid


def test_silence_is_named() -> None:
    found = reasons(with_load(window_start_s=40.0, window_end_s=50.0))
    assert "no output token arrived in the window" in found


def test_several_reasons_are_all_told() -> None:
    rung = with_load(is_steady=False, client=ClientHealth(0.95, 0.08))
    assert len(reasons(rung)) == 3


def test_what_was_cut_on_purpose_is_no_error() -> None:
    assert reasons(with_first(2, status=RequestStatus.CUT, wanted_tokens=9)) == ()


def test_a_share_of_the_prompt_that_is_common_may_be_cached() -> None:
    rung = with_first(60, cached_tokens=50)
    assert reasons(rung, replace(PLAN, shared_prefix=0.5)) == ()
    assert len(reasons(rung, replace(PLAN, shared_prefix=0.25))) == 1


def test_a_burst_need_not_keep_its_concurrency() -> None:
    rung = replace(RUNG, concurrency=60)
    assert len(reasons(rung)) == 1
    assert reasons(rung, replace(PLAN, protocol=LoadProtocol.BURST)) == ()


def test_an_open_loop_must_keep_up_with_its_arrivals() -> None:
    plan = replace(PLAN, protocol=LoadProtocol.OPEN_LOOP, rate=2.0)
    assert reasons(RUNG, plan) == ()
    slow = with_first(60, end_s=90.0)
    assert reasons(slow, plan) == ("the servers did not keep up: 40 requests arrived, 0 finished",)


def test_a_gpu_without_any_power_sensor_is_no_reason() -> None:
    blind = tuple(replace(each, power_w=None) for each in POWER)
    assert reasons(replace(RUNG, power=blind)) == ()
    assert reasons(replace(RUNG, power=())) == ()


def open_loop(late_s: tuple[float, ...], rate: float) -> tuple[str, ...]:
    """A rung of an open loop, some of whose requests left late."""
    records = tuple(
        replace(r, due_s=r.send_s - (late_s[at] if at < len(late_s) else 0.0))
        for at, r in enumerate(REQUESTS)
    )
    plan = replace(PLAN, protocol=LoadProtocol.OPEN_LOOP, rate=rate)
    return reasons(replace(RUNG, loads=(replace(LOAD, records=records),)), plan)


def test_requests_that_leave_at_their_time_are_fair() -> None:
    assert open_loop((), 2.0) == ()
    assert open_loop((0.2,) * 60, 2.0) == (), "less than half of the mean gap of 500 ms"
    assert open_loop((0.0019,) * 60, 1000.0) == (), "no timer is finer"


def test_requests_that_leave_late_make_the_client_the_limit() -> None:
    (reason,) = open_loop((0.3, 0.26), 2.0)
    assert reason.startswith(
        "client-limited: requests left up to 300 ms late, 2 of 60 later than 50% of the mean gap "
        "(at most 1%); leave the load generator more CPU time"
    )


def cached(tokens: int, prompt_tokens: int = 100) -> RungRecord:
    records = [replace(r, cached_tokens=tokens, prompt_tokens=prompt_tokens) for r in REQUESTS]
    return replace(RUNG, loads=(replace(LOAD, records=tuple(records)),))


def test_one_token_a_prompt_may_be_served_by_chance() -> None:
    short = replace(PLAN, prompt_tokens=Lengths.fixed(8))
    assert reasons(cached(1, 8), short) == ()
    assert reasons(cached(2, 8), short) != ()


@pytest.mark.parametrize(
    ("tokens", "served"), [(0, "served nothing"), (20, "served only 20%"), (25, None), (50, None)]
)
def test_a_shared_prefix_that_is_not_served_is_noted(tokens: int, served: str | None) -> None:
    result = judge_rung(cached(tokens), (), replace(PLAN, shared_prefix=0.5))
    assert result.valid
    if served is None:
        assert result.notes == ()
    else:
        assert (
            f"prompts share 50% of their tokens, but the prefix cache {served}" in result.notes[0]
        )


def test_without_a_shared_prefix_nothing_is_noted() -> None:
    assert judge_rung(RUNG, (), PLAN).notes == ()
    assert judge_rung(RUNG, ()).notes == ()


def of_power(change: Callable[[PowerSample], PowerSample]) -> RungRecord:
    return replace(RUNG, power=tuple(change(each) for each in POWER))


def test_throttling_says_for_how_long_and_how_slow() -> None:
    def slow(each: PowerSample) -> PowerSample:
        is_slow = 10.0 <= each.time_s < 12.0
        return replace(each, throttled=is_slow, sm_clock_mhz=1200.0 if is_slow else 2000.0)

    (reason,) = reasons(of_power(slow))
    assert reason.endswith("by its power supply for 10% of the window, down to 1200 MHz")
    outside = of_power(lambda each: replace(each, throttled=each.time_s > 26.0))
    assert reasons(outside) == ()


@pytest.mark.parametrize(("from_s", "until_s"), [(15.0, 99.0), (0.0, 10.0), (20.0, 25.0)])
def test_a_clock_that_was_changed_in_mid_window_is_named(from_s: float, until_s: float) -> None:
    def change(each: PowerSample) -> PowerSample:
        return replace(each, sm_clock_mhz=1400.0 if from_s <= each.time_s < until_s else 2000.0)

    (reason,) = reasons(of_power(change))
    assert reason.startswith("the clock of GPU GPU-a changed: it ran at ")
    assert reason.endswith("(at most 15% apart)")
    assert reasons(of_power(change), replace(PLAN, protocol=LoadProtocol.BURST)) == ()


def test_a_clock_that_moves_with_every_batch_is_fair() -> None:
    def bursts(each: PowerSample) -> PowerSample:
        return replace(each, sm_clock_mhz=1500.0 if each.time_s % 2.0 < 0.5 else 1980.0)

    assert reasons(of_power(bursts)) == ()
    assert reasons(of_power(lambda each: replace(each, sm_clock_mhz=None))) == ()


def test_the_clock_of_a_gpu_that_idles_does_not_count() -> None:
    def rest(each: PowerSample) -> PowerSample:
        is_idle = 10.0 < each.time_s < 12.0
        clock_mhz = 345.0 if is_idle else 2000.0
        return replace(each, utilization=0.0 if is_idle else 0.9, sm_clock_mhz=clock_mhz)

    assert reasons(of_power(rest)) == ()


def test_a_foreign_process_is_named_with_its_pid() -> None:
    def used(each: PowerSample) -> PowerSample:
        return replace(each, foreign_pid=4321 if 10.0 <= each.time_s < 11.0 else None)

    said = "process 4321, none of ours, used GPU GPU-a during the measurement"
    assert reasons(of_power(used)) == (said,)
    before = of_power(lambda each: replace(each, foreign_pid=4321 if each.time_s < 4.0 else None))
    assert reasons(before) == ()


def test_a_machine_that_slept_is_named() -> None:
    jumped = with_load(client=ClientHealth(0.1, 0.0, clock_jump_s=3.2))
    (reason,) = reasons(jumped)
    assert reason.startswith("the machine's time jumped by 3.2 s (at most 0.5 s): it was suspended")
    assert reasons(with_load(client=ClientHealth(0.1, 0.0, clock_jump_s=0.1))) == ()


def test_a_request_that_got_nothing_in_the_whole_window_hung() -> None:
    lost = replace(
        REQUESTS[0], send_s=1.0, token_s=(2.0, 3.0), end_s=30.0, status=RequestStatus.CUT
    )
    assert reasons(with_load(records=(lost, *REQUESTS[1:]))) == (
        "1 request hung: in flight over a whole window, without a token in it",
    )
    alive = replace(lost, token_s=(2.0, 12.0))
    assert reasons(with_load(records=(alive, *REQUESTS[1:]))) == ()


def test_requests_that_only_queue_did_not_hang() -> None:
    """A server with little room answers one after another: the last in the line waits."""
    queued = replace(REQUESTS[0], send_s=4.5, first_token_s=None, token_s=(), end_s=30.0)
    queued = replace(queued, status=RequestStatus.CUT)
    told = reasons(with_load(records=(*REQUESTS[:10], queued)))
    assert not any("hung" in reason for reason in told)
    overtaken = reasons(with_load(records=(*REQUESTS, queued)))
    assert any("1 request hung" in reason for reason in overtaken)


def test_a_window_of_few_request_durations_is_a_note() -> None:
    plan = replace(PLAN, min_periods=400)
    result = judge_rung(RUNG, (), plan)
    assert result.valid
    assert any("where 400 are wanted: raise measure.max_window_s" in n for n in result.notes)
    assert judge_rung(RUNG, (), PLAN).notes == ()
