"""What the options of `runner load` mean, and what is said about those that mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.cli import main, parser
from runner.errors import ConfigError
from runner.load.api import Api
from runner.load_command import LoadOrder, read_order
from runner.settings import SloLimit
from runner.trial import Arrivals, Lengths, LoadProtocol

URL = "http://127.0.0.1:1"


def order(*options: str) -> LoadOrder:
    return read_order(parser().parse_args(["load", URL, *options]))


def test_without_options_it_is_a_closed_loop_of_eight() -> None:
    read = order()
    assert read.target.api is Api.GENERATE
    assert (read.plan.protocol, read.plan.concurrency) == (LoadProtocol.CLOSED_LOOP, 8)
    assert read.plan.requests == 80
    assert read.plan.silence_s == 600
    assert (read.plan.prompt_tokens, read.plan.output_tokens) == (Lengths.fixed(128),) * 2
    assert read.warmup is not None
    assert (read.warmup.requests, read.warmup.concurrency) == (8, 8)
    assert read.warmup.phase != read.plan.phase


def test_a_load_has_prompts_of_its_own_unless_a_seed_is_given() -> None:
    assert len({order().plan.seed for _ in range(5)}) > 1
    assert order("--seed", "7").plan.seed == 7


def test_an_open_loop() -> None:
    read = order("--rate", "2.5", "--arrivals", "constant")
    assert read.plan.protocol is LoadProtocol.OPEN_LOOP
    assert (read.plan.rate, read.plan.requests) == (2.5, 150)
    assert read.plan.arrivals is Arrivals.CONSTANT
    assert read.warmup is not None
    assert read.warmup.protocol is LoadProtocol.CLOSED_LOOP
    assert order("--rate", "2.5").plan.arrivals is Arrivals.POISSON


def test_a_burst() -> None:
    read = order("--burst", "--requests", "30", "--warmup", "0")
    assert (read.plan.protocol, read.plan.concurrency) == (LoadProtocol.BURST, 30)
    assert read.warmup is None


def test_lengths_are_a_number_a_range_or_recorded(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"prompt_tokens": 5, "output_tokens": 9}\n{"prompt_tokens": 6}\n')
    plan = order("--input-tokens", str(path), "--output-tokens", "64-192").plan
    assert plan.prompt_tokens == Lengths("recorded", values=(5, 6))
    assert plan.output_tokens == Lengths("uniform", 64, 192)
    assert order("--input-tokens", "9-9").plan.prompt_tokens == Lengths.fixed(9)
    with pytest.raises(ConfigError, match=r"--output-tokens: .* line 2: found"):
        order("--output-tokens", str(path))


def test_limits() -> None:
    read = order("--slo", "ttft_s.p99=2.0", "--slo", "tpot_s.mean=0.1")
    assert read.slo == (SloLimit("ttft_s", "p99", 2.0), SloLimit("tpot_s", "mean", 0.1))


def test_the_key_is_in_the_environment_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "se-cret")
    read = order("--api-key-env", "MY_KEY")
    assert read.target.key == "se-cret"
    assert "se-cret" not in repr(read)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slo", "ttft_s.p99"], "expected METRIC=SECONDS"),
        (["--slo", "ttft_s=1"], "expected METRIC=SECONDS"),
        (["--slo", "ttft.p99=1"], "unknown latency 'ttft'; did you mean 'ttft_s'"),
        (["--slo", "ttft_s.p95=1"], "unknown statistic 'p95'; did you mean 'p99'"),
        (["--slo", "ttft_s.p99=0"], "expected seconds above 0"),
        (["--slo", "ttft_s.p99=nan"], "expected seconds above 0"),
        (["--rate", "0"], "--rate 0: expected a number of requests per second above 0"),
        (["--rate", "fast"], "--rate fast"),
        (["--arrivals", "constant"], "give --rate too"),
        (["--burst"], "--requests N"),
        (["--warmup", "-1"], "--warmup -1: expected a number of requests"),
        (["--timeout", "0"], "--timeout 0: expected a number of seconds above 0"),
        (["--shared-prefix", "1.5"], "expected a share from 0 to 1"),
        (["--input-tokens", "0"], "expected 1 to"),
        (["--input-tokens", "10-5"], "LOW at most HIGH"),
        (["--input-tokens", "9999999999"], "expected 1 to"),
        (["--output-tokens", "1.5"], "expected a number of tokens above 0, LOW-HIGH"),
        (["--output-tokens", "none.jsonl"], "--output-tokens: none.jsonl does not exist"),
        (["--api-key-env", "NOT_THERE"], "this environment variable is not set"),
    ],
)
def test_bad_options_are_told_in_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", URL, *options]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:30000", "ftp://host", "http://", "http://host:99999", "http://me:word@host/", "x"],
)
def test_a_wrong_address(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", url]) == 2
    said = capsys.readouterr().err
    assert "server address" in said
    assert "word" not in said.replace("password", "")


@pytest.mark.parametrize(
    "options", [["--rate", "3", "--concurrency", "3"], ["--concurrency", "0"], ["--api", "soap"]]
)
def test_options_that_the_parser_refuses(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["load", URL, *options])
    assert end.value.code == 2
    assert options[-2] in capsys.readouterr().err
