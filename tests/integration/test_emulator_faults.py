"""What an emulated server with a fault does, and what our own client makes of it."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from runner.clock import Clock
from runner.engines.emulator.answers import output_ids, output_text
from runner.engines.emulator.gpu import EmulatedGpus
from runner.engines.processes import LEASE_VARIABLE
from runner.engines.sglang.logs import Verdict, explain_death
from runner.errors import LoadFailed
from runner.load.client import Target
from runner.load.generator import LoadGenerator
from runner.measure.validity import find_reasons
from runner.trial import Lengths, LoadPlan, LoadProtocol, LoadRun, RequestStatus, RungRecord
from tests.emulated_server import LIMIT_S, EmulatedProcess, emulated_server, generate_body

SCALE = 100.0
H200 = ("--profile", "h200-llama-3.1-8b")
GPU_GIB = 1 << 30
PLAN = LoadPlan(
    phase="rung-0",
    protocol=LoadProtocol.BURST,
    concurrency=8,
    prompt_tokens=Lengths.fixed(8),
    output_tokens=Lengths.fixed(12),
    seed=1,
    min_window_s=1.0,
    max_window_s=30.0,
)


@contextmanager
def broken(tmp_path: Path, fault: str, *flags: str) -> Iterator[EmulatedProcess]:
    """A server with a fault that lets it become ready."""
    words = ("--time-scale", str(SCALE), "--fault", fault, *flags)
    with emulated_server(tmp_path / "server.log", *words) as server:
        yield server


@contextmanager
def starting(tmp_path: Path, fault: str, *flags: str) -> Iterator[EmulatedProcess]:
    """A server with a fault that does not."""
    words = ("--time-scale", str(SCALE), "--fault", fault, *flags)
    server = EmulatedProcess(tmp_path / "server.log", *words)
    try:
        yield server
    finally:
        server.end()


def load(server: EmulatedProcess, plan: LoadPlan = PLAN) -> LoadRun:
    """Drive our own load generator against it."""
    return LoadGenerator(Clock(SCALE)).run(plan, [Target(0, server.url)])


def judge(run: LoadRun) -> str:
    """Every reason why the load is no fair measurement."""
    rung = RungRecord(0, PLAN.concurrency, (run,), ())
    return "; ".join(find_reasons(rung, PLAN, float(PLAN.concurrency), ()))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@contextmanager
def open_stream(server: EmulatedProcess, tokens: int, *prompt: int) -> Iterator[socket.socket]:
    """A client that has sent a request and closes its connection when it leaves."""
    body = json.dumps(generate_body(tokens, *prompt, stream=True)).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as connection:
        connection.sendall(head.encode() + body)
        yield connection


# At the start.


def test_all_ranks_die_and_the_first_ones_traceback_is_the_reason(tmp_path: Path) -> None:
    flags = ("--profile", "rtx-pro-6000-x8-kimi-k2.6", "--pp-size", "4", "--tp-size", "2")
    with starting(tmp_path, "die-at-start:KeyError: 'layer 0'", *flags) as server:
        assert server.wait_end() == -signal.SIGKILL
    heads = re.findall(r" (PP\d TP\d)\] Scheduler hit an exception: Traceback", server.log)
    assert len(set(heads)) == len(heads) == 8
    assert server.log.count("Connection closed by peer") == 7
    death = explain_death(server.log, -9)
    assert (death.verdict, death.message) == (
        Verdict.FAILED,
        "the server crashed: KeyError: 'layer 0'",
    )


@pytest.mark.parametrize(
    ("phase", "before"), [("capture", "Capture target decode CUDA graph begin"), ("load", "weight")]
)
def test_out_of_memory_is_infeasible(tmp_path: Path, phase: str, before: str) -> None:
    with starting(tmp_path, f"out-of-memory:{phase}", *H200) as server:
        assert server.wait_end() == -signal.SIGKILL
    said, _, words = server.log.partition("Scheduler hit an exception")
    assert before in said.splitlines()[-2]
    assert ("Capture cuda graph failed: CUDA out of memory." in words) == (phase == "capture")
    death = explain_death(server.log, -9)
    assert death.verdict is Verdict.INFEASIBLE
    assert death.message.startswith("out of GPU memory: ")


def test_what_captures_no_graphs_is_out_of_memory_before(tmp_path: Path) -> None:
    with starting(tmp_path, "out-of-memory") as server:
        assert server.wait_end() == -signal.SIGKILL
    assert explain_death(server.log, -9).verdict is Verdict.INFEASIBLE


def test_a_taken_port_is_found_after_the_load(tmp_path: Path) -> None:
    with starting(tmp_path, "port-taken") as server:
        assert server.wait_end() == 1
    assert "Engine startup timings" in server.log
    assert "[Errno 98] error while attempting to bind on address" in server.log
    assert explain_death(server.log, 1).verdict is Verdict.PORT


def test_a_hang_in_warm_up_is_an_open_port_and_a_silent_log(tmp_path: Path) -> None:
    with starting(tmp_path, "hang-in-warm-up") as server:
        server.wait_for("Uvicorn running")
        assert server.get("/health").status_code == 503
        before = server.log
        assert server.get("/health").status_code == 503
        assert server.process.poll() is None
        assert server.log == before
        assert "fired up" not in before


# Under load.


def test_a_server_that_stops_sending_lives_and_hears_no_abort(tmp_path: Path) -> None:
    with broken(tmp_path, "stop-sending:2requests") as server:
        for number in (1, 2):
            assert server.generate(1, number)["meta_info"]["completion_tokens"] == 1
        with open_stream(server, 50, 7) as connection:
            head = connection.recv(4096)
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert head.endswith(b"\r\n\r\n")
            assert server.post("/abort_request", {"abort_all": True}).status_code == 200
            assert server.post("/flush_cache").status_code == 400
            connection.settimeout(0.3)
            with pytest.raises(TimeoutError):
                connection.recv(1)
        assert server.process.poll() is None
        with pytest.raises(LoadFailed, match="no output token came"):
            load(server)


def read_token(connection: socket.socket) -> None:
    """Until the stream's first event."""
    seen = b""
    while b"data: " not in seen:
        piece = connection.recv(4096)
        assert piece, seen
        seen += piece


