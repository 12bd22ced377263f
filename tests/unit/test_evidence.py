"""What samples of decode passes come to, and in which windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from runner.measure.evidence import evidence_of, near
from runner.measure.evidence_words import FindingKind, evidence_words, findings
from runner.measure.metrics import judge_rung
from runner.trial import (
    BatchSample,
    ClientHealth,
    Evidence,
    LoadRun,
    Params,
    RungRecord,
    RungResult,
)
from tests.samples import make_result, make_rung

WINDOW = (10.0, 20.0)


def line(
    time_s: float,
    running: int = 8,
    waiting: int = 0,
    *,
    in_graph: bool | None = True,
    kv_usage: float | None = None,
    replica: int = 0,
) -> BatchSample:
    return BatchSample(time_s, replica, 0, running, waiting, in_graph=in_graph, kv_usage=kv_usage)


def counters(time_s: float, graph: int, eager: int, replica: int = 0) -> BatchSample:
    return BatchSample(time_s, replica, graph_passes=graph, eager_passes=eager)


def evidence(*samples: BatchSample, windows: Sequence[tuple[float, float]] = (WINDOW,)) -> Evidence:
    return evidence_of(samples, windows)


def test_without_samples_nothing_is_known() -> None:
    assert evidence() == Evidence()
    assert evidence(line(9.0), line(21.0)) == Evidence()


def test_lines_inside_the_windows_count_and_no_others() -> None:
    told = evidence(
        *(line(10.0, 99, 99), line(10.1, 2, 1), line(20.0, 4, 3), line(20.1, 99, 99)),
        *(line(29.9, 99, 99), line(31.0, 6, 5)),
        windows=(WINDOW, (30.0, 40.0)),
    )
    assert (told.batch_mean, told.batch_max) == (4.0, 6)
    assert (told.queue_mean, told.queue_max) == (3.0, 5)
    assert told.schedulers == 1


def test_queues_of_servers_add_up_and_their_batches_do_not() -> None:
    told = evidence(
        *(line(11, 8, 2), line(12, 8, 4), line(13, 8, 6)),
        *(line(11, 4, 10, replica=1),),
    )
    assert (told.batch_mean, told.batch_max) == (7.0, 8)
    assert (told.queue_mean, told.queue_max) == (14.0, 16)
    assert told.schedulers == 2


def test_lines_that_leave_something_out_say_nothing_of_it() -> None:
    bare = BatchSample(11.0, 0, running=3)
    assert evidence(bare) == Evidence(
        batch_mean=3.0, batch_max=3, retractions=0, schedulers=1, pauses=0, paused_s=0.0
    )


def test_the_largest_use_of_the_cache_and_every_retraction() -> None:
    told = evidence(
        *(line(11, kv_usage=0.5), line(12, kv_usage=0.97), line(25, kv_usage=0.99)),
        *(BatchSample(12.5, 0, retracted=3), BatchSample(13, 0, retracted=2)),
        BatchSample(21, 0, retracted=100),
    )
    assert (told.kv_usage_max, told.retractions) == (0.97, 5)


def test_retractions_are_unknown_where_nothing_is_said() -> None:
    assert evidence(counters(10, 0, 0), counters(20, 5, 5)).retractions is None
    assert evidence(BatchSample(12.5, 0, retracted=3)).retractions == 3


def test_stops_of_all_servers_add_up() -> None:
    told = evidence(
        *(
            line(11),
            line(12),
            BatchSample(12.5, 0, paused_s=0.45),
            BatchSample(13, 1, paused_s=0.4),
        ),
        BatchSample(21, 0, paused_s=0.5),
    )
    assert told.pauses == 2
    assert told.paused_s == pytest.approx(0.85)
    assert (evidence(line(11)).pauses, evidence(line(11)).paused_s) == (0, 0.0)


def late(time_s: float, share: float, replica: int = 0) -> BatchSample:
    return BatchSample(time_s, replica, late_share=share)


def test_an_emulation_is_late_until_it_says_otherwise() -> None:
    assert evidence(line(11.0)).late_share is None
    assert evidence(late(5.0, 0.5), late(9.0, 0.0), line(11.0)).late_share == 0.0
    assert evidence(late(5.0, 0.5), line(11.0), late(21.0, 0.9)).late_share == 0.5
    assert evidence(late(5.0, 0.0), late(12.0, 0.4), late(13.0, 0.3)).late_share == 0.4
    assert evidence(late(5.0, 0.6), late(6.0, 0.0, replica=1)).late_share == 0.6


def test_near_a_window_is_what_was_said_last_of_being_late() -> None:
    samples = (late(1.0, 0.9), late(2.0, 0.5), late(3.0, 0.2, 1), line(11.0), late(30.0, 0.7))
    assert near(samples, 10.0, 20.0) == samples[1:4]


def test_counters_decide_the_share_of_graphs() -> None:
    told = evidence(
        *(counters(8.0, 100, 100), counters(12.0, 140, 100), counters(16.0, 150, 130)),
        *(counters(20.0, 150, 170), line(15, in_graph=True)),
    )
    assert told.graph_share == pytest.approx(30 / (30 + 70))  # from 120 graph, 100 eager at 10 s


def test_counters_of_all_servers_and_windows_add_up() -> None:
    told = evidence(
        *(counters(10, 0, 0), counters(10, 0, 0, replica=1)),
        *(counters(20, 30, 0), counters(20, 0, 10, replica=1)),
        *(counters(30, 99, 99), counters(30, 0, 10, replica=1)),
        *(counters(40, 99, 119), counters(40, 0, 50, replica=1)),
        windows=(WINDOW, (30.0, 40.0)),
    )
    assert told.graph_share == pytest.approx(1.0 * 30 / 100)


def test_lines_decide_where_counters_are_too_far_apart_or_none() -> None:
    lines = (line(11, in_graph=True), line(12, in_graph=False), line(13, in_graph=False))
    far = (counters(0, 0, 0), counters(30, 100, 0))
    third = pytest.approx(1 / 3)
    assert evidence(*lines).graph_share == third
    assert evidence(*far, *lines).graph_share == third
    assert evidence(*far).graph_share == 1.0


@pytest.mark.parametrize(
    "samples",
    [
        (counters(10, 50, 50), counters(20, 10, 60)),
        (counters(10, 50, 50), counters(20, 50, 50)),
        (counters(12, 50, 50), counters(20, 90, 50)),
        (counters(15, 50, 50),),
    ],
)
def test_counters_that_were_reset_stood_still_or_do_not_reach_say_nothing(
    samples: tuple[BatchSample, ...],
) -> None:
    assert evidence(*samples).graph_share is None


def test_near_a_window_are_its_samples_and_the_counters_beyond() -> None:
    wanted = (
        counters(7, 1, 0),
        counters(8, 1, 0, replica=1),
        *(line(10), counters(15, 2, 0), line(20)),
        counters(22, 3, 0, replica=1),
        counters(25, 3, 0),
    )
    others = (counters(5, 0, 0), line(9), line(21), counters(23, 4, 0, replica=1))
    samples = sorted((*wanted, *others), key=lambda sample: sample.time_s)
    assert near(samples, *WINDOW) == wanted
    assert near((), *WINDOW) == ()


def test_a_rung_is_judged_with_its_evidence_in_the_windows_that_count() -> None:
    load = LoadRun((), 0.0, *WINDOW, is_steady=True, client=ClientHealth(0.1, 0.0))
    rung = RungRecord(0, 32, (load,), (), (line(5, 99), line(15, 8, 3), line(21, 99)))
    assert judge_rung(rung, ()).evidence == Evidence(
        1.0, 8.0, 8, 3.0, 3, None, retractions=0, schedulers=1, pauses=0, paused_s=0.0
    )


def rung_with(told: Evidence, concurrency: int = 32) -> RungResult:
    rung = make_rung(concurrency, 100.0)
    return replace(rung, achieved_concurrency=float(concurrency), evidence=told)


def found(told: Evidence, resolved: Params) -> list[tuple[FindingKind, str]]:
    result = replace(make_result(1, 100.0), resolved=resolved, rungs=(rung_with(told),))
    return [(finding.kind, finding.words) for finding in findings(result)]


def test_few_passes_in_a_graph_are_found_where_graphs_are_on() -> None:
    told = Evidence(graph_share=0.12, batch_max=9)
    graphs: Params = {"cuda_graph": True, "cuda_graph_max_bs": 8}
    words = "only 12 % in one (batches up to 9, graphs up to 8)"
    assert found(told, graphs) == [(FindingKind.GRAPHS, words)]
    assert found(told, {"cuda_graph": True}) == [(FindingKind.GRAPHS, "only 12 % in one")]
    assert found(told, {"cuda_graph": False}) == []
    assert found(Evidence(graph_share=0.97, batch_max=9), graphs) == []
    assert found(Evidence(batch_max=9), graphs) == []


@pytest.mark.parametrize(
    ("resolved", "room"),
    [
        ({}, ""),
        (
            {"pp_size": 8, "pp_async_batch_depth": 2, "pp_max_micro_batch_size": 2},
            " (32 in flight, room for 20: 10 slots of at most 2)",
        ),
        (
            {"pp_size": 8, "pp_max_micro_batch_size": 4, "max_running_requests": 16},
            " (32 in flight, room for 16: max_running_requests 16)",
        ),
        ({"pp_size": 1, "pp_max_micro_batch_size": 1, "max_running_requests": 64}, ""),
        ({"pp_size": 8, "pp_max_micro_batch_size": 4, "max_running_requests": 64}, ""),
    ],
)
def test_a_queue_is_found_with_the_room_that_the_servers_have(resolved: Params, room: str) -> None:
    assert found(Evidence(queue_mean=12.0, schedulers=1), resolved) == [
        (FindingKind.QUEUE, f"12 on average{room}")
    ]


def test_rooms_of_servers_add_up() -> None:
    told = Evidence(queue_mean=12.5, schedulers=2)
    ((_, words),) = found(told, {"max_running_requests": 10})
    assert words == (
        "12 on average (32 in flight, room for 20: max_running_requests 10 on each of 2 servers)"
    )


@pytest.mark.parametrize("queue", [None, 0.0, 0.9, 1.5])
def test_requests_that_have_just_come_are_no_queue(queue: float | None) -> None:
    assert found(Evidence(queue_mean=queue, schedulers=1), {}) == []


def test_retractions_are_found() -> None:
    assert found(Evidence(retractions=0), {}) == []
    assert found(Evidence(retractions=1), {}) == [(FindingKind.RETRACTIONS, "one of them")]
    assert found(Evidence(retractions=30), {}) == [(FindingKind.RETRACTIONS, "30 of them")]


def test_stops_are_found_where_they_take_a_share_of_the_windows() -> None:
    """Windows of a second or so, as the samples have."""
    window_s = make_rung(32, 1.0).window_s
    long = Evidence(pauses=2, paused_s=0.1 * window_s)
    ((kind, words),) = found(long, {})
    assert kind is FindingKind.PAUSES
    assert words.startswith("2 times, ")
    assert "freeze_gc" in kind
    assert found(Evidence(pauses=1, paused_s=0.001 * window_s), {}) == []
    assert found(Evidence(pauses=0, paused_s=0.0), {}) == []


def test_a_late_emulation_is_found() -> None:
    assert found(Evidence(late_share=0.0), {}) == []
    ((kind, words),) = found(Evidence(late_share=0.42), {})
    assert kind is FindingKind.LATE
    assert words == "tokens late by 42 % of their time"


def test_a_rungs_evidence_in_words() -> None:
    told = Evidence(graph_share=1.0, batch_mean=7.96, batch_max=8, queue_mean=0.0)
    assert evidence_words(rung_with(told)) == (
        "100 % of decode passes in a CUDA graph, 8.0 requests a micro-batch (at most 8), "
        "0 waiting on average"
    )
    assert evidence_words(rung_with(Evidence())) == ""
