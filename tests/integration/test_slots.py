"""Bursts over HTTP fill the slots of an emulated server as they filled those of a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulated_server import EmulatedProcess, emulated_server, generate_body
from tests.slot_bursts import BURSTS, send_at_once, sequence

FLAGS = (
    *("--profile", "cpu-blocking-pp2", "--time-scale", "1", "--disable-radix-cache"),
    *("--pp-size", "2", "--pp-async-batch-depth", "2", "--max-running-requests", "16"),
    *("--decode-log-interval", "1"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedProcess]:
    folder: Path = tmp_path_factory.mktemp("slots")
    with emulated_server(folder / "server.log", *FLAGS) as process:
        yield process


@pytest.mark.parametrize(("cap", "count", "expected"), BURSTS)
def test_a_burst(server: EmulatedProcess, cap: int, count: int, expected: str) -> None:
    body = {"server_args": {"pp_max_micro_batch_size": cap}}
    assert server.post("/set_internal_state", body).json() == [True]
    before = len(server.log)
    send_at_once(server.port, json.dumps(generate_body(8, *range(16))).encode(), count)
    assert sequence(server.log[before:]).startswith(expected)
