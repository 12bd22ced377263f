"""What /metrics shows, and which prompts the emulated radix cache holds."""

from __future__ import annotations

from runner.engines.emulator.prefix_cache import PrefixCache
from runner.engines.emulator.stats import Gauge, Histogram, Stats, render
from runner.pipeline import BatchReport


def batch(
    *, is_prefill: bool, running: int = 0, tokens: int = 0, graph: bool = True
) -> BatchReport:
    return BatchReport(0.0, 0, is_prefill, 1, tokens, running, 0, graph, 0)


def samples(text: str, name: str) -> dict[str, float]:
    """Labels to value of one metric."""
    rows = [line.rpartition(" ") for line in text.splitlines() if line.startswith(name + "{")]
    return {labels[len(name) :]: float(value) for labels, _, value in rows}


def test_graph_passes_and_tokens_are_counted_by_mode() -> None:
    stats = Stats()
    stats.record_batch(batch(is_prefill=True, tokens=64, graph=False))
    stats.record_batch(batch(is_prefill=False, running=3))
    stats.record_batch(batch(is_prefill=False, running=4))
    stats.record_batch(batch(is_prefill=False, running=5, graph=False))
    assert stats.passes == {"prefill_none": 1, "decode_cuda_graph": 2, "decode_none": 1}
    assert stats.realtime_tokens == {"prefill_compute": 64, "decode": 12}


def test_every_stage_exports_the_same_scheduler_numbers() -> None:
    stats = Stats()
    stats.record_batch(batch(is_prefill=False, running=3))
    text = render([(stats, [Gauge("sglang:num_running_reqs", 3)])], "m", pp_size=2)
    label = 'engine_type="unified",{}model_name="m",moe_ep_rank="0",pp_rank="{}",tp_rank="0"'
    gauge = samples(text, "sglang:num_running_reqs")
    assert gauge == {"{" + label.format("", rank) + "}": 3.0 for rank in (0, 1)}
    passes = samples(text, "sglang:cuda_graph_passes_total")
    mode = 'mode="decode_cuda_graph",'
    assert passes == {"{" + label.format(mode, rank) + "}": 1.0 for rank in (0, 1)}


def test_requests_are_split_by_streaming() -> None:
    stats = Stats()
    stats.requests["true"] += 2
    stats.requests["false"] += 1
    found = samples(render([(stats, [])], "m", 1), "sglang:num_requests_total")
    assert list(found.values()) == [1.0, 2.0]
    assert all('is_streaming="' in labels for labels in found)


def test_a_histogram_is_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert list(histogram.lines("h", {})) == [
        'h_bucket{le="1.0"} 2.0',
        'h_bucket{le="2.0"} 3.0',
        'h_bucket{le="+Inf"} 4.0',
        "h_count{} 4.0",
        "h_sum{} 12.0",
    ]


def test_replicas_are_told_apart_where_schedulers_count_and_added_up_elsewhere() -> None:
    first, second = Stats(), Stats()
    for stats, count in ((first, 2), (second, 3)):
        stats.requests["true"] += count
        stats.ttft_s.observe(count)
    text = render([(s, [Gauge("sglang:page_size", 1)]) for s in (first, second)], "m", 1)
    gauge = samples(text, "sglang:page_size")
    assert ['dp_rank="0"' in labels for labels in gauge] == [True, False]
    assert list(samples(text, "sglang:num_requests_total").values()) == [5.0]
    assert list(samples(text, "sglang:time_to_first_token_seconds_sum").values()) == [5.0]


def test_a_prompt_is_cached_but_for_its_last_token_until_a_flush() -> None:
    cache = PrefixCache(100, is_enabled=True)
    assert cache.look_up(1, 16) == 0
    cache.keep(1, 16)
    assert cache.look_up(1, 16) == 15
    assert cache.look_up(2, 16) == 0
    cache.flush()
    assert cache.look_up(1, 16) == 0


def test_the_least_recently_used_prompt_makes_room() -> None:
    cache = PrefixCache(30, is_enabled=True)
    cache.keep(1, 10)
    cache.keep(2, 10)
    cache.keep(3, 10)
    cache.look_up(1, 10)
    cache.keep(4, 15)
    assert [cache.look_up(prompt, 10) for prompt in (1, 2, 3, 4)] == [9, 0, 0, 9]


def test_without_a_radix_cache_nothing_is_cached() -> None:
    cache = PrefixCache(100, is_enabled=False)
    cache.keep(1, 16)
    assert cache.look_up(1, 16) == 0