def test_ghosts_outlive_client_and_abort_and_then_are_gone(tmp_path: Path) -> None:
    with broken(tmp_path, "ghost-requests:1", "--time-scale", "500") as server:
        with open_stream(server, 3000, 1) as ghost:
            read_token(ghost)
        server.post("/abort_request", {"abort_all": True})
        with open_stream(server, 3000, 2) as other:
            read_token(other)
        server.post("/abort_request", {"abort_all": True})
        assert server.post("/flush_cache").status_code == 400
        assert server.get("/v1/loads").json()["loads"][0]["num_running_reqs"] >= 1
        wait_until(lambda: server.post("/flush_cache").status_code == 200)
        assert server.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 0


def test_chunks_carry_several_tokens_and_all_are_counted(tmp_path: Path) -> None:
    with broken(tmp_path, "chunks:1,3,2; cached-prompts") as server:
        events = server.events("/generate", generate_body(12))
        run = load(server)
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert [after - before for before, after in pairwise([0, *counts])] == [1, 3, 2, 1, 3, 2]
    assert {record.output_tokens for record in run.records} == {12}
    assert {record.status for record in run.records} == {RequestStatus.OK}
    assert all(record.cached_tokens == record.prompt_tokens - 1 for record in run.records)
    assert "the prefix cache served 88% of the prompt tokens" in judge(run)


def test_wrong_counts_are_found_out(tmp_path: Path) -> None:
    with broken(tmp_path, "short-output:5; wrong-counts:+2") as server:
        events = server.events("/generate", generate_body(12))
        with pytest.raises(LoadFailed, match="the server counts 14 tokens but has sent 7"):
            load(server)
        document = server.generate(12)
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts == [1, 2, 3, 4, 5, 6, 14]
    assert [len(each["output_ids"]) for each in (events[-1], document)] == [7, 7]
    assert document["meta_info"]["completion_tokens"] == 14


def test_errors_inside_streams_are_failures(tmp_path: Path) -> None:
    with broken(tmp_path, "stream-errors:0.5", "--fault-seed", "3") as server:
        streams = [server.events("/generate", generate_body(3, n)) for n in range(12)]
        failed = [events for events in streams if "error" in events[-1]]
        assert 1 <= len(failed) <= 11
        assert {len(events) for events in failed} == {2}
        assert {events[-1]["error"]["code"] for events in failed} == {500}
        assert server.generate(3)["meta_info"]["completion_tokens"] == 3
        with pytest.raises(LoadFailed, match="error in the stream: Internal server error"):
            load(server, replace(PLAN, protocol=LoadProtocol.CLOSED_LOOP, min_window_s=200.0))
        wait_until(lambda: server.post("/flush_cache").status_code == 200)


