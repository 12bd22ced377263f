"""SGLang's own client against the emulated server, and our load generator beside it.

RUNNER_SGLANG_PYTHON names a Python whose `sglang.bench_serving` can be imported; no GPU is needed.
Both clients keep the same number of requests in flight, of the same lengths, on a server without a
prefix cache, and must find the same server behind the emulation.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from runner.clock import Clock
from runner.load.api import Api
from runner.load.client import Target
from runner.load.generator import LoadGenerator
from runner.machine.profile import FOLDER
from runner.trial import Lengths, LoadPlan, LoadProtocol, RequestStatus
from tests.emulated_server import EmulatedProcess, emulated_server
from tests.real.cpu_study import PYTHON, needs_sglang

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), needs_sglang]

PROFILE = "rtx-pro-6000-x8-kimi-k2.6"
SCALE = 2.0
LENGTHS = (32, 64)
SHARE = {"throughput": 0.05, "tpot_s": 0.05, "ttft_s": 0.15}  # how far the clients may be apart
APIS = {
    "sglang": Api.GENERATE,
    "sglang-oai": Api.COMPLETIONS,
    "sglang-oai-chat": Api.CHAT,
}
SHAPES = {
    "tp8": ("--tp-size", "8"),
    # One request a slot: with more, how uneven lengths fill the slots is another story each time.
    "pp8": ("--pp-size", "8", "--pp-max-micro-batch-size", "1"),
}
LOADS = (("tp8", 1), ("tp8", 8), ("tp8", 32), ("pp8", 1), ("pp8", 8))
TOKENIZER = """
import sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(30000)}, unk_token="t0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0")
made.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
made.save_pretrained(sys.argv[1])
"""


@dataclass(frozen=True)
class Figures:
    """What a client says of a server, in emulated seconds."""

    throughput: float
    ttft_s: float
    tpot_s: float

    def __str__(self) -> str:
        return (
            f"{self.throughput:7.1f} tok/s, TTFT {self.ttft_s * 1000:6.1f} ms, "
            f"TPOT {self.tpot_s * 1000:6.2f} ms"
        )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A word is a token, as on the emulated server."""
    folder = tmp_path_factory.mktemp("tokenizer")
    subprocess.run([PYTHON, "-c", TOKENIZER, str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmulatedProcess]:
    """The reference machine, which starts faster than real."""
    folder = tmp_path_factory.mktemp(request.param)
    text = (FOLDER / f"{PROFILE}.yaml").read_text()
    text = re.sub(r"(import_s|init_s|prefill_graphs_s): .*", r"\1: 1.0", text)
    text = re.sub(r"graph_size_s: .*", "graph_size_s: 0.01", text)
    text = re.sub(r"load_bytes_per_s: \S+", "load_bytes_per_s: 1.0e+11", text)
    profile = folder / "profile.yaml"
    profile.write_text(text)
    flags = (
        *("--profile", str(profile), "--time-scale", str(SCALE), "--disable-radix-cache"),
        *("--max-running-requests", "64", "--random-seed", "1", *SHAPES[request.param]),
    )
    with emulated_server(folder / "server.log", *flags) as process:
        yield process


def theirs(
    server: EmulatedProcess, tokenizer: Path, backend: str, streams: int, out: Path
) -> Figures:
    """SGLang's client: the requests between its start and its end, when fewer are in flight."""
    count = 20 + 12 * streams
    command = (
        *(PYTHON, "-m", "sglang.bench_serving", "--backend", backend, "--host", "127.0.0.1"),
        *("--port", str(server.port), "--model", str(tokenizer), "--tokenizer", str(tokenizer)),
        *("--dataset-name", "random-ids", "--random-range-ratio", "0.5", "--disable-tqdm"),
        *("--random-input-len", str(LENGTHS[1]), "--random-output-len", str(LENGTHS[1])),
        *("--num-prompts", str(count), "--max-concurrency", str(streams)),
        *("--seed", "7", "--output-file", str(out), "--output-details"),
    )
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(out.read_text())
    assert found["completed"] == count
    steady = slice(2 * streams, -2 * streams)  # requests are in the order of their start
    return figures(
        streams,
        [first_s * SCALE for first_s in found["ttfts"][steady]],
        [sum(gaps_s) * SCALE for gaps_s in found["itls"][steady]],
        found["output_lens"][steady],
    )


def ours(server: EmulatedProcess, api: Api, streams: int) -> Figures:
    """Our client, by the same formulas."""
    lengths = Lengths("uniform", *LENGTHS)
    plan = LoadPlan(
        phase="beside",
        protocol=LoadProtocol.CLOSED_LOOP,
        concurrency=streams,
        prompt_tokens=lengths,
        output_tokens=lengths,
        seed=7,
        precision=0.01,
        min_window_s=20.0,
        max_window_s=60.0,
    )
    run = LoadGenerator(Clock(SCALE)).run(plan, [Target(0, server.url, api, "m")])
    whole = [
        record
        for record in run.records
        if record.status is RequestStatus.OK and record.send_s >= run.window_start_s
    ]
    return figures(
        streams,
        [record.token_s[0] - record.send_s for record in whole],
        [record.token_s[-1] - record.token_s[0] for record in whole],
        [record.output_tokens for record in whole],
    )


def figures(streams: int, first_s: list[float], rest_s: list[float], tokens: list[int]) -> Figures:
    """From each request's time to the first token, the time of the others, and its tokens.

    As long as `streams` are in flight, the throughput is theirs over the time they take.
    """
    each_s = [rest / (count - 1) for rest, count in zip(rest_s, tokens, strict=True)]
    return Figures(
        throughput=streams * sum(tokens) / (sum(first_s) + sum(rest_s)),
        ttft_s=sum(first_s) / len(first_s),
        tpot_s=sum(each_s) / len(each_s),
    )


@pytest.mark.parametrize("backend", APIS)
@pytest.mark.parametrize(("server", "streams"), LOADS, indirect=["server"])
def test_both_clients_see_the_same_server(
    server: EmulatedProcess, tokenizer: Path, tmp_path: Path, backend: str, streams: int
) -> None:
    found = theirs(server, tokenizer, backend, streams, tmp_path / "out.jsonl")
    own = ours(server, APIS[backend], streams)
    print(f"\n{backend}, {streams} streams\n  SGLang's {found}\n  ours     {own}")  # noqa: T201 - for -s
    for name, share in SHARE.items():
        assert getattr(own, name) == pytest.approx(getattr(found, name), rel=share), name
