"""How an emulated server ends: exit codes and last words as SGLang's."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest
import requests

from runner.engines.sglang.logs import Verdict, explain_death
from tests.emulated_server import READY, EmulatedProcess, generate_body

SCALE = ("--time-scale", "100")


class Start(Protocol):
    def __call__(self, *flags: str, visible: str | None = None) -> EmulatedProcess: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as ends:

        def make(*flags: str, visible: str | None = None) -> EmulatedProcess:
            server = EmulatedProcess(tmp_path / "server.log", *SCALE, *flags, visible=visible)
            ends.callback(server.end)
            return server

        yield make


@pytest.mark.parametrize(
    ("flags", "code", "last_words"),
    [
        ("--no-such-flag 7", 2, "sglang serve: error: unrecognized arguments: --no-such-flag 7"),
        ("--profile nowhere", 2, "there is no hardware profile 'nowhere'"),
        ("--dp-size 2", 1, "ValueError: dp_size 2 is not supported"),
        ("--attention-backend fa3", -9, "ValueError: Not supported by this model on this machine"),
        ("--mem-fraction-static 0.999", -9, "torch.OutOfMemoryError: CUDA out of memory."),
        ("--tp-size 2 --pp-size 2", -9, "torch.AcceleratorError: CUDA error: invalid device ord"),
        ("--fault die-at-start", -9, "IndexError: list index out of range"),
    ],
)
def test_a_start_that_fails(start: Start, flags: str, code: int, last_words: str) -> None:
    server = start(*flags.split())
    assert server.wait_end() == code
    assert any(line.startswith(last_words) for line in server.log.splitlines())
    if code == -signal.SIGKILL:
        assert "Scheduler hit an exception: Traceback (most recent call last):" in server.log
        assert "Received sigquit from a child process. It usually means" in server.log
        assert "Uvicorn" not in server.log


def test_too_little_memory_for_the_cache_is_sglangs_advice(start: Start) -> None:
    server = start("--mem-fraction-static", "0.001")
    assert server.wait_end() == -signal.SIGKILL
    assert "Not enough memory. Please try to increase --mem-fraction-static." in server.log
    assert explain_death(server.log, -9).verdict is Verdict.INFEASIBLE


def test_a_server_that_sees_too_few_gpus_dies(start: Start) -> None:
    server = start("--pp-size", "2", visible="0")
    assert server.wait_end() == -signal.SIGKILL
    assert " PP1] Scheduler hit an exception" in server.log
    assert "invalid device ordinal" in explain_death(server.log, -9).message


def test_a_gpu_that_a_neighbour_fills_is_out_of_memory(start: Start, tmp_path: Path) -> None:
    machine = ("--gpu-folder", str(tmp_path / "machine"), "--max-total-tokens", "3000000")
    first = start(*machine, "--mem-fraction-static", "0.9")
    first.wait_for(READY)
    second = EmulatedProcess(tmp_path / "second.log", *SCALE, *machine)
    assert second.wait_end() == -signal.SIGKILL
    assert "CUDA out of memory" in second.log


def test_a_server_that_hangs_at_its_start_says_nothing_more(start: Start) -> None:
    server = start("--fault", "hang-at-start")
    server.wait_for("Memory baseline taken.")
    before = server.log
    time.sleep(0.5)
    assert server.process.poll() is None
    assert server.log == before


def test_a_crash_under_load_leaves_streams_without_an_end(start: Start) -> None:
    server = start("--fault", "die-after-requests:2", "--time-scale", "500")
    server.wait_for(READY)
    body = generate_body(3000, stream=True)
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=60) as stream:
        server.generate(1, 5)
        server.generate(1, 6)
        with pytest.raises(requests.exceptions.ChunkedEncodingError):
            list(stream.iter_lines())
    assert server.wait_end() == -signal.SIGKILL
    assert "SIGQUIT received. signum=None, frame=None." in server.log
    assert explain_death(server.log, -9).message.endswith("emulated fault: died after 2 requests")


def test_a_taken_port_ends_the_server_with_1(start: Start) -> None:
    first = start()
    first.wait_for(READY)
    second = start("--port", str(first.port))
    assert second.wait_end() == 1
    assert "[Errno 98] error while attempting to bind on address" in second.log
    assert explain_death(second.log, 1).verdict is Verdict.PORT


def test_sigterm_drains_what_runs_and_ends_with_0(start: Start) -> None:
    server = start("--pp-size", "2", "--time-scale", "50")
    server.wait_for(READY)
    body = generate_body(100, stream=True)
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=60) as stream:
        server.signal(signal.SIGTERM)
        server.wait_for("SIGTERM received.")
        assert server.get("/health").status_code == 503
        events = [line for line in stream.iter_lines() if line]
    assert len(events) == 101
    assert server.wait_end() == 0
    assert "Gracefully exiting... Remaining number of requests 0." in server.log
    assert "Schedulers still alive 15s after ShutdownReq" in server.log


def test_sigint_ends_with_0_at_once(start: Start) -> None:
    server = start()
    server.wait_for(READY)
    body = generate_body(3000, stream=True)
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=60):
        server.signal(signal.SIGINT)
        assert server.wait_end() == 0


def test_sigquit_is_a_dead_child(start: Start) -> None:
    server = start()
    server.wait_for(READY)
    server.signal(signal.SIGQUIT)
    assert server.wait_end() == -signal.SIGKILL
