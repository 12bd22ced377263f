"""Energy of a window from counters and sampled power, and what is unavailable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.measure.energy import energy_over, longest_gap_s
from runner.trial import GpuEnergy, PowerSample
from tests.power_samples import sample


def counted(time_s: float, energy_j: float) -> PowerSample:
    return sample(time_s, 100.0, energy_j)


def energy_of(samples: list[PowerSample], start_s: float, end_s: float) -> GpuEnergy:
    (gpu,) = energy_over(samples, start_s, end_s)
    return gpu


def test_counter_is_interpolated_at_both_borders() -> None:
    samples = [counted(0.0, 1000.0), counted(1.0, 1200.0), counted(2.0, 1300.0)]
    gpu = energy_of(samples, 0.5, 1.5)
    assert gpu.energy_j == pytest.approx(1250.0 - 1100.0)
    assert gpu.power_w == pytest.approx(150.0)


def test_counter_wins_over_sampled_power() -> None:
    samples = [replace(counted(time_s, 7.0 * time_s), power_w=500.0) for time_s in (0.0, 1.0, 2.0)]
    assert energy_of(samples, 0.0, 2.0).energy_j == pytest.approx(14.0)


def test_power_is_integrated_where_there_is_no_counter() -> None:
    samples = [sample(0.0, 0.0), sample(1.0, 100.0), sample(2.0, 100.0)]
    # 50..100 W over the first half second, then 100 W.
    assert energy_of(samples, 0.5, 2.0).energy_j == pytest.approx(37.5 + 100.0)


def test_a_reset_counter_is_not_used() -> None:
    samples = [counted(0.0, 1000.0), counted(1.0, 5.0), counted(2.0, 105.0)]
    assert energy_of(samples, 0.0, 2.0).energy_j == pytest.approx(200.0)


@pytest.mark.parametrize(
    "samples",
    [
        [sample(0.0, None), sample(1.0, None), sample(2.0, None)],
        [sample(0.6), sample(1.0), sample(2.0)],
        [sample(0.0), sample(1.0), sample(1.4)],
        [sample(0.0)],
    ],
    ids=["no sensor", "starts late", "ends early", "one sample"],
)
def test_energy_that_is_not_known_is_none(samples: list[PowerSample]) -> None:
    gpu = energy_of(samples, 0.5, 1.5)
    assert gpu.energy_j is None
    assert gpu.power_w is None


def test_no_samples_no_gpus() -> None:
    assert energy_over([], 0.0, 1.0) == ()


def test_sampled_power_with_a_hole_has_no_integral() -> None:
    times_s = [0.0, 0.1, 0.2, 0.3, 2.5, 2.6, 2.7]
    assert energy_of([sample(t) for t in times_s], 0.0, 2.7).energy_j is None
    # A counter counts on through the hole, as long as no border lies in it.
    assert energy_of([counted(t, 10 * t) for t in times_s], 0.0, 2.7).energy_j == 27.0
    assert energy_of([counted(t, 10 * t) for t in times_s], 0.0, 2.0).energy_j is None


def test_wide_spacing_is_no_hole_where_it_is_usual() -> None:
    # Emulated servers at 100 times speed: 20 ms of the wall are 2 s, and one sample came late.
    samples = [sample(2.1 * place) for place in range(10) if place != 4]
    assert energy_of(samples, 0.0, 18.9).energy_j == pytest.approx(1890.0)


def test_longest_gap() -> None:
    samples = [sample(t) for t in (0.0, 0.25, 0.5, 0.75, 1.0, 4.0, 4.25, 4.5, 4.75, 5.0)]
    assert longest_gap_s(samples, 0.0, 5.0) == 3.0
    assert longest_gap_s(samples, 2.0, 5.0) == 2.0
    assert longest_gap_s(samples, 4.0, 5.0) == 0.0
    assert longest_gap_s(samples, 4.0, 6.0) == 1.0
    assert longest_gap_s([], 4.0, 6.0) == 2.0


def test_each_gpu_has_its_own_energy_in_order_of_appearance() -> None:
    samples = [
        sample(time_s, watts, uuid=uuid)
        for time_s in (0.0, 1.0)
        for uuid, watts in (("GPU-b", 50.0), ("GPU-a", 70.0))
    ]
    found = energy_over(samples, 0.0, 1.0)
    assert [(gpu.gpu_uuid, gpu.energy_j) for gpu in found] == [("GPU-b", 50.0), ("GPU-a", 70.0)]


def test_what_else_a_gpu_did() -> None:
    busy = [
        replace(sample(0.0), utilization=0.2, memory_used_bytes=5),
        replace(sample(1.0), utilization=0.4, memory_used_bytes=9, throttled=True),
        replace(sample(2.0), utilization=None, memory_used_bytes=7, throttled=None),
        replace(sample(3.0), utilization=1.0, memory_used_bytes=99),
    ]
    gpu = energy_of(busy, 0.0, 2.0)
    assert gpu.utilization == pytest.approx(0.3)
    assert gpu.memory_used_bytes == 9
    assert gpu.throttled is True


@given(st.floats(1, 1000), st.lists(st.floats(0.01, 0.19), min_size=5, max_size=50), st.booleans())
def test_constant_power_times_time_is_the_energy(
    power_w: float, gaps_s: list[float], has_counter: bool
) -> None:
    times_s = [100.0 + sum(gaps_s[:count]) for count in range(len(gaps_s) + 1)]
    samples = [
        sample(time_s, power_w, power_w * time_s if has_counter else None) for time_s in times_s
    ]
    start_s = 100.0 + (times_s[-1] - 100.0) * 0.3
    end_s = 100.0 + (times_s[-1] - 100.0) * 0.8
    gpu = energy_of(samples, start_s, end_s)
    assert gpu.energy_j == pytest.approx(power_w * (end_s - start_s), rel=1e-6)


def stepped(power_w: Callable[[float], float], update_s: float, period_s: float, phase_s: float,
            until_s: float) -> tuple[list[PowerSample], Callable[[float], float]]:  # fmt: skip
    """Readings of a counter that is refreshed every `update_s`, and the true energy at a time."""
    grid_s = 0.001
    sums = [0.0]
    for step in range(int(until_s / grid_s) + 1):
        sums.append(sums[-1] + power_w(step * grid_s) * grid_s)

    def true_j(time_s: float) -> float:
        return sums[max(0, round(time_s / grid_s))]

    samples = []
    for place in range(int(until_s / period_s)):
        time_s = place * period_s
        refreshed_s = phase_s + (time_s - phase_s) // update_s * update_s
        samples.append(sample(time_s, power_w(time_s), true_j(max(refreshed_s, 0.0))))
    return samples, true_j


def waves(time_s: float) -> float:
    """Decode steps and prefill bursts."""
    return 650.0 if time_s % 1.3 < 0.9 else 350.0


@pytest.mark.parametrize("update_s", [0.02, 0.1, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("phase_s", [0.0, 0.013, 0.07])
@pytest.mark.parametrize("start_s", [5.03, 5.41])
def test_a_stepped_counter_is_read_where_it_changes(
    update_s: float, phase_s: float, start_s: float
) -> None:
    samples, true_j = stepped(waves, update_s, 0.1, phase_s, 20.0)
    end_s = start_s + 10.0
    truth_j = true_j(end_s) - true_j(start_s)
    gpu = energy_of(samples, start_s, end_s)
    assert gpu.energy_j == pytest.approx(truth_j, abs=true_error_j(update_s))


def true_error_j(update_s: float) -> float:
    """Half a sampling period at each border, and the waves that an update averages away."""
    return 650.0 * 0.1 + 300.0 * 0.25 * (update_s > 0.1)


def test_constant_power_through_a_stepped_counter_is_exact_but_for_the_sampling() -> None:
    samples, _ = stepped(lambda _: 500.0, 0.5, 0.1, 0.033, 20.0)
    # Both borders lie between equal readings: interpolation there is wrong by up to 250 J.
    assert samples[51].energy_j == samples[52].energy_j
    assert samples[154].energy_j == samples[155].energy_j
    assert energy_of(samples, 5.15, 15.45).energy_j == pytest.approx(5150.0, abs=50.0)


def test_a_window_may_end_before_the_counters_next_change() -> None:
    samples, true_j = stepped(lambda _: 500.0, 0.5, 0.1, 0.033, 15.3)
    assert energy_of(samples, 5.0, 15.2).energy_j == pytest.approx(5100.0, abs=55.0)
    assert true_j(15.2) - true_j(5.0) == pytest.approx(5100.0)


def test_a_counter_that_stops_is_not_believed_for_long() -> None:
    samples, _ = stepped(lambda _: 500.0, 0.2, 0.1, 0.0, 15.0)
    stopped = [replace(each, energy_j=min(each.energy_j or 0.0, 4000.0)) for each in samples]
    # It stopped at 8 s; the sampled power goes on.
    assert energy_of(stopped, 5.0, 14.0).energy_j == pytest.approx(4500.0)
    blind = [replace(each, power_w=None) for each in stopped]
    assert energy_of(blind, 5.0, 14.0).energy_j is None


def test_a_counter_that_stands_still_leaves_the_word_to_power() -> None:
    still = [counted(time_s / 10, 1234.0) for time_s in range(100)]
    assert energy_of(still, 1.0, 9.0).energy_j == pytest.approx(800.0)
    blind = [replace(each, power_w=None) for each in still]
    assert energy_of(blind, 1.0, 9.0).energy_j is None  # not 0


def test_a_wrapped_counter_is_not_used() -> None:
    top_j = 2**32 / 1000
    samples = [counted(t / 10, (top_j - 300 + 10 * t) % top_j) for t in range(100)]
    assert energy_of(samples, 1.0, 9.0).energy_j == pytest.approx(800.0)


def test_utilization_is_weighed_by_time() -> None:
    busy = [replace(sample(t), utilization=share) for t, share in ((0.0, 1.0), (0.5, 0.0))]
    gpu = energy_of([*busy, replace(sample(2.0), utilization=0.0)], 0.0, 2.0)
    assert gpu.utilization == pytest.approx(0.25)
