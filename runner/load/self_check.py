"""How many streams the load generator can serve on this machine, tried against the null server.

One burst of short replies: every stream is sent a token per 20 ms, as fast as a quick server would,
and all tokens are due at the same moments. Short replies make a token dearer than in a study,
because the cost of a request is spread over fewer of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from runner.clock import Clock
from runner.errors import LoadFailed
from runner.load.client import Target
from runner.load.generator import LoadGenerator
from runner.measure.validity import LOWEST_ACHIEVED, MAX_CPU_SHARE, MAX_LAG_S
from runner.trial import Lengths, LoadPlan, LoadProtocol

PERIOD_S = 0.02
TOKENS = 75
PROMPT_TOKENS = 64
REPORT_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class LoadCheck:
    """How one load generator did; everything in wall time.

    `cpu_share` of a core and `max_lag_s` as in ClientHealth; `cpu_us` microseconds of CPU time per
    token; `server_late_s` how late the null server itself wrote a token, median.
    """

    streams: int
    tokens_per_s: float
    cpu_us: float
    cpu_share: float
    max_lag_s: float
    server_late_s: float

    @property
    def most_streams(self) -> int:
        """Streams of a token per 20 ms that the generator could serve before it is the limit."""
        return int(MAX_CPU_SHARE * PERIOD_S / (self.cpu_us * 1e-6))

    @property
    def problem(self) -> str | None:
        """Why it did not keep up, None if it did."""
        if self.cpu_share > MAX_CPU_SHARE:
            return f"it used {self.cpu_share:.0%} of a core (at most {MAX_CPU_SHARE:.0%})"
        if self.max_lag_s > MAX_LAG_S:
            late_ms, most_ms = self.max_lag_s * 1000, MAX_LAG_S * 1000
            return f"it ran {late_ms:.0f} ms late (at most {most_ms:.0f} ms)"
        if self.server_late_s > PERIOD_S / 2:
            return f"the server it was tried against ran {self.server_late_s * 1000:.0f} ms late"
        if self.tokens_per_s < LOWEST_ACHIEVED * self.streams / PERIOD_S:
            return f"it read {self.tokens_per_s:.0f} of {self.streams / PERIOD_S:.0f} tokens/s"
        return None


def check_generator(streams: int, shard: int = 0, shards: int = 1) -> LoadCheck:
    """Try this shard's part of so many streams, for about two seconds.

    Raises LoadFailed when the null server does not start, or the requests fail.
    """
    plan = LoadPlan(
        phase="self-check",
        protocol=LoadProtocol.BURST,
        concurrency=streams,
        prompt_tokens=Lengths.fixed(PROMPT_TOKENS),
        output_tokens=Lengths.fixed(TOKENS),
        seed=0,
    )
    with null_server("--period", str(PERIOD_S), "--tokens", str(TOKENS)) as url:
        run = LoadGenerator(Clock()).run(plan, [Target(0, url)], shard, shards)
        told = read_report(url)
    times_s = [record.token_s[-1] for record in run.records if record.token_s]
    firsts_s = [record.token_s[0] for record in run.records if record.token_s]
    tokens = sum(record.output_tokens for record in run.records)
    window_s = run.window_end_s - run.window_start_s
    return LoadCheck(
        streams=len(run.records),
        tokens_per_s=tokens / (max(times_s) - min(firsts_s) + PERIOD_S),
        cpu_us=run.client.cpu_share * window_s / tokens * 1e6,
        cpu_share=run.client.cpu_share,
        max_lag_s=run.client.max_lag_s,
        server_late_s=told["late_p50_s"],
    )


@contextmanager
def null_server(*options: str, prefix: Sequence[str] = ()) -> Iterator[str]:
    """A null server in a process of its own; yields its URL. `prefix` goes before its command."""
    command = [*prefix, sys.executable, "-m", "runner.load.null_server", *options]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the driver
    ) as server:
        try:
            line = b"" if server.stdout is None else server.stdout.readline()
            if not line:
                raise LoadFailed(f"the null server did not start: {' '.join(command)}")
            yield f"http://127.0.0.1:{int(line)}"
        finally:
            server.kill()


def read_report(url: str) -> dict[str, float]:
    """What a null server says of itself; its Report as a dictionary."""
    with urllib.request.urlopen(f"{url}/report", timeout=REPORT_DEADLINE_S) as answer:  # noqa: S310
        told: dict[str, float] = json.load(answer)
        return told
