from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import ConfigError
from runner.measure.metrics import distribution, itls_s, judge_rung, metric_value, tpot_s
from runner.settings import SloLimit
from runner.trial import (
    ClientHealth,
    Distribution,
    Lengths,
    LoadPlan,
    LoadProtocol,
    LoadRun,
    LoadStart,
    PowerSample,
    RequestRecord,
    RequestStatus,
    RungRecord,
)

PLAN = LoadPlan(
    phase="rung-0",
    protocol=LoadProtocol.CLOSED_LOOP,
    concurrency=1,
    prompt_tokens=Lengths.fixed(16),
    output_tokens=Lengths.fixed(4),
    seed=0,
)


def record(send_s: float, *token_s: float, end_s: float | None = None,
           status: RequestStatus = RequestStatus.OK) -> RequestRecord:  # fmt: skip
    return RequestRecord(
        request_id=f"r-{send_s}",
        replica=0,
        send_s=send_s,
        first_token_s=token_s[0] if token_s else None,
        end_s=token_s[-1] if end_s is None else end_s,
        token_s=token_s,
        prompt_tokens=16,
        output_tokens=len(token_s),
        wanted_tokens=len(token_s),
        cached_tokens=0,
        status=status,
        error="reset" if status is RequestStatus.FAILED else None,
    )


def rung(*records: RequestRecord, window: tuple[float, float] = (10.0, 20.0),
         power: tuple[PowerSample, ...] = (), concurrency: int = 1) -> RungRecord:  # fmt: skip
    load = LoadRun(records, 0.0, *window, is_steady=True, client=ClientHealth(0.1, 0.001))
    return RungRecord(0, concurrency, (load,), power)


def watts(power_w: float | None, uuid: str = "GPU-a") -> tuple[PowerSample, ...]:
    return tuple(
        PowerSample(float(second), uuid, power_w, None, None, None, None, None)
        for second in range(9, 22)
    )


# One request ends before the window, one crosses into it, one lies in it, one crosses out of it.
BEFORE = record(5.0, 6.0, 7.0, 8.0, 9.0)
INTO = record(9.0, 9.5, 10.0, 11.0, 12.0)
INSIDE = record(12.0, 13.0, 14.0, 16.0, 18.0)
OUT = record(18.0, 19.0, 20.0, 21.0, 22.0)
ALL = (BEFORE, INTO, INSIDE, OUT)


def test_throughput_counts_what_arrived_in_the_window() -> None:
    result = judge_rung(rung(*ALL), ())
    # 11, 12; 13, 14, 16, 18; 19, 20. A token at the very start belongs to the ramp-up.
    assert result.output_throughput == 0.8
    # Two first tokens are in the window: 16 prompt tokens each.
    assert result.total_throughput == (8 + 32) / 10
    assert result.request_throughput == 0.2
    assert (result.requests, result.errors) == (2, 0)
    assert (result.window_start_s, result.window_s) == (10.0, 10.0)


def test_latencies_belong_to_the_moment_they_name() -> None:
    result = judge_rung(rung(*ALL), ())
    # TTFT: INSIDE and OUT. E2E, TPOT: INTO and INSIDE.
    assert result.ttft_s == Distribution(1.0, 1.0, 1.0, 1.0)
    assert result.e2e_s is not None
    assert result.e2e_s.mean == (3.0 + 6.0) / 2
    assert result.tpot_s is not None
    assert result.tpot_s.mean == pytest.approx((2.5 / 3 + 5.0 / 3) / 2)
    # ITL: 1, 1; 1, 2, 2; 1.
    assert result.itl_s is not None
    assert result.itl_s.mean == pytest.approx(8 / 6)


def test_cut_requests_count_for_what_they_delivered() -> None:
    cut = record(15.0, 16.0, 17.0, end_s=21.0, status=RequestStatus.CUT)
    result = judge_rung(rung(*ALL, cut), ())
    assert result.output_throughput == 1.0
    assert result.requests == 2
    assert result.ttft_s is not None
    assert result.ttft_s.mean == 1.0
    assert result.valid


def test_failed_requests_count_nowhere_but_as_errors() -> None:
    failed = record(13.0, 14.0, 15.0, end_s=15.5, status=RequestStatus.FAILED)
    with_failed, without = judge_rung(rung(*ALL, failed), ()), judge_rung(rung(*ALL), ())
    assert with_failed.errors == 1
    assert with_failed.output_throughput == without.output_throughput
    assert with_failed.total_throughput == without.total_throughput
    assert with_failed.ttft_s == without.ttft_s
    assert not with_failed.valid


