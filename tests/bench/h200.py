"""The two H200 profiles against what was measured on SGLang 0.5.16, one H200.

Every measured point is run again in virtual time by the protocol it was measured with: all users
start together and send their requests (256 tokens in, 256 out) one after another. The output
throughput is that of the whole run, the decode throughput that between the moment every user has
its first token and the first end of a request. Noise is left out.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from runner.engines.virtual_load import SEND_GAP_S
from runner.machine.graphs import NO_GRAPHS
from runner.machine.hardware import REQUEST_S, Noise, Profile
from runner.machine.profile import load_profile
from runner.machine.shape import ServerShape
from runner.machine.start import start_phases
from runner.pipeline import Pipeline, PipelineRequest

DATA = Path(__file__).parent.parent / "data" / "h200-measured.json"
PROFILES = {"llama": "h200-llama-3.1-8b", "moe": "h200-qwen3-30b-a3b"}
PROMPT_TOKENS = OUTPUT_TOKENS = 256
QUANTITIES = (
    "output_tok_s",
    "decode_tok_s",
    "tpot_p50_ms",
    "itl_p50_ms",
    "ttft_p50_ms",
    "watts",
    "sm_clock_mhz",
)


@dataclass(frozen=True, slots=True)
class Point:
    """One measured point; `measured` has the quantities that were."""

    server: str
    users: int
    waves: int
    first_wave_cached: bool
    lead_s: float
    measured: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity of one point of one server."""

    server: str
    users: int
    quantity: str
    measured: float
    modelled: float

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return self.modelled / self.measured - 1.0


@dataclass(slots=True)
class _User:
    """One user: when it sent its requests, and when their tokens came."""

    send_s: list[float]
    token_s: list[list[float]]


def points() -> list[Point]:
    """Everything that was measured under load."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    found: list[Point] = []
    for values in data["points"]:
        row = dict(zip(data["columns"], values, strict=True))
        measured = {name: row[name] for name in QUANTITIES if row[name] is not None}
        keys = ("server", "users", "waves", "first_wave_cached", "lead_s")
        found.append(Point(**{key: row[key] for key in keys}, measured=measured))
    return found


def quiet_profile(server: str) -> Profile:
    """The profile of a measured server, without noise."""
    profile = load_profile(PROFILES[server.split("-", maxsplit=1)[0]])
    return replace(profile, noise=Noise(stage=0.0, run=0.0))


def shape_of_server(server: str) -> ServerShape:
    """llama-triton-eager: the attention backend, and no graphs at all.

    Decode-graph-only: none of prefills.
    """
    has_prefill_graphs = not server.endswith(("-eager", "-decode-graph-only"))
    return ServerShape(
        attention_backend=server.split("-")[1],
        cuda_graph=not server.endswith("-eager"),
        cuda_graph_backend_prefill=None if has_prefill_graphs else NO_GRAPHS,
    )


def simulate(profile: Profile, point: Point) -> dict[str, float]:
    """The quantities of one point as the model has them."""
    pipeline = Pipeline(profile, shape_of_server(point.server), seed=0)
    users = _drive(pipeline, point)
    span_s = max(user.token_s[-1][-1] for user in users)
    activity = pipeline.gpu_activity(span_s)[0]
    lead_j = profile.gpu.server_idle_w * point.lead_s
    waits = [
        tokens[0] - sent
        for user in users
        for sent, tokens in zip(user.send_s, user.token_s, strict=True)
    ]
    replies = [tokens for user in users for tokens in user.token_s]
    return {
        "output_tok_s": sum(map(len, replies)) / span_s,
        "decode_tok_s": _decode_tok_s(users),
        "tpot_p50_ms": _middle((t[-1] - t[0]) / (len(t) - 1) for t in replies) * 1000,
        "itl_p50_ms": _middle(b - a for t in replies for a, b in pairwise(t)) * 1000,
        "ttft_p50_ms": _middle(waits) * 1000,
        "watts": (activity.energy_j + lead_j) / (span_s + point.lead_s),
        "sm_clock_mhz": profile.gpu.sm_clock_mhz * (1.0 - activity.slow_s / span_s),
    }


def rows(measured: Iterable[Point] | None = None) -> list[Row]:
    """Every quantity of every measured point, measured and modelled."""
    found: list[Row] = []
    profiles = {server: quiet_profile(server) for server in PROFILES}
    for point in points() if measured is None else measured:
        modelled = simulate(profiles[point.server.split("-")[0]], point)
        found += [
            Row(point.server, point.users, name, value, modelled[name])
            for name, value in point.measured.items()
        ]
    return found


def start_rows() -> list[Row]:
    """Seconds from exec to ready, and of graph capture where graphs were captured."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    found: list[Row] = []
    for values in data["starts"]:
        measured = dict(zip(data["start_columns"], values, strict=True))
        server = measured["server"]
        phases = start_phases(quiet_profile(server), shape_of_server(server))
        modelled = {**phases.by_name, "total": phases.total_s}
        names = ("import", "cuda_graph", "warmup", "total")
        found += [
            Row(server, 0, f"start {name}", measured[f"{name}_s"], modelled[name])
            for name in names
            if measured[f"{name}_s"]
        ]
    return found


