"""Starts emulated servers as real processes, for tests that talk to them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

READY = "The server is fired up and ready to roll!"
LIMIT_S = 60.0


class EmulatedProcess:
    """One emulated server, started and perhaps not ready yet."""

    def __init__(self, log_path: Path, *flags: str, visible: str | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log_path = log_path
        environment = {key: value for key, value in os.environ.items() if "CUDA" not in key}
        if visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        command = (sys.executable, "-m", "runner.engines.emulator", "--port", str(self.port))
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                (*command, *flags), stdout=log, stderr=log, env=environment, start_new_session=True
            )

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    def wait_for(self, text: str) -> None:
        """Until the log says so."""
        deadline_s = time.monotonic() + LIMIT_S
        while text not in self.log:
            assert self.process.poll() is None, f"the server ended: {self.log}"
            assert time.monotonic() < deadline_s, f"no {text!r} in: {self.log}"
            time.sleep(0.02)

    def wait_end(self) -> int:
        return self.process.wait(LIMIT_S)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=LIMIT_S)

    def post(self, path: str, body: object = None) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=LIMIT_S)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The JSON of a stream's events; it must end with [DONE]."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        lines = [line for line in answer.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def generate(self, tokens: int, *prompt: int, **more: object) -> dict[str, Any]:
        """One request without a stream; the JSON of the answer."""
        answer: dict[str, Any] = self.post(
            "/generate", generate_body(tokens, *prompt, **more)
        ).json()
        return answer


def leave_idle(server: EmulatedProcess) -> None:
    """End whatever a test left running, so that the next one finds the server idle."""
    server.post("/continue_generation", {})
    server.post("/abort_request", {"abort_all": True})
    assert server.get("/flush_cache?timeout=100").status_code == 200


def generate_body(tokens: int, *prompt: int, **more: object) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": list(prompt or (1, 2, 3, 4)), "sampling_params": sampling, **more}


@contextmanager
def emulated_server(
    log_path: Path, *flags: str, visible: str | None = None
) -> Iterator[EmulatedProcess]:
    """A server that is ready; killed at the end."""
    server = EmulatedProcess(log_path, *flags, visible=visible)
    try:
        server.wait_for(READY)
        yield server
    finally:
        server.end()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
