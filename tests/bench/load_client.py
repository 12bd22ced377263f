"""Measures the load generator against the null server: CPU time per token event, true ITL 20 ms.

python tests/bench/load_client.py [--streams 512] [--seconds 10]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from runner.clock import Clock
from runner.load.client import Target
from runner.load.generator import LoadGenerator
from runner.measure.metrics import judge_rung
from runner.trial import Lengths, LoadPlan, LoadProtocol, RungRecord

SERVER = "runner.load.null_server"
TOKENS = 256


def measure(streams: int, seconds: float) -> str:
    """One closed loop of `streams` against a server of its own; one line of figures."""
    command = [sys.executable, "-m", SERVER, "--tokens", str(TOKENS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            target = Target(0, f"http://127.0.0.1:{int(server.stdout.readline())}")
            plan = LoadPlan(
                phase="bench",
                protocol=LoadProtocol.CLOSED_LOOP,
                concurrency=streams,
                prompt_tokens=Lengths.fixed(256),
                output_tokens=Lengths.fixed(TOKENS),
                seed=0,
                min_window_s=seconds,
                max_window_s=2 * seconds,
            )
            cpu_s = time.thread_time()
            load = LoadGenerator(Clock()).run(plan, [target])
            cpu_s = time.thread_time() - cpu_s
        finally:
            server.terminate()
    rung = judge_rung(RungRecord(0, streams, load, ()), (), plan)
    tokens = sum(record.output_tokens for record in load.records)
    share = load.client.cpu_share / rung.output_throughput * 1e6
    assert rung.itl_s is not None
    return (
        f"{streams} streams: {rung.output_throughput:.0f} events/s, CPU {share:.1f} us per event "
        f"in the window ({cpu_s / tokens * 1e6:.1f} with start and end), "
        f"core {load.client.cpu_share:.0%}, lag {load.client.max_lag_s * 1000:.1f} ms, "
        f"ITL p50 {rung.itl_s.p50 * 1000:.2f} ms p99 {rung.itl_s.p99 * 1000:.2f} ms, "
        f"in flight {rung.achieved_concurrency:.1f}, valid {rung.valid} {'; '.join(rung.reasons)}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    for streams in arguments.streams:
        print(measure(streams, arguments.seconds))  # noqa: T201 - the figures are the product