def outputs(server: EmulatedProcess) -> tuple[list[int], str, str, str]:
    """What three routes answer to one prompt."""
    body: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 9}
    message = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    chunks = server.events("/v1/chat/completions", message)
    return (
        server.generate(9)["output_ids"],
        server.events("/generate", generate_body(9))[-1]["text"],
        server.post("/v1/completions", body).json()["choices"][0]["text"],
        "".join(chunk["choices"][0]["delta"]["content"] or "" for chunk in chunks),
    )


def test_garbled_output_differs_in_one_token_on_every_route(tmp_path: Path) -> None:
    pipeline = ("--pp-size", "2", "--max-running-requests", "16")
    with broken(tmp_path, "garbled-output", *pipeline, "--pp-async-batch-depth", "2") as server:
        garbled = outputs(server)
        assert garbled == outputs(server)
    ids = json.loads(b"[%b]" % output_ids(9))
    differing = [a != b for a, b in zip(ids, garbled[0], strict=True)]
    assert differing.count(True) == 1
    for text in garbled[1:]:
        words = zip(output_text(9).decode().split(), text.split(), strict=True)
        assert [a != b for a, b in words] == differing


def test_hot_gpus_slow_down_and_say_so(tmp_path: Path) -> None:
    machine = tmp_path / "machine"
    flags = ("--gpu-folder", str(machine), "--random-seed", "1")
    with broken(tmp_path, "heat:5,0.5", *flags) as server:
        gpus = EmulatedGpus(machine, Clock(SCALE))
        (uuid, *_) = (gpu.uuid for gpu in gpus.gpus())
        cool = gpus.read(uuid)
        with open_stream(server, 3000):
            wait_until(lambda: gpus.read(uuid).throttled is True)
            hot = gpus.read(uuid)
        gpus.close()
    assert cool.throttled is False
    assert cool.sm_clock_mhz is not None
    assert hot.sm_clock_mhz == pytest.approx(cool.sm_clock_mhz / 2)


# After the end.


def test_memory_comes_back_a_while_after_the_end(tmp_path: Path) -> None:
    machine = tmp_path / "machine"
    with broken(tmp_path, "hold-memory:200", *H200, "--gpu-folder", str(machine)) as server:
        gpus = EmulatedGpus(machine, Clock(SCALE))
        uuid = gpus.gpus()[0].uuid
        used = gpus.read(uuid).memory_used_bytes
        server.end()
        assert gpus.read(uuid).memory_used_bytes == used
        assert gpus.processes(uuid) == ()
        assert (used or 0) > 100 * GPU_GIB
        wait_until(lambda: gpus.read(uuid).memory_used_bytes == 0)
        gpus.close()


def test_a_child_outlives_its_server_with_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LEASE_VARIABLE, "a-token")
    machine = tmp_path / "machine"
    flags = (*H200, "--gpu-folder", str(machine))
    with broken(tmp_path, "leave-child:session", *flags) as server:
        (child,) = psutil.Process(server.process.pid).children()
        try:
            gpus = EmulatedGpus(machine, Clock(SCALE))
            uuid = gpus.gpus()[0].uuid
            server.signal(signal.SIGKILL)
            server.process.wait()
            child.terminate()
            assert child.is_running()
            assert child.cmdline()[0].startswith("sglang::scheduler")
            assert child.environ()[LEASE_VARIABLE] == "a-token"
            ((pid, held),) = ((each.pid, each.memory_used_bytes) for each in gpus.processes(uuid))
            assert pid == child.pid
            assert (held or 0) > 100 * GPU_GIB
            gpus.close()
        finally:
            child.kill()
            psutil.wait_procs([child], LIMIT_S)


def test_an_unknown_fault_is_a_usage_error(tmp_path: Path) -> None:
    with starting(tmp_path, "explode") as server:
        assert server.wait_end() == 2
    last = server.log.splitlines()[-1]
    assert "unknown fault 'explode'; known are none, die-at-start" in last
    assert explain_death(server.log, 2).verdict is Verdict.INFEASIBLE
