"""Measures the load generator against a server without a model, next to a public client.

Every stream is sent one token per 20 ms, all streams start at once, and the true time between two
tokens is 20 ms. The client has one core, the server another. CPU time is that of the whole client
process during its load: for other clients, of their whole run less that of a run with one request,
which is their fixed cost. Clients take turns, and the figures are medians over the turns. "Late" is
what the server says of itself: how long after a token was due it was handed to the kernel; a row
whose server was later than half of a period (p50) measures the server.

The other client is SGLang's in Rust, the fastest one found that a package registry has: one worker
thread, token ids as prompts, nothing tokenized. It is installed into .bench/ on the first run.
`--python-client PYTHON TOKENIZER` adds SGLang's client in Python, from an environment that has all
of SGLang, with the folder of some tokenizer of at least 30,000 tokens. It takes no times of
replies without text, so of its row only events and CPU time say something.

scripts/bench load [--streams 128 256 512 1024] [--repeats 3] [--alone] [--generators 2]
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from runner.clock import Clock
from runner.load.client import Target
from runner.load.generator import LoadGenerator, merge_runs
from runner.load.self_check import null_server, read_report
from runner.trial import Lengths, LoadPlan, LoadProtocol, LoadRun

ROOT = Path(__file__).parents[2]
SGLANG = "0.5.23"
RIVAL = ROOT / ".bench" / f"sglang-{SGLANG}"
PROMPT_TOKENS = 256
CLIENT = "--client"
# The Rust client needs nothing of SGLang; the package's own __init__ would import torch.
RUST_CLIENT = """
import runpy, sys, types
from pathlib import Path
site = next(Path(each) for each in sys.path if (Path(each) / "sglang").is_dir())
for name in ("sglang", "sglang.srt", "sglang.benchmark"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [str(site / name.replace(".", "/"))]
runpy.run_module("sglang.benchmark.rust_client", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of one client; times in milliseconds, CPU in microseconds per event."""

    events_per_s: float
    cpu_us: float
    window_cpu_us: float
    ttft_ms: float
    true_ttft_ms: float
    itl_ms: float
    itl_p99_ms: float
    tpot_ms: float
    late_ms: float
    late_p99_ms: float


@dataclass(frozen=True, slots=True)
class Client:
    """A client that is measured: its name and the command of a load, without the server."""

    name: str
    command: tuple[str, ...]
    start_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """What every client is asked for, and the cores it may use."""

    streams: int
    tokens: int
    period_s: float
    slots: int
    generators: int = 1


# The load generator, as a process of its own.


def run_client(url: str, streams: int, tokens: int, place: tuple[int, int], out: Path) -> None:
    """Drive one shard of a burst; what it found and the CPU time it took go to a file."""
    plan = LoadPlan(
        phase="bench",
        protocol=LoadProtocol.BURST,
        concurrency=streams,
        prompt_tokens=Lengths.fixed(PROMPT_TOKENS),
        output_tokens=Lengths.fixed(tokens),
        seed=time.time_ns(),
        max_window_s=600.0,
    )
    generator = LoadGenerator(Clock())
    cpu_s = time.process_time()
    run = generator.run(plan, [Target(0, url)], *place)
    out.write_bytes(pickle.dumps((run, time.process_time() - cpu_s)))


def own_figures(load: Load) -> Figures:
    """The generator in as many processes as asked for, each with a core if there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name, server_for(load, cores[-1]) as url:
        outs = [Path(name) / str(place) for place in range(load.generators)]
        clients = [
            subprocess.Popen(
                [
                    *(*pin(cores[place % len(cores)]), sys.executable, __file__, CLIENT, url),
                    *(str(load.streams), str(load.tokens), str(place), str(load.generators)),
                    str(out),
                ]
            )
            for place, out in enumerate(outs)
        ]
        for client in clients:
            if client.wait() != 0:
                raise SystemExit("the load generator failed")
        told = read_report(url)
        loaded = [pickle.loads(out.read_bytes()) for out in outs]
    run = merge_runs([each[0] for each in loaded])
    tokens = sum(record.output_tokens for record in run.records)
    window_s = sum(each.window_end_s - each.window_start_s for each, _ in loaded)
    busy = statistics.fmean(each.client.cpu_share for each, _ in loaded) * window_s
    return Figures(
        events_per_s=rate_of(run),
        cpu_us=sum(cpu_s for _, cpu_s in loaded) / tokens * 1e6,
        window_cpu_us=busy / tokens * 1e6,
        ttft_ms=p50([r.first_token_s - r.send_s for r in run.records if r.first_token_s]),
        true_ttft_ms=told["ttft_p50_s"] * 1000,
        itl_ms=float(np.percentile(gaps_s(run), 50)) * 1000,
        itl_p99_ms=float(np.percentile(gaps_s(run), 99)) * 1000,
        tpot_ms=p50([(r.token_s[-1] - r.token_s[0]) / (len(r.token_s) - 1) for r in run.records]),
        late_ms=told["late_p50_s"] * 1000,
        late_p99_ms=told["late_p99_s"] * 1000,
    )


def rate_of(run: LoadRun) -> float:
    """Tokens per second from the first send to the last token, as other clients count it."""
    start_s = min(record.send_s for record in run.records)
    end_s = max(record.end_s for record in run.records)
    return sum(record.output_tokens for record in run.records) / (end_s - start_s)


def gaps_s(run: LoadRun) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """All times between two tokens of a request."""
    return np.concatenate([np.diff(record.token_s) for record in run.records])


def p50(values_s: Sequence[float]) -> float:
    """The median of seconds, in milliseconds."""
    return statistics.median(values_s) * 1000


# Other clients.


def rival_figures(client: Client, load: Load) -> Figures:
    """One run of SGLang's client; both of them write the same result line."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name, server_for(load, cores[-1]) as url:
        out = Path(name) / "result.jsonl"
        cpu_s = run_rival(client, url, load, out, cores[0])
        told = read_report(url)
        found = json.loads(out.read_text())
    tokens = load.streams * load.tokens
    if (completed := found["completed"]) != load.streams:
        raise SystemExit(f"{client.name}: {completed} of {load.streams} requests completed")
    return Figures(
        events_per_s=found["output_throughput"],
        cpu_us=(cpu_s - client.start_cpu_s) / tokens * 1e6,
        window_cpu_us=float("nan"),
        ttft_ms=found["median_ttft_ms"],
        true_ttft_ms=told["ttft_p50_s"] * 1000,
        itl_ms=found["median_itl_ms"],
        itl_p99_ms=found["p99_itl_ms"],
        tpot_ms=found["median_tpot_ms"],
        late_ms=told["late_p50_s"] * 1000,
        late_p99_ms=told["late_p99_s"] * 1000,
    )


def run_rival(client: Client, url: str, load: Load, out: Path, core: int) -> float:
    """Run it to its end; returns the CPU seconds of the whole process."""
    command = (
        *client.command,
        *("--backend", "sglang", "--base-url", url, "--model", "null"),
        *("--dataset-name", "random-ids", "--random-input-len", str(PROMPT_TOKENS)),
        *("--random-output-len", str(load.tokens), "--random-range-ratio", "1"),
        *("--num-prompts", str(load.streams), "--tokenize-prompt", "--warmup-requests", "0"),
        *("--disable-tqdm", "--output-file", str(out)),
    )
    quiet = subprocess.DEVNULL
    process = subprocess.Popen((*pin(core), *command), stdout=quiet, stderr=quiet)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{client.name} ended with {process.returncode}: {' '.join(command)}")
    return used.ru_utime + used.ru_stime


def started(client: Client, load: Load) -> Client:
    """The client with its fixed cost, which is told on the way."""
    cores = sorted(os.sched_getaffinity(0))
    one = Load(1, load.tokens, load.period_s, 1)
    with tempfile.TemporaryDirectory() as name, server_for(one, cores[-1]) as url:
        start_s = time.monotonic()
        cpu_s = run_rival(client, url, one, Path(name) / "result.jsonl", cores[0])
        wall_s = time.monotonic() - start_s - load.tokens * load.period_s
    say(f"{client.name}: fixed cost of a run {wall_s:.1f} s, CPU {cpu_s:.1f} s")
    return Client(client.name, client.command, cpu_s)


def rust_client() -> Client | None:
    """SGLang's client in Rust, installed when it is not there yet; None when that fails."""
    python = RIVAL / "bin" / "python"
    if not python.exists():
        uv = [sys.executable, "-m", "uv"]
        say(f"installing sglang {SGLANG} without what it depends on into {RIVAL}")
        commands = (
            [*uv, "venv", "--quiet", str(RIVAL)],
            [*uv, "pip", "install", "-q", "-p", str(python), "--no-deps", f"sglang=={SGLANG}"],
        )
        for command in commands:
            if subprocess.run(command, check=False).returncode != 0:
                say(f"not installed ({' '.join(command)}); going on without it")
                return None
    flags = ("--vocab-size", "30000", "--disable-retokenize", "--worker-threads", "1")
    return Client("SGLang, Rust", (str(python), "-c", RUST_CLIENT, *flags))


def python_client(python: str, tokenizer: str) -> Client:
    """SGLang's client in Python, from an environment that has all of SGLang."""
    program = (python, "-W", "ignore", "-m", "sglang.benchmark.serving", "--tokenizer", tokenizer)
    return Client("SGLang, Python", program)


# Processes.


@contextmanager
def server_for(load: Load, core: int) -> Iterator[str]:
    """A null server for one run, on one core; yields its URL."""
    options = ("--tokens", str(load.tokens), "--slots", str(load.slots))
    with null_server("--period", str(load.period_s), *options, prefix=pin(core)) as url:
        yield url


def pin(core: int) -> tuple[str, ...]:
    """What to put before a command so that it runs on one core."""
    code = (
        "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); "
        "os.execvp(sys.argv[2], sys.argv[2:])"
    )
    return (sys.executable, "-I", "-S", "-c", code, str(core))


# The table.

HEAD = (
    f"{'streams':>7} {'client':16} {'events/s':>8} {'CPU us/event':>13} {'TTFT p50 (true)':>16} "
    f"{'ITL p50/p99':>14} {'TPOT':>6} {'server late p50/p99':>20}"
)


def row(load: Load, name: str, runs: Sequence[Figures]) -> str:
    """One line of the table: medians of every figure."""
    mid = Figures(
        *(statistics.median(getattr(run, each.name) for run in runs) for each in fields(Figures))
    )
    window = "" if np.isnan(mid.window_cpu_us) else f" ({mid.window_cpu_us:.1f})"
    is_late = mid.late_ms > load.period_s * 500
    return (
        f"{load.streams:7} {name:16} {mid.events_per_s:8.0f} {f'{mid.cpu_us:.1f}{window}':>13} "
        f"{f'{mid.ttft_ms:.1f} ({mid.true_ttft_ms:.1f})':>16} "
        f"{f'{mid.itl_ms:.2f}/{mid.itl_p99_ms:.1f}':>14} {mid.tpot_ms:6.2f} "
        f"{f'{mid.late_ms:.1f}/{mid.late_p99_ms:.1f}':>20}"
        f"{'  the server was the limit' if is_late else ''}"
    )


def compare(load: Load, rivals: Sequence[Client], repeats: int) -> None:
    """All clients in turns, then their rows and the ratios of their CPU times, turn by turn."""
    found: dict[str, list[Figures]] = {name: [] for name in ("runner", *(r.name for r in rivals))}
    for _ in range(repeats):
        found["runner"].append(own_figures(load))
        for rival in rivals:
            found[rival.name].append(rival_figures(rival, load))
    for name, runs in found.items():
        say(row(load, name, runs))
    for rival in rivals:
        pairs = zip(found[rival.name], found["runner"], strict=True)
        ratio = statistics.median(theirs.cpu_us / own.cpu_us for theirs, own in pairs)
        say(f"{'':7} {rival.name}: {ratio:.2f} times the CPU time per event of runner")


def share_cores(load: Load, repeats: int) -> None:
    """Several generators at once: what they manage together."""
    cores = len(os.sched_getaffinity(0))
    if cores < load.generators + 1:
        say(f"{load.generators} generators and the server share the {cores} cores of this machine")
    say(row(load, f"runner x {load.generators}", [own_figures(load) for _ in range(repeats)]))


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the figures are the product


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--period", type=float, default=0.02, help="seconds between two tokens")
    parser.add_argument("--slots", type=int, default=1, help="moments tokens are due per period")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="without another client")
    parser.add_argument("--python-client", metavar=("PYTHON", "TOKENIZER"), nargs=2)
    parser.add_argument("--generators", type=int, default=2, help="in the last row; 0: no such row")
    given = parser.parse_args()
    say(f"load average {os.getloadavg()[0]:.2f}, {len(os.sched_getaffinity(0))} cores")
    loads = [Load(each, given.tokens, given.period, given.slots) for each in given.streams]
    rivals = []
    if not given.alone:
        clients = [rust_client()]
        clients += [python_client(*given.python_client)] if given.python_client else []
        rivals = [started(client, loads[0]) for client in clients if client is not None]
    say(HEAD)
    for load in loads:
        compare(load, rivals, given.repeats)
    if given.generators > 1:
        last = loads[-1]
        shared = Load(last.streams, last.tokens, last.period_s, last.slots, given.generators)
        share_cores(shared, given.repeats)
    say(f"load average {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == [CLIENT]:
        streams, tokens, shard, shards = map(int, sys.argv[3:7])
        run_client(sys.argv[2], streams, tokens, (shard, shards), Path(sys.argv[7]))
    else:
        main()
