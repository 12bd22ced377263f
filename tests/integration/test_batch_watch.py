"""What servers say of their decode passes is seen, with real servers, real logs and real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runner.clock import Clock
from runner.cluster.inline import InlineExecutor
from runner.engines.sglang.batch_watch import BatchWatch
from runner.engines.sglang.control import Control
from runner.engines.sglang.logs import LogReader
from runner.launch import plan_launch
from runner.measure.evidence import evidence_of
from runner.trial import (
    BatchSample,
    LaunchSpec,
    Lengths,
    LoadPlan,
    LoadProtocol,
    LoadStart,
    Params,
)
from tests.emulated_server import EmulatedProcess, emulated_server
from tests.studies import DEMO, study

CLOCK = Clock()
CPU_PP2 = (
    *("--profile", "cpu-blocking-pp2", "--time-scale", "20", "--disable-radix-cache"),
    *("--pp-size", "2", "--max-running-requests", "16", "--decode-log-interval", "1"),
)
LINE = "[2026-11-29 12:39:49 PP0] Decode batch, #running-req: {}, cuda graph: True, #queue-req: 0\n"
KIMI = study(
    DEMO, engine={"kind": "emulated", "profile": DEMO["engine"]["profile"], "time_scale": 40}
)
PIPELINE: Params = {"tp_size": 1, "pp_size": 8, "max_running_requests": 64}


@contextmanager
def watching(log_path: Path, url: str, replica: int = 0) -> Iterator[BatchWatch]:
    log = LogReader(log_path, log_path.stat().st_size)
    watch = BatchWatch(replica, log, Control(url, str(log_path), 2.0), CLOCK)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


def told(watch: BatchWatch, start_s: float) -> tuple[list[BatchSample], list[BatchSample]]:
    """Lines and counters since `start_s`."""
    samples = watch.samples(start_s, CLOCK.now_s() + 60.0)
    lines = [sample for sample in samples if sample.running is not None]
    return lines, [sample for sample in samples if sample.graph_passes is not None]


def test_each_decode_pass_is_seen_once_of_two_ranks(tmp_path: Path) -> None:
    start_s = CLOCK.now_s()
    with emulated_server(tmp_path / "server.log", *CPU_PP2, "--enable-metrics") as server:
        server.generate(9, *range(16))  # decode passes before anyone watches
        with watching(tmp_path / "server.log", server.url, replica=3) as watch:
            watch.look()
            server.generate(24, *range(16))
            watch.look()
            lines, counters = told(watch, start_s)
    assert [(line.running, line.waiting, line.in_graph) for line in lines] == [(1, 0, False)] * 23
    assert {(line.replica, line.dp_rank) for line in lines} == {(3, 0)}
    assert all(line.kv_usage is not None and line.kv_usage < 0.1 for line in lines)
    before, after = counters[0].eager_passes, counters[-1].eager_passes
    assert before is not None
    assert after == before + 23
    assert {sample.graph_passes for sample in counters} == {0}
    assert [line.time_s for line in lines] == sorted(line.time_s for line in lines)


def test_a_server_without_counters_is_asked_for_them_once(tmp_path: Path) -> None:
    start_s = CLOCK.now_s()
    with emulated_server(tmp_path / "server.log", *CPU_PP2) as server:
        with watching(tmp_path / "server.log", server.url) as watch:
            watch.look()
            server.generate(3, *range(16))
            watch.look()
            lines, counters = told(watch, start_s)
        assert asked_for_metrics(server) == 1
    assert (len(lines), counters) == (2, [])


def asked_for_metrics(server: EmulatedProcess) -> int:
    return server.log.count('"GET /metrics HTTP/1.1" 404')


def test_the_watch_begins_where_the_log_ends_and_takes_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(LINE.format(1) + LINE.format(2)[:60])
    start_s = CLOCK.now_s()
    with watching(path, "http://127.0.0.1:9") as watch, path.open("a") as log:
        log.write(LINE.format(2)[60:] + LINE.format(3) + LINE.format(4)[:60])
        log.flush()
        watch.look()
        assert [line.running for line in told(watch, start_s)[0]] == [3]
        log.write(LINE.format(4)[60:])
        log.flush()
        lines, counters = told(watch, start_s)
    assert ([line.running for line in lines], counters) == ([3, 4], [])


def plan_of(concurrency: int) -> LoadPlan:
    """Streams that begin together, so that the first is launched alone and others fill slots."""
    return LoadPlan(
        phase="rung-0",
        protocol=LoadProtocol.CLOSED_LOOP,
        concurrency=concurrency,
        prompt_tokens=Lengths.fixed(16),
        output_tokens=Lengths.fixed(128),
        seed=0,
        max_window_s=40.0,
        start=LoadStart.TOGETHER,
    )


@pytest.mark.parametrize(
    ("args", "concurrency", "low", "high"),
    [
        ({"cuda_graph": True}, 8, 1.0, 1.0),
        ({"cuda_graph": True, "cuda_graph_max_bs": 4}, 32, 0.02, 0.6),
    ],
)
def test_a_launch_tells_of_its_graphs_and_micro_batches(
    tmp_path: Path, args: Params, concurrency: int, low: float, high: float
) -> None:
    plan = plan_launch(KIMI, {**PIPELINE, **args})
    spec = LaunchSpec(0, plan.key, plan.server_args, plan.replicas, plan.gpus_per_replica)
    executor = InlineExecutor(KIMI, tmp_path / "machine", tmp_path / "leases")
    with executor.launch(spec, tmp_path / "launch", lambda _: None) as servers:
        resolved = servers.set_live({})
        load = servers.run_load(plan_of(concurrency))
        evidence = evidence_of(servers.read_batches(*load.window), [load.window])
    assert not {"enable_metrics", "decode_log_interval"} & set(resolved)
    assert evidence.graph_share is not None
    assert low <= evidence.graph_share <= high
    assert evidence.batch_max is not None
    assert 5 <= evidence.batch_max <= 8  # eight are the most of a slot, and the first came alone
    assert concurrency == 8 or evidence.batch_max == 8
    assert (evidence.retractions, evidence.schedulers) == (0, 1)
