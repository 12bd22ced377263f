"""The server without a model, and what the load generator says when it is the limit itself."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace

import psutil
import pytest

from runner.clock import Clock
from runner.cluster.handles import LocalLoad
from runner.cluster.servers import check_loads
from runner.errors import LoadFailed
from runner.load.api import Api
from runner.load.client import Target
from runner.load.generator import LoadGenerator, LoadProgress
from runner.load.self_check import check_generator, null_server, read_report
from runner.measure.metrics import judge_rung
from runner.trial import Lengths, LoadPlan, LoadProtocol, RequestStatus, RungRecord

BURST = LoadPlan(
    phase="rung-0",
    protocol=LoadProtocol.BURST,
    concurrency=8,
    prompt_tokens=Lengths.fixed(8),
    output_tokens=Lengths.fixed(12),
    seed=1,
    min_window_s=0.2,
    max_window_s=5.0,
)
LOOP = replace(BURST, protocol=LoadProtocol.CLOSED_LOOP, precision=1.0)


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize("slots", ["1", "5"])
def test_every_interface_sends_all_tokens(api: Api, slots: str) -> None:
    options = ("--period", "0.005", "--tokens", "12", "--slots", slots)
    with null_server(*options) as url:
        run = LoadGenerator(Clock()).run(BURST, [Target(0, url, api)])
        told = read_report(url)
        again = read_report(url)
    found = [(record.status, record.output_tokens) for record in run.records]
    assert found == [(RequestStatus.OK, 12)] * 8
    assert {record.prompt_tokens for record in run.records} == {256}
    # One token at a time: none of the times is another one's.
    assert all(len(set(record.token_s)) > 1 for record in run.records)
    assert told["events"] == 8 * 12
    assert told["blocked"] == 0
    assert 0 < told["late_p50_s"] <= told["late_p99_s"] <= told["late_max_s"]
    assert told["ttft_p50_s"] > 0
    assert again["events"] == 0


def test_streams_that_are_cut_are_forgotten() -> None:
    with null_server("--period", "0.002", "--tokens", "12") as url:
        for phase in ("rung-0", "rung-1"):
            run = LoadGenerator(Clock()).run(replace(LOOP, phase=phase), [Target(0, url)])
            result = judge_rung(RungRecord(0, 8, (run,), ()), ())
            assert result.errors == 0
            assert result.achieved_concurrency > 6


def test_it_ends_with_the_one_who_started_it() -> None:
    code = (
        "import time; from runner.load.self_check import null_server\n"
        "with null_server() as url: print(url, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith(b"http://127.0.0.1:")
        (server,) = psutil.Process(parent.pid).children()
        parent.kill()
    psutil.wait_procs([server], timeout=10)
    assert not server.is_running()


def test_a_server_that_does_not_start_is_said() -> None:
    with pytest.raises(LoadFailed, match=r"the null server did not start: .*--tokens few"):
        null_server("--tokens", "few").__enter__()


def test_a_flooded_generator_says_that_it_was_the_limit() -> None:
    """Two million tokens a second, 200 a write: no client of one core reads them."""
    plan = replace(BURST, concurrency=100, output_tokens=Lengths.fixed(2000))
    with null_server("--period", "0.01", "--tokens", "2000", "--burst", "200") as url:
        run = LoadGenerator(Clock()).run(plan, [Target(0, url, Api.COMPLETIONS)])
    result = judge_rung(RungRecord(0, 100, (run,), ()), (), plan)
    assert sum(record.output_tokens for record in run.records) == 200_000
    assert not result.valid
    assert any("the load generator was the limit" in reason for reason in result.reasons)


def test_a_generator_whose_thread_is_held_up_says_that_it_was_the_limit() -> None:
    is_over = threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            sum(range(1000))

    others = [threading.Thread(target=compute) for _ in range(20)]

    def hold_up(_: LoadProgress) -> None:
        for other in others:
            if other.ident is None:
                other.start()

    plan = replace(BURST, concurrency=1, output_tokens=Lengths.fixed(75))
    with null_server("--period", "0.02", "--tokens", "75") as url:
        try:
            run = LoadGenerator(Clock()).run(plan, [Target(0, url)], on_progress=hold_up)
        finally:
            is_over.set()
    result = judge_rung(RungRecord(0, 1, (run,), ()), (), plan)
    assert not result.valid
    assert any("the load generator was the limit: it ran" in reason for reason in result.reasons)


def test_a_generator_is_tried_with_its_part_of_the_streams() -> None:
    check = check_generator(5, shard=1, shards=2)
    assert check.streams == 2
    assert 0 < check.tokens_per_s <= 2 * 1.5 / 0.02
    assert check.cpu_us > 0
    assert 0 < check.cpu_share < 1
    assert check.most_streams > 2


def test_as_many_generators_are_tried_as_the_streams_are_worth() -> None:
    loads = tuple(LocalLoad(Clock(50.0)) for _ in range(3))
    assert [check.streams for check in check_loads(loads, 600)] == [300, 300]
    assert [check.streams for check in check_loads(loads[:1], 4)] == [4]
