"""An emulated server's stops for garbage collection: in its log, in its replies, and frozen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from runner.engines.sglang.batch_words import PauseWords, read_line
from runner.machine.profile import load_profile, profile_text
from tests.emulated_server import EmulatedProcess, emulated_server

PAUSE_S = 0.5
TOKENS = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedProcess]:
    """Stops each 100 tokens, the first time after 8."""
    folder = tmp_path_factory.mktemp("pauses")
    profile = load_profile("cpu-blocking-pp2")
    host = replace(profile.host, pause_s=PAUSE_S, pause_tokens=100.0)
    path = folder / "pausing.yaml"
    path.write_text(profile_text(replace(profile, host=host)))
    flags = ("--profile", str(path), "--time-scale", "20", "--gc-warning-threshold-secs", "0.05")
    with emulated_server(folder / "server.log", *flags) as process:
        yield process


def stops(server: EmulatedProcess) -> list[float]:
    said = (read_line(line) for line in server.log.splitlines())
    return [words.paused_s for _, words in filter(None, said) if isinstance(words, PauseWords)]


def test_a_stop_is_said_and_frozen_garbage_stops_nothing(server: EmulatedProcess) -> None:
    for _ in range(3):
        server.generate(TOKENS)
    assert stops(server) == [PAUSE_S] * 2  # after 8 and after 108 tokens

    assert server.post("/freeze_gc").status_code == 200
    for _ in range(5):
        server.generate(TOKENS)
    assert len(stops(server)) == 2