def test_achieved_concurrency_is_the_mean_in_flight() -> None:
    # 9-12, 12-18 and 18-22, seen from 10 to 20.
    assert judge_rung(rung(*ALL), ()).achieved_concurrency == 1.0
    overlapping = record(15.0, 16.0, end_s=20.0)
    assert judge_rung(rung(*ALL, overlapping), ()).achieved_concurrency == 1.5


def test_goodput_asks_every_limit_of_every_request() -> None:
    limits = [SloLimit("ttft_s", "p99", 0.8), SloLimit("tpot_s", "p99", 1.0)]
    # INTO has TTFT 0.5 and TPOT 0.83; INSIDE has TTFT 1.0 and TPOT 1.67.
    assert judge_rung(rung(*ALL), limits).goodput == 0.1
    assert judge_rung(rung(*ALL), [SloLimit("ttft_s", "p50", 1.0)]).goodput == 0.2
    assert judge_rung(rung(*ALL), [SloLimit("e2e_s", "p50", 3.0)]).goodput == 0.1
    assert judge_rung(rung(*ALL), [SloLimit("itl_s", "p50", 1.0)]).goodput == 0.1
    assert judge_rung(rung(*ALL), ()).goodput is None


def test_energy_is_the_sum_over_all_gpus() -> None:
    result = judge_rung(rung(*ALL, power=(*watts(300.0), *watts(100.0, "GPU-b"))), ())
    assert result.power_w == 400.0
    assert result.energy_j == 4000.0
    assert result.tokens_per_joule == 8 / 4000
    assert result.joules_per_request == 2000.0
    assert [gpu.energy_j for gpu in result.gpus] == [3000.0, 1000.0]


def test_power_that_is_unavailable_is_none_and_no_reason() -> None:
    result = judge_rung(rung(*ALL, power=(*watts(300.0), *watts(None, "GPU-b"))), ())
    assert (result.power_w, result.energy_j) == (None, None)
    assert (result.tokens_per_joule, result.joules_per_request) == (None, None)
    assert result.gpus[0].power_w == 300.0
    assert result.valid


def test_a_window_in_which_nothing_happened_has_no_latencies() -> None:
    result = judge_rung(rung(BEFORE, window=(30.0, 40.0)), ())
    assert result.output_throughput == 0.0
    assert (result.ttft_s, result.tpot_s, result.itl_s, result.e2e_s) == (None,) * 4
    assert not result.valid


def test_an_empty_window_has_no_rates() -> None:
    result = judge_rung(rung(*ALL, window=(10.0, 10.0), power=watts(100.0)), ())
    assert (result.output_throughput, result.achieved_concurrency) == (0.0, 0.0)
    assert result.energy_j is None
    assert not result.valid


def restarted(*starts: LoadStart) -> RungRecord:
    """The same ten seconds again, a hundred seconds later each time."""
    loads = []
    for number, start in enumerate(starts):
        later_s = 100.0 * number
        requests = tuple(
            replace(
                each,
                send_s=each.send_s + later_s,
                first_token_s=each.token_s[0] + later_s if each.token_s else None,
                end_s=each.end_s + later_s,
                token_s=tuple(time_s + later_s for time_s in each.token_s),
            )
            for each in ALL
        )
        loads.append(replace(rung(*requests, window=(10.0 + later_s, 20.0 + later_s)).loads[0],
                             start=start))  # fmt: skip
    power = tuple(
        PowerSample(second / 2, "GPU-a", 100.0, None, None, None, None, throttled=False)
        for second in range(800)
    )
    return RungRecord(0, 1, tuple(loads), power)


def test_a_rung_is_the_sum_of_its_restarts_and_a_probe_counts_nowhere() -> None:
    once = judge_rung(restarted(LoadStart.GRADUAL), ())
    steady = (LoadStart.GRADUAL,) * 2
    thrice = judge_rung(restarted(LoadStart.GRADUAL, LoadStart.TOGETHER, *steady), ())
    assert thrice.window_s == 3 * once.window_s == 30.0
    assert thrice.output_throughput == pytest.approx(once.output_throughput)
    assert thrice.achieved_concurrency == pytest.approx(once.achieved_concurrency)
    assert thrice.requests == 3 * once.requests
    assert thrice.energy_j == pytest.approx(3000.0)
    assert thrice.power_w == pytest.approx(100.0)
    assert [restart.counts for restart in thrice.restarts] == [True, False, True, True]
    assert [restart.window_start_s for restart in thrice.restarts] == [10.0, 110.0, 210.0, 310.0]