def mean_error(found: Iterable[Row], model: str, quantity: str) -> float:
    """The mean absolute error of one quantity over the servers of one model ("llama", "moe")."""
    errors = [
        abs(row.error)
        for row in found
        if row.quantity == quantity and row.server.startswith(f"{model}-")
    ]
    return fmean(errors)


def _drive(pipeline: Pipeline, point: Point) -> list[_User]:
    users = [_User([], []) for _ in range(point.users)]
    sends = deque((user * SEND_GAP_S, user) for user in range(point.users))
    while sends or not pipeline.is_idle:
        while sends:
            send_s, user = sends.popleft()
            wave = len(users[user].send_s)
            cached = PROMPT_TOKENS - 1 if point.first_wave_cached and wave == 0 else 0
            request = PipelineRequest(str(user), PROMPT_TOKENS, OUTPUT_TOKENS, cached)
            pipeline.submit(request, send_s + REQUEST_S)
            users[user].send_s.append(send_s)
            users[user].token_s.append([])
        for token in pipeline.step().tokens:
            user = int(token.request_id)
            users[user].token_s[-1].append(token.time_s)
            if token.is_last and len(users[user].send_s) < point.waves:
                sends.append((token.time_s + len(sends) * SEND_GAP_S, user))
    return users


def _decode_tok_s(users: list[_User]) -> float:
    from_s = max(user.token_s[0][0] for user in users)
    until_s = min(user.token_s[0][-1] for user in users)
    tokens = sum(from_s < time_s <= until_s for user in users for time_s in user.token_s[0])
    return tokens / (until_s - from_s)


def _middle(values: Iterable[float]) -> float:
    """The p50 as it was measured: the element in the middle, the upper one of two."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def report() -> list[str]:
    """Measured, modelled and error of every point, and the mean absolute errors, as lines."""
    found, starts = rows(), start_rows()
    lines = [_line("server", "users", dict(zip(QUANTITIES, QUANTITIES, strict=True)))]
    for server, users in dict.fromkeys((row.server, row.users) for row in found):
        cells = {
            row.quantity: f"{row.measured:6.5g} {row.modelled:6.5g} {row.error:+6.1%}"
            for row in found
            if (row.server, row.users) == (server, users)
        }
        lines.append(_line(server, str(users), cells))
    lines += ["", "seconds of a start: measured, modelled, error"]
    lines += [
        f"{row.server:30} {row.quantity:16} {row.measured:6.1f} {row.modelled:6.1f} "
        f"{row.error:+6.1%}"
        for row in starts
    ]
    lines += ["", "mean absolute errors"]
    for model in PROFILES:
        lines += [
            f"{model:5} {name:12} {mean_error(found, model, name):6.1%}" for name in QUANTITIES
        ]
        lines.append(f"{model:5} {'start':12} {mean_error(starts, model, 'start total'):6.1%}")
    return lines


def _line(server: str, users: str, cells: Mapping[str, str]) -> str:
    columns = (f"{cells.get(name, '-'):21}" for name in QUANTITIES)
    return f"{server:30} {users:>5} | " + "| ".join(columns)


def main() -> None:
    """Print the report."""
    argparse.ArgumentParser(
        description="The H200 profiles against what was measured: measured, modelled, error."
    ).parse_args()
    print(*report(), sep="\n")  # noqa: T201 - the figures are the product


if __name__ == "__main__":
    main()
