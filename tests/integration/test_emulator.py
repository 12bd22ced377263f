"""The emulated server as a process: its HTTP, its log, its GPUs."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from runner.clock import Clock
from runner.engines.emulator.gpu import EmulatedGpus
from runner.engines.sglang.flags import internal_states, resolved_params
from runner.machine.profile import FOLDER
from tests.emulated_server import EmulatedProcess, emulated_server, generate_body, leave_idle

SCALE = 1000.0
PP2 = (
    *("--time-scale", str(SCALE), "--pp-size", "2", "--pp-async-batch-depth", "2"),
    *("--max-running-requests", "16", "--decode-log-interval", "1", "--enable-metrics"),
)
LONG = 3000  # tokens that nobody waits for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedProcess]:
    """A server for all tests that leave it as they found it: idle."""
    folder = tmp_path_factory.mktemp("emulator")
    flags = (*PP2, "--gpu-folder", str(folder / "machine"))
    with emulated_server(folder / "server.log", *flags) as process:
        yield process


@pytest.fixture(autouse=True)
def _idle(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        leave_idle(request.getfixturevalue("server"))


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@contextmanager
def running_stream(server: EmulatedProcess, rid: str) -> Iterator[Iterator[bytes]]:
    """The lines of a long stream, whose first was read."""
    body = generate_body(LONG, rid=rid, stream=True)
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=60) as answer:
        lines: Iterator[bytes] = answer.iter_lines()
        next(lines)
        yield lines


def test_a_start_writes_its_phases_in_order(server: EmulatedProcess) -> None:
    lines = (
        *(
            r"\] server_args=\{",
            r"PP0\] Init parallel begin\.",
            r"PP1\] Init parallel ends\. elapsed=",
        ),
        *(
            r"PP0\] Load weight begin\. avail mem=",
            r"PP1\] Load weight end\. elapsed=.* mem usage=",
        ),
        r"PP1\] KV Cache is allocated\. dtype: torch.bfloat16, #tokens: 8192, K size: .* GB",
        r"PP1\] max_total_num_tokens=8192, .*max_running_requests=16, context_len=4096, available_",
        *(r"\] Engine startup timings \(s\): load_weight=", r"\] INFO:     Uvicorn running on"),
        *(r"PP0\] Prefill batch", r"\] The server is fired up and ready to roll!"),
    )
    assert re.search(".*?".join(lines), server.log, re.DOTALL)


def test_generate_as_a_stream(server: EmulatedProcess) -> None:
    found = server.events("/generate", generate_body(5, rid="a" * 32))
    assert [event["meta_info"]["completion_tokens"] for event in found] == [1, 2, 3, 4, 5]
    assert [len(event["output_ids"]) for event in found] == [1, 2, 3, 4, 5]
    assert {event["meta_info"]["id"] for event in found} == {"a" * 32}
    last = found[-1]["meta_info"]
    assert last["finish_reason"] == {"type": "length", "length": 5}
    assert (last["prompt_tokens"], last["cached_tokens"]) == (4, 0)
    assert last["e2e_latency"] > last["first_token_latency"] > 0


def test_generate_without_a_stream(server: EmulatedProcess) -> None:
    document = server.generate(7, 1, 2, 3)
    assert len(document["output_ids"]) == document["meta_info"]["completion_tokens"] == 7
    assert document["text"].count(" t") == 7


def test_text_is_counted_in_words_and_128_tokens_are_the_default(server: EmulatedProcess) -> None:
    document = server.post("/generate", {"text": "one two three"}).json()
    assert document["meta_info"]["prompt_tokens"] == 3
    assert document["meta_info"]["completion_tokens"] == 128


def test_completions(server: EmulatedProcess) -> None:
    body = {"prompt": [1, 2, 3], "stream_options": {"include_usage": True}}
    *chunks, last = server.events("/v1/completions", body)
    assert len(chunks) == 16
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["prompt_tokens"] == 3
    assert last["usage"]["completion_tokens"] == 16


def test_chat(server: EmulatedProcess) -> None:
    body = {"messages": [{"role": "user", "content": "one two"}], "max_completion_tokens": 4}
    document = server.post("/v1/chat/completions", body).json()
    assert document["usage"]["completion_tokens"] == 4
    assert len(server.events("/v1/chat/completions", body)) == 4 + 2


def test_a_keep_alive_connection_serves_stream_after_stream(server: EmulatedProcess) -> None:
    with requests.Session() as session:
        for tokens in (1, 2, 3):
            body = generate_body(tokens, stream=True)
            answer = session.post(server.url + "/generate", json=body, timeout=60)
            assert answer.text.count("data: {") == tokens


def test_many_requests_at_once_are_each_answered_in_full(server: EmulatedProcess) -> None:
    with ThreadPoolExecutor(24) as pool:
        wanted = [5 + number % 7 for number in range(24)]
        found = pool.map(lambda tokens: server.generate(tokens, tokens, 9), wanted)
        counts = [document["meta_info"]["completion_tokens"] for document in found]
    assert counts == wanted


def test_a_prompt_sent_again_is_cached_until_a_flush(server: EmulatedProcess) -> None:
    cached = [server.generate(2, 5, 6, 7, 8)["meta_info"]["cached_tokens"] for _ in range(2)]
    assert server.post("/flush_cache").status_code == 200
    cached.append(server.generate(2, 5, 6, 7, 8)["meta_info"]["cached_tokens"])
    assert cached == [0, 3, 0]


def test_the_cap_is_set_live_within_its_range(server: EmulatedProcess) -> None:
    def set_cap(cap: object) -> object:
        body = {"server_args": {"pp_max_micro_batch_size": cap}}
        return server.post("/set_internal_state", body).json()

    def live_cap() -> object:
        return internal_states(server.get("/server_info").json())[0]["pp_max_micro_batch_size"]

    assert (live_cap(), set_cap(2), live_cap()) == (8, [True], 2)
    assert (set_cap(9), set_cap(0), set_cap("4"), live_cap()) == ([False], [False], [False], 2)
    assert "Updating pp_max_micro_batch_size to 9 is rejected because it is out of" in server.log
    logged = len(server.log)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: server.generate(1000, n, 1), range(8)))
    lines = server.log[logged:]
    running = [int(n) for n in re.findall(r"Decode batch, #running-req: (\d+)", lines)]
    assert (set_cap(8), live_cap()) == ([True], 8)
    assert max(running) == 2


def test_other_parameters_are_not_set_live(server: EmulatedProcess) -> None:
    body = {"server_args": {"max_running_requests": 4}}
    assert server.post("/set_internal_state", body).json() == [False]
    assert server.post("/set_internal_state", {}).status_code == 400


def test_the_cache_is_flushed_only_when_idle(server: EmulatedProcess) -> None:
    with running_stream(server, "r1"):
        assert server.post("/flush_cache").status_code == 400
        server.post("/abort_request", {"abort_all": True})
        assert server.get("/flush_cache?timeout=100").status_code == 200


def test_an_aborted_stream_ends_with_its_reason(server: EmulatedProcess) -> None:
    with running_stream(server, "r2") as stream:
        assert server.post("/abort_request", {"rid": "unknown"}).status_code == 200
        assert server.post("/abort_request", {"rid": "r2"}).status_code == 200
        lines = [line for line in stream if line]
    last = json.loads(lines[-2].removeprefix(b"data: "))["meta_info"]
    assert last["finish_reason"]["type"] == "abort"
    assert 0 < last["completion_tokens"] < LONG
    assert lines[-1] == b"data: [DONE]"


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_away_is_aborted(server: EmulatedProcess, is_stream: bool) -> None:
    body = json.dumps(generate_body(LONG, stream=is_stream)).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: server.post("/flush_cache").status_code == 400)
    wait_until(lambda: server.post("/flush_cache").status_code == 200)


def test_server_info_says_what_runs(server: EmulatedProcess) -> None:
    info = server.get("/server_info").json()
    assert info == {
        **server.get("/get_server_info").json(),
        "internal_states": info["internal_states"],
    }
    assert info["version"].startswith("0.5.23")
    assert info["startup_time"]["tokenizer_e2e"] > info["startup_time"]["scheduler_e2e"] > 0
    assert resolved_params(info) == {
        "tp_size": 1,
        "pp_size": 2,
        "dp_size": 1,
        "ep_size": 1,
        "pp_async_batch_depth": 2,
        "pp_max_micro_batch_size": 8,
        "max_running_requests": 16,
        "max_total_tokens": 8192,
        "chunked_prefill_size": 2048,
        "mem_fraction_static": 0.5,
        "attention_backend": "torch_native",
        "cuda_graph": False,
        "cuda_graph_max_bs": 8,
    }


def test_the_model_and_the_load_are_told(server: EmulatedProcess) -> None:
    assert server.get("/model_info").json()["model_path"] == "tiny-llama"
    assert server.get("/v1/models").json()["data"][0]["id"] == "tiny-llama"
    (load,) = server.get("/v1/loads").json()["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)
    assert load["max_total_num_tokens"] == 8192


def test_health_costs_a_token_and_ready_costs_nothing(server: EmulatedProcess) -> None:
    before = server.log.count("PP0] Prefill batch")
    assert server.get("/ready").status_code == 200
    assert server.log.count("PP0] Prefill batch") == before
    assert server.get("/health").status_code == 200
    assert server.get("/health_generate").status_code == 200
    assert server.log.count("PP0] Prefill batch") == before + 2


def test_metrics_count_what_was_served(server: EmulatedProcess) -> None:
    def total(name: str) -> float:
        text = server.get("/metrics").text
        rows = re.findall(rf"^sglang:{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
        return sum(float(value) for labels, value in rows if 'pp_rank="1"' not in labels)

    names = ("generation_tokens_total", "num_requests_total", "cuda_graph_passes_total")
    before = [total(name) for name in names]
    server.generate(10, 3, 1)
    server.events("/generate", generate_body(5, 3, 2))
    assert [total(name) - old for name, old in zip(names, before, strict=True)] == [15, 2, 15]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/generate", generate_body(-5), "max_new_tokens must be at least 0, got -5."),
        ("/generate", {"sampling_params": {}}, "Either text or input_ids"),
        ("/generate", {"input_ids": []}, "input_ids cannot be empty"),
        ("/generate", generate_body(5000), "exceeds the model's maximum context length of 4096"),
        ("/generate", generate_body(1, *range(4095)), "is longer than the model's context length"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens must be positive"),
        ("/v1/completions", {"max_tokens": 1}, "Prompt must be a text or a list"),
        ("/v1/completions", {"prompt": ""}, "Prompt cannot be empty"),
        ("/v1/completions", {"prompt": 5}, "Prompt must be a text or a list"),
        ("/v1/completions", {"prompt": "x", "n": 200_000}, "n must be at most 128"),
        ("/v1/chat/completions", {"messages": []}, "Messages cannot be empty."),
    ],
)
def test_a_wrong_request_is_400(
    server: EmulatedProcess, path: str, body: dict[str, object], message: str
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert message in answer.text


@pytest.mark.parametrize("body", [b"[" * 100_000, b"1" * 5000, b"{", b"\xff", b"[]"])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/set_internal_state"])
def test_a_body_that_cannot_be_read_is_400(server: EmulatedProcess, path: str, body: bytes) -> None:
    assert requests.post(server.url + path, data=body, timeout=60).status_code == 400


@pytest.mark.parametrize("cap", [float("nan"), float("inf"), True, "4"])
def test_a_cap_that_is_no_number_is_refused(server: EmulatedProcess, cap: object) -> None:
    body = json.dumps({"server_args": {"pp_max_micro_batch_size": cap}})
    answer = requests.post(server.url + "/set_internal_state", data=body, timeout=60)
    assert answer.json() == [False]


def test_clients_that_leave_at_once_leave_no_traceback(server: EmulatedProcess) -> None:
    body = json.dumps(generate_body(4, stream=True)).encode()
    head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert server.generate(2)["meta_info"]["completion_tokens"] == 2
    assert "Traceback" not in server.log


def test_a_wrong_stream_is_200_with_an_error_event(server: EmulatedProcess) -> None:
    (event,) = server.events("/generate", generate_body(-5))
    assert event["error"]["code"] == 400
    assert event["error"]["message"] == "max_new_tokens must be at least 0, got -5."


def test_what_is_not_json_and_what_is_not_there(server: EmulatedProcess) -> None:
    answer = requests.post(server.url + "/generate", data=b"{", timeout=60)
    assert (answer.status_code, answer.json()["object"]) == (400, "error")
    assert server.get("/get_load").status_code == 404
    assert server.get("/generate").status_code == 405


def test_a_working_server_draws_power_on_its_gpus(
    server: EmulatedProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = next(tmp_path_factory.getbasetemp().glob("emulator*/machine"))
    gpus = EmulatedGpus(folder, Clock(SCALE))
    uuids = [gpu.uuid for gpu in gpus.gpus()]
    before = [gpus.read(uuid) for uuid in uuids]
    with running_stream(server, "p1"), running_stream(server, "p2"):
        wait_until(lambda: all((gpus.read(uuid).power_w or 0) > 15 for uuid in uuids))
        during = [gpus.read(uuid) for uuid in uuids]
        owners = [[process.pid for process in gpus.processes(uuid)] for uuid in uuids]
    assert owners == [[server.process.pid]] * 2
    for first, second in zip(before, during, strict=True):
        assert first.energy_j is not None
        assert second.energy_j is not None
        assert second.energy_j - first.energy_j > 10.0 * (second.time_s - first.time_s)
        assert second.utilization is not None
        assert 0.1 < second.utilization <= 1.0
        assert (second.memory_used_bytes or 0) > 100_000_000
    gpus.close()


@pytest.mark.parametrize(
    ("flag", "captured"),
    [("--cuda-graph-backend-decode disabled", True), ("--disable-cuda-graph", False)],
)
def test_prefills_keep_their_graphs_when_decode_has_none(
    tmp_path: Path, flag: str, *, captured: bool
) -> None:
    """As the log of SGLang 0.5.16 on an H200 shows it."""
    flags = ("--profile", "h200-llama-3.1-8b", "--time-scale", str(SCALE), *flag.split())
    with emulated_server(tmp_path / "server.log", *flags, "--decode-log-interval", "1") as server:
        server.generate(4)
        info = server.get("/server_info").json()
        startup = info["internal_states"][0]["startup_time"]
        log = server.log
    begun = "Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4, 8, 12,"
    assert (begun in log) == captured
    assert ("Disable prefill CUDA graph because" in log) == (not captured)
    assert "Capture target decode CUDA graph" not in log
    assert (startup["cuda_graph"]["prefill"] > 1.0) == captured
    assert startup["cuda_graph"]["decode"] == 0.0
    assert re.search(rf"Prefill batch, .*cuda graph: {captured}, input", log)
    assert re.search(r"Decode batch, .*cuda graph: False, gen", log)


def test_flags_of_streams(tmp_path: Path) -> None:
    flags = (
        *(*PP2, "--stream-interval", "8", "--incremental-streaming-output"),
        *("--skip-tokenizer-init", "--disable-radix-cache"),
    )
    with emulated_server(tmp_path / "server.log", *flags) as server:
        events = server.events("/generate", generate_body(20))
        assert [len(event["output_ids"]) for event in events] == [1, 8, 8, 3]
        assert [event["meta_info"]["completion_tokens"] for event in events] == [1, 9, 17, 20]
        cached = [server.generate(1)["meta_info"]["cached_tokens"] for _ in range(2)]
        assert cached == [0, 0]
        assert "skip_tokenizer_init=True" in server.post("/generate", {"text": "x"}).text
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 400


def test_an_api_key_is_asked_for(tmp_path: Path) -> None:
    with emulated_server(tmp_path / "server.log", "--api-key", "k") as server:
        assert server.get("/model_info").status_code == 401
        assert server.get("/ready").status_code == 200
        headers = {"Authorization": "Bearer k"}
        answer = requests.get(server.url + "/model_info", headers=headers, timeout=60)
        assert answer.status_code == 200


def test_a_full_queue_refuses(tmp_path: Path) -> None:
    flags = ("--max-running-requests", "1", "--max-queued-requests", "1", "--time-scale", "1000")
    with (
        emulated_server(tmp_path / "server.log", *flags) as server,
        running_stream(server, "r1"),
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(server.generate, 1, 7)
        wait_until(lambda: server.get("/v1/loads").json()["loads"][0]["num_waiting_reqs"] == 1)
        refused = server.post("/generate", generate_body(1))
        assert (refused.status_code, "queue is full" in refused.text) == (503, True)
        (event,) = server.events("/generate", generate_body(1))
        assert event["error"]["code"] == 503
        (event,) = server.events("/v1/completions", {"prompt": "x"})
        assert (event["error"]["object"], event["error"]["code"]) == ("error", 503)
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 503
        server.post("/abort_request", {"rid": "r1"})
        assert waiting.result()["meta_info"]["completion_tokens"] == 1


def test_health_is_503_between_the_port_and_the_warm_up(tmp_path: Path) -> None:
    text = (FOLDER / "cpu-blocking-pp2.yaml").read_text()
    profile = tmp_path / "slow.yaml"
    profile.write_text(text.replace("warmup_s: 0.1", "warmup_s: 2.0"))
    server = EmulatedProcess(tmp_path / "server.log", "--profile", str(profile))
    seen: list[int | str] = []
    try:
        while not seen or seen[-1] != 200:
            assert server.process.poll() is None
            try:
                status: int | str = server.get("/health").status_code
            except requests.ConnectionError:
                status = "refused"
            if status not in seen:
                seen.append(status)
    finally:
        server.end()
    assert seen == ["refused", 503, 200]


def test_a_server_writes_the_gpus_it_sees(tmp_path: Path) -> None:
    machine = tmp_path / "machine"
    profile = ("--profile", "rtx-pro-6000-x8-kimi-k2.6", "--time-scale", "2000")
    shape = ("--pp-size", "2", "--tp-size", "1", "--base-gpu-id", "1")
    small = tmp_path / "small.yaml"
    text = (FOLDER / f"{profile[1]}.yaml").read_text()
    small.write_text(re.sub(r"layers: \d+", "layers: 4", text))
    flags = ("--profile", str(small), *profile[2:], *shape, "--gpu-folder", str(machine))
    with emulated_server(tmp_path / "server.log", *flags, visible="5,3,6") as server:
        gpus = EmulatedGpus(machine, Clock(2000.0))
        busy = [gpu.index for gpu in gpus.gpus() if gpus.processes(gpu.uuid)]
        assert busy == [3, 6]
        server.end()
        assert [gpu.index for gpu in gpus.gpus() if gpus.processes(gpu.uuid)] == []
        gpus.close()
