"""`runner load` as a user runs it, on emulated servers and on ones that misbehave."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import json
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from runner.cli import main
from tests.driving import wait_for
from tests.emulated_server import READY, EmulatedProcess, emulated_server
from tests.scripted_server import Body, ScriptedServer, plain_reply

FLAGS = ("--profile", "cpu-blocking-pp2", "--pp-size", "2", "--max-running-requests", "16")
SMALL = ("--input-tokens", "16", "--output-tokens", "8")
SERVED = 'POST /generate HTTP/1.1" 200'
COMPLETED = 'POST /v1/completions HTTP/1.1" 200'
ABORTED = 'POST /abort_request HTTP/1.1" 200'
PART_KEYS = {
    *("start_s", "duration_s", "requests", "errors"),
    *("prompt_tokens", "cached_tokens", "output_tokens"),
    *("output_throughput", "total_throughput", "request_throughput"),
    *("goodput", "achieved_concurrency"),
    *("ttft_s", "tpot_s", "itl_s", "e2e_s"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedProcess]:
    log_path = tmp_path_factory.mktemp("load") / "server.log"
    with emulated_server(log_path, *FLAGS, "--time-scale", "20") as process:
        yield process


@dataclass(frozen=True)
class Said:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


Load: TypeAlias = Callable[..., Said]


@pytest.fixture
def load(capsys: pytest.CaptureFixture[str]) -> Load:
    def run(url: str, *options: str) -> Said:
        code = main(["load", url, *SMALL, *options])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return run


def start(url: str, *options: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "runner.cli", "load", url, *SMALL, "--warmup", "0", *options]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_document_is_whole_and_totals_and_window_differ(
    server: EmulatedProcess, load: Load
) -> None:
    # Long requests: what a busy machine adds between two of them must not count.
    options = ("--concurrency", "4", "--requests", "60", "--output-tokens", "48", "--seed", "1")
    said = load(server.url, *options, "--json")
    document = said.document
    assert (said.code, document["reasons"], document["valid"]) == (0, [], True)
    totals, window = document["totals"], document["window"]
    assert set(totals) == set(window) == PART_KEYS
    assert (totals["requests"], totals["errors"]) == (60, 0)
    assert (totals["prompt_tokens"], totals["output_tokens"]) == (60 * 16, 60 * 48)
    assert 0 < window["start_s"] < window["start_s"] + window["duration_s"] < totals["duration_s"]
    assert 4 <= window["requests"] <= 56
    assert window["achieved_concurrency"] > 3.6
    assert totals["ttft_s"]["p50"] <= totals["ttft_s"]["p99"] <= totals["e2e_s"]["p99"]
    rate = totals["output_tokens"] / totals["duration_s"]
    assert totals["output_throughput"] == pytest.approx(rate, rel=1e-6)
    assert document["server"]["model_path"] == document["model"]
    assert document["server"]["version"]
    for key, value in {
        "url": server.url,
        "api": "generate",
        "protocol": "closed_loop",
        "concurrency": 4,
        "rate": None,
        "requests": 60,
        "input_tokens": 16,
        "output_tokens": 48,
        "seed": 1,
        "slo": [],
    }.items():
        assert document[key] == value
    assert set(document["client"]) == {"cpu_share", "max_lag_s", "clock_jump_s"}


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_openai_interfaces(server: EmulatedProcess, load: Load, api: str) -> None:
    said = load(server.url, "--api", api, "--concurrency", "2", "--requests", "8", "--json")
    assert said.code == 0
    assert said.document["totals"]["output_tokens"] == 64
    assert said.document["api"] == api


def test_an_open_loop_sends_all_its_arrivals(server: EmulatedProcess, load: Load) -> None:
    options = ("--rate", "40", "--arrivals", "constant", "--requests", "40", "--json")
    document = load(server.url, *options).document
    assert (document["protocol"], document["rate"]) == ("open_loop", 40)
    assert (document["concurrency"], document["arrivals"]) == (None, "constant")
    assert document["totals"]["requests"] == 40
    assert document["window"]["requests"] < 40
    # The first arrives after one gap, which is no part of the load.
    assert document["totals"]["duration_s"] >= 39 / 40


def test_a_burst_is_all_at_once_and_has_no_steady_window(
    server: EmulatedProcess, load: Load
) -> None:
    document = load(server.url, "--burst", "--requests", "12", "--json").document
    assert (document["protocol"], document["concurrency"]) == ("burst", 12)
    assert (document["valid"], document["window"]) == (True, None)
    assert document["totals"]["requests"] == 12


def test_a_short_load_is_not_valid_and_says_how_many_requests_would_do(
    server: EmulatedProcess, load: Load
) -> None:
    said = load(server.url, "--concurrency", "4", "--requests", "6", "--json")
    assert (said.code, said.document["valid"], said.document["window"]) == (0, False, None)
    assert "--requests 12" in said.document["reasons"][0]
    enough = load(server.url, "--concurrency", "4", "--requests", "12", "--json")
    assert enough.document["window"] is not None


def test_a_missed_limit_is_exit_code_1(server: EmulatedProcess, load: Load) -> None:
    options = ("--concurrency", "2", "--requests", "20", "--slo", "e2e_s.p99=100")
    kept = load(server.url, *options, "--json")
    assert (kept.code, kept.document["slo"][0]["met"]) == (0, True)
    assert kept.document["totals"]["goodput"] == kept.document["totals"]["request_throughput"]
    said = load(server.url, *options, "--slo", "ttft_s.p50=0.000001", "--json")
    first, missed = said.document["slo"]
    assert (said.code, first["met"], missed["met"]) == (1, True, False)
    assert (first["attainment"], missed["attainment"]) == (1.0, 0.0)
    assert missed["metric"] == "ttft_s.p50"
    assert missed["measured_s"] == said.document["window"]["ttft_s"]["p50"]
    assert said.document["window"]["goodput"] == 0


def test_for_people_it_prints_tables(server: EmulatedProcess, load: Load) -> None:
    said = load(server.url, "--concurrency", "2", "--requests", "20", "--slo", "e2e_s.p99=100")
    assert said.code == 0
    for words in ("all requests  steady window", "output tokens/s", "TPOT, steady window", "met;"):
        assert words in said.out
    assert max(len(line) for line in said.out.splitlines()) <= 100


def test_the_same_seed_again_meets_the_cache_and_a_new_one_does_not(
    server: EmulatedProcess, load: Load
) -> None:
    options = ("--concurrency", "2", "--requests", "12", "--warmup", "0", "--json")
    load(server.url, *options, "--seed", "77")
    again = load(server.url, *options, "--seed", "77").document
    assert "the prefix cache served" in " ".join(again["reasons"])
    assert load(server.url, *options).document["totals"]["cached_tokens"] == 0


def test_ctrl_c_shows_what_was_measured(server: EmulatedProcess) -> None:
    before = server.log.count(SERVED)
    options = ("--concurrency", "2", "--requests", "100000", "--json")
    with start(server.url, *options) as process:
        wait_for(lambda: server.log.count(SERVED) > before + 20, "requests")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    document = json.loads(out)
    assert process.returncode == 130
    assert "interrupted after" in err
    assert document["reasons"][0] == "the load ended early: it was interrupted"
    assert 10 < document["totals"]["requests"] < 100000
    assert document["window"]["requests"] > 0


def test_ctrl_c_leaves_the_requests_of_others_alone(server: EmulatedProcess) -> None:
    options = ("--concurrency", "2", "--requests", "1000")
    seen, aborts = server.log.count(SERVED), server.log.count(ABORTED)
    completed = server.log.count(COMPLETED)
    with (
        start(server.url, *options) as other,
        start(server.url, *options, "--api", "completions") as process,
    ):
        wait_for(lambda: server.log.count(SERVED) > seen + 4, "requests of the other")
        wait_for(lambda: server.log.count(COMPLETED) > completed + 4, "requests of ours")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
        assert server.log.count(ABORTED) > aborts
        seen = server.log.count(SERVED)
        wait_for(lambda: server.log.count(SERVED) > seen + 10, "the other goes on")
        other.send_signal(signal.SIGINT)
        out, _ = other.communicate(timeout=60)
    assert "requests failed" not in out


def test_a_server_that_dies_leaves_what_was_measured(tmp_path: Path) -> None:
    dying = EmulatedProcess(tmp_path / "server.log", *FLAGS, "--time-scale", "20")
    try:
        dying.wait_for(READY)
        options = ("--concurrency", "2", "--requests", "100000", "--json")
        with start(dying.url, *options) as process:
            wait_for(lambda: dying.log.count(SERVED) > 20, "requests")
            dying.signal(signal.SIGKILL)
            out, err = process.communicate(timeout=60)
    finally:
        dying.end()
    document = json.loads(out)
    assert process.returncode == 1
    assert "the load ended early" in err
    assert document["totals"]["requests"] > 10
    assert document["totals"]["errors"] >= 2
    assert (document["valid"], document["window"]["errors"] > 0) == (False, True)


# Servers that are no good.


def test_nothing_listens(load: Load) -> None:
    said = load("http://127.0.0.1:9", "--json")
    assert (said.code, said.out) == (1, "")
    assert "cannot connect to http://127.0.0.1:9" in said.err
    assert "start the server, or correct the address" in said.err


def test_a_server_without_the_interface(server: EmulatedProcess, load: Load) -> None:
    said = load(server.url + "/v2", "--json")
    assert (said.code, said.out) == (1, "")
    assert "HTTP 404" in said.err
    assert "The server has no /v2/generate" in said.err
    assert "--api completions or --api chat" in said.err


def test_a_key_is_shown_or_asked_for(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n"
    with ScriptedServer(pages={"/v1/models": refused}) as guarded:
        said = load(guarded.url)
        assert said.code == 1
        assert "HTTP 401" in said.err
        assert "--api-key-env" in said.err
        assert guarded.requests == []
    monkeypatch.setenv("SERVER_KEY", "k-1")
    options = ("--api-key-env", "SERVER_KEY", "--concurrency", "1", "--requests", "4")
    with ScriptedServer() as open_one:
        assert load(open_one.url, *options).code == 0
        assert all("Authorization: Bearer k-1\r\n" in head for head in open_one.heads)


def test_a_server_that_refuses_everything(load: Load) -> None:
    async def refuse(_: int, __: Body) -> AsyncIterator[bytes]:
        yield b"HTTP/1.1 503 Unavailable\r\ncontent-length: 4\r\n\r\nfull"

    with ScriptedServer(refuse) as full:
        said = load(full.url, "--concurrency", "2")
    assert (said.code, said.out) == (1, "")
    assert "2 of 2 requests failed; the first: HTTP 503: full" in said.err


def test_a_server_that_refuses_some_is_measured_and_not_valid(load: Load) -> None:
    async def refuse_some(number: int, body: Body) -> AsyncIterator[bytes]:
        if number % 4 == 3:
            yield b"HTTP/1.1 503 Unavailable\r\ncontent-length: 4\r\n\r\nfull"
            return
        async for piece in plain_reply(number, body):
            yield piece

    with ScriptedServer(refuse_some) as busy:
        options = ("--concurrency", "2", "--requests", "40", "--warmup", "0", "--json")
        said = load(busy.url, *options)
    totals = said.document["totals"]
    assert (said.code, totals["requests"], totals["errors"]) == (0, 30, 10)
    assert "10 of 40 requests failed" in " ".join(said.document["reasons"])


def test_a_server_that_never_answers(load: Load) -> None:
    async def wait(_: int, __: Body) -> AsyncIterator[bytes]:
        await asyncio.sleep(1.0)
        yield b""

    with ScriptedServer(wait) as silent:
        said = load(silent.url, "--concurrency", "2", "--timeout", "0.3")
        wait_for(lambda: silent.in_flight == 0, "the end of what runs")
    assert (said.code, said.out) == (1, "")
    assert "no byte of the reply came for 0.3 s" in said.err


def test_https_with_a_certificate_that_is_trusted_or_not(
    server: EmulatedProcess, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.load.client import tls_context

    certificate = tmp_path / "server.pem"
    certificate.write_bytes(self_signed())
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate)
    with ScriptedServer(tls=serving) as secure:
        tls_context.cache_clear()
        said = load(secure.url)
        assert said.code == 1
        assert "is not trusted here" in said.err
        assert "SSL_CERT_FILE" in said.err
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        tls_context.cache_clear()
        options = ("--concurrency", "2", "--requests", "8", "--json")
        assert load(secure.url, *options).document["totals"]["requests"] == 8
    tls_context.cache_clear()
    said = load(server.url.replace("http", "https"))
    assert said.code == 1
    assert "does not speak TLS" in said.err


def self_signed() -> bytes:
    """A key and its certificate for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)