def test_only_restarts_claim_a_precision() -> None:
    once = judge_rung(restarted(LoadStart.GRADUAL), ())
    assert once.output_throughput_halfwidth is None
    thrice = judge_rung(restarted(*[LoadStart.GRADUAL] * 3), ())
    assert thrice.output_throughput_halfwidth is not None
    assert thrice.output_throughput_halfwidth > 0.0  # equal rates claim no more than their windows


def test_tokens_read_together_share_their_gap() -> None:
    # Chunks of 1, 3 and 2 tokens.
    chunked = record(0.0, 1.0, 4.0, 4.0, 4.0, 5.0, 5.0)
    assert list(itls_s(chunked)) == [(4.0, 1.0), (4.0, 1.0), (4.0, 1.0), (5.0, 0.5), (5.0, 0.5)]
    first_three = record(0.0, 1.0, 1.0, 1.0, 3.0)
    assert list(itls_s(first_three)) == [(3.0, 2.0)]


def test_tpot_needs_two_tokens() -> None:
    assert tpot_s(record(0.0, 1.0)) is None
    assert tpot_s(record(0.0, 1.0, 2.0, end_s=3.0)) == 2.0
    assert tpot_s(record(0.0, end_s=3.0)) is None


def test_percentiles_interpolate() -> None:
    found = distribution([4.0, 1.0, 3.0, 2.0])
    assert found is not None
    assert (found.mean, found.p50) == (2.5, 2.5)
    assert found.p90 == pytest.approx(3.7)
    assert found.p99 == pytest.approx(3.97)
    assert distribution([7.0]) == Distribution(7.0, 7.0, 7.0, 7.0)
    assert distribution([]) is None


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_ascend_within_the_values(values: list[float]) -> None:
    found = distribution(values)
    assert found is not None
    assert min(values) <= found.p50 <= found.p90 <= found.p99 <= max(values)
    assert found.mean == pytest.approx(sum(values) / len(values))


requests = st.builds(
    lambda send_s, gaps: record(send_s, *(send_s + sum(gaps[: n + 1]) for n in range(len(gaps)))),
    st.floats(0, 30),
    st.lists(st.floats(0, 5), min_size=1, max_size=8),
)


@given(st.lists(requests, min_size=1, max_size=8), st.floats(0, 40), st.floats(0.1, 20))
def test_any_window_split_in_two_holds_the_same_tokens(
    records: list[RequestRecord], start_s: float, length_s: float
) -> None:
    middle_s, end_s = start_s + length_s / 2, start_s + length_s
    whole = judge_rung(rung(*records, window=(start_s, end_s)), ())
    halves = [
        judge_rung(rung(*records, window=window), ())
        for window in ((start_s, middle_s), (middle_s, end_s))
    ]
    for metric in ("output_throughput", "request_throughput", "achieved_concurrency"):
        values = [metric_value(half, metric) or 0.0 for half in halves]
        weights = [middle_s - start_s, end_s - middle_s]
        total = sum(value * weight for value, weight in zip(values, weights, strict=True))
        assert metric_value(whole, metric) == pytest.approx(total / (end_s - start_s), abs=1e-6)


def test_metrics_by_name() -> None:
    result = judge_rung(rung(*ALL), ())
    assert metric_value(result, "output_throughput") == 0.8
    assert metric_value(result, "e2e_s.p99") == pytest.approx(5.97)
    assert metric_value(result, "tokens_per_joule") is None
    assert metric_value(replace(result, ttft_s=None), "ttft_s.p50") is None


@pytest.mark.parametrize("name", ["tokens", "ttft_s", "ttft_s.p95", "power_w.mean", "valid", ""])
def test_unknown_metrics_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is no metric; choose one of output_throughput, .*p99"):
        metric_value(judge_rung(rung(*ALL), ()), name)


def test_one_blind_gpu_of_eight_leaves_the_sum_unknown() -> None:
    seven = [each for n in range(7) for each in watts(300.0, f"GPU-{n}")]
    result = judge_rung(rung(*ALL, power=(*seven, *watts(None, "GPU-7"))), ())
    assert [gpu.power_w for gpu in result.gpus] == [pytest.approx(300.0)] * 7 + [None]
    for metric in ("power_w", "energy_j", "tokens_per_joule", "joules_per_request"):
        assert metric_value(result, metric) is None
