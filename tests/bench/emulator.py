"""Measures the delay that the emulated server itself adds to a token.

A token is due when the pipeline model says that it leaves the server. The server writes it later,
and the client reads it later still: many tokens are due at the same time and go one by one. Both
delays are the emulation's own, and are compared with the time between two tokens of a request, all
in real time. The settings are those of search_spaces/demo.yaml, at 64 streams and 20 times faster
than real. Needs two idle cores; what else the machine does is in the figures too.

scripts/bench emulator [--streams 64] [--seconds 10] [--time-scale 20] [--setting NAME ...]
"""

from __future__ import annotations

import argparse
import atexit
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import requests

from runner.clock import Clock
from runner.load.client import Target
from runner.load.generator import LoadGenerator
from runner.trial import Lengths, LoadPlan, LoadProtocol, LoadRun

PROFILE = "rtx-pro-6000-x8-kimi-k2.6"
SETTINGS = {
    "best": ("--pp-size", "8", "--pp-async-batch-depth", "8", "--pp-max-micro-batch-size", "4"),
    "pp8-auto": ("--pp-size", "8", "--pp-async-batch-depth", "0"),
    "tp8": ("--tp-size", "8"),
}
READY = "The server is fired up and ready to roll!"
SERVE = "--serve"


def serve(out: Path, argv: Sequence[str]) -> int:
    """An emulated server that keeps when each token was due, and writes it down at its end."""
    from runner.engines.emulator.__main__ import main
    from runner.engines.emulator.reply import Reply
    from runner.engines.emulator.server import EmulatedServer, Job
    from runner.pipeline import Pipeline, Step, Token

    due: list[tuple[Token, ...]] = []
    names: dict[str, str] = {}
    written: dict[Reply, list[float]] = {}
    replies: dict[str, list[float]] = {}
    step, submit, deliver = Pipeline.step, EmulatedServer.submit, Reply.deliver

    def noting_step(pipeline: Pipeline) -> Step:
        found = step(pipeline)
        due.append(found.tokens)
        return found

    def noting_submit(server: EmulatedServer, job: Job, reply: Reply) -> None:
        submit(server, job, reply)
        names[server._served[job.request_id].name] = job.request_id  # noqa: SLF001
        replies[job.request_id] = written[reply] = []

    def noting_deliver(reply: Reply, tokens: int, now_s: float, *, is_last: bool) -> None:
        deliver(reply, tokens, now_s, is_last=is_last)
        written[reply].append(time.monotonic())

    def write() -> None:
        due_s: dict[str, list[float]] = {}
        for tokens in due:
            for token in tokens:
                rid = names.get(token.request_id)
                if rid is not None:
                    due_s.setdefault(rid, []).append(token.time_s)
        out.write_text(json.dumps({"due_s": due_s, "written_wall_s": replies}))

    Reply.deliver = noting_deliver  # type: ignore[method-assign,assignment]
    Pipeline.step = noting_step  # type: ignore[method-assign,assignment]
    EmulatedServer.submit = noting_submit  # type: ignore[method-assign,assignment]
    atexit.register(write)
    return main(argv)


def measure(setting: str, streams: int, seconds: float, scale: float, profiled: bool) -> str:
    """One closed loop against a server of its own; one line of figures."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), _free_port()
        due, log = folder / "due.json", folder / "server.log"
        profiler = ("-m", "cProfile", "-o", f"/tmp/{setting}.prof") if profiled else ()
        flags = (
            *("--port", str(port), "--profile", PROFILE, "--time-scale", str(scale)),
            *("--max-running-requests", "64", "--random-seed", "1", *SETTINGS[setting]),
        )
        command = (sys.executable, *profiler, __file__, SERVE, str(due), *flags)
        with log.open("wb") as stream, subprocess.Popen(command, stderr=stream) as server:
            try:
                _wait(server, log)
                process = psutil.Process(server.pid)
                before = process.cpu_times()
                run = _drive(port, streams, seconds, scale)
                after = process.cpu_times()
                requests.post(f"http://127.0.0.1:{port}/abort_request", json={"abort_all": True})
            finally:
                server.send_signal(signal.SIGTERM)
                server.wait()
        cpu_s = after.user + after.system - before.user - before.system
        tokens = sum(record.output_tokens for record in run.records)
        figures = _figures(run, json.loads(due.read_text()), scale)
        return f"{setting:9} {figures}; server CPU {cpu_s / tokens * 1e6:.0f} us per token"


def _wait(server: subprocess.Popen[bytes], log: Path) -> None:
    while READY not in log.read_text():
        if server.poll() is not None:
            raise SystemExit(f"the server ended: {log.read_text()}")
        time.sleep(0.05)


def _drive(port: int, streams: int, seconds: float, scale: float) -> LoadRun:
    plan = LoadPlan(
        phase="bench",
        protocol=LoadProtocol.CLOSED_LOOP,
        concurrency=streams,
        prompt_tokens=Lengths.fixed(64),
        output_tokens=Lengths("uniform", 64, 192),
        seed=0,
        min_window_s=seconds * scale,
        max_window_s=2 * seconds * scale,
    )
    return LoadGenerator(Clock(scale)).run(plan, [Target(0, f"http://127.0.0.1:{port}")])


def _figures(run: LoadRun, told: dict[str, dict[str, list[float]]], scale: float) -> str:
    written_ms, seen_ms, gaps_s = [], [], []
    for record in run.records:
        due_s = told["due_s"].get(record.request_id, [])
        wall_s = told["written_wall_s"].get(record.request_id, [])
        for seen_s, planned_s, sent_wall_s in zip(record.token_s, due_s, wall_s, strict=False):
            if run.window_start_s <= seen_s <= run.window_end_s:
                seen_ms.append((seen_s - planned_s) / scale * 1000)
                written_ms.append((sent_wall_s - planned_s / scale) * 1000)
        if len(due_s) > 1:
            gaps_s.append((due_s[-1] - due_s[0]) / (len(due_s) - 1))
    token_ms = float(np.mean(gaps_s)) / scale * 1000
    window_s = (run.window_end_s - run.window_start_s) / scale
    return (
        f"a token every {token_ms:.2f} ms, {len(seen_ms) / window_s:.0f} tokens/s\n"
        f"  written {_delays(written_ms, token_ms)}\n"
        f"  seen    {_delays(seen_ms, token_ms)}\n"
        f"  client core {run.client.cpu_share:.0%}"
    )


def _delays(delays_ms: list[float], token_ms: float) -> str:
    p50, p90, p99 = np.percentile(delays_ms, [50, 90, 99])
    mean = float(np.mean(delays_ms))
    return (
        f"p50 {p50:5.2f}  mean {mean:5.2f}  p90 {p90:5.2f}  p99 {p99:6.2f} ms;  share of the "
        f"token's time: p50 {p50 / token_ms:5.1%}  mean {mean / token_ms:5.1%}  "
        f"p90 {p90 / token_ms:5.1%}"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="real seconds of the window")
    parser.add_argument("--time-scale", type=float, default=20.0)
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--profile", action="store_true", help="cProfile, into /tmp/SETTING.prof")
    given = parser.parse_args()
    for setting in given.setting:
        line = measure(setting, given.streams, given.seconds, given.time_scale, given.profile)
        print(line, flush=True)  # noqa: T201 - the figures are the product


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        sys.exit(serve(Path(sys.argv[2]), sys.argv[3:]))
    _main()
