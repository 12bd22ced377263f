"""SGLang's HTTP surface on the emulated server: batches, samples, pauses, loads, log lines."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from runner.clock import Clock
from runner.engines.emulator.gpu import EmulatedGpus
from runner.engines.sglang.logs import shows_death
from tests.emulated_server import EmulatedProcess, emulated_server, leave_idle

FLAGS = (
    *("--time-scale", "1000", "--pp-size", "2", "--pp-async-batch-depth", "2"),
    *("--max-running-requests", "16", "--decode-log-interval", "3", "--enable-cache-report"),
    *("--device", "cpu"),
)
LONG = 3000  # tokens that nobody waits for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedProcess]:
    """A server for all tests that leave it as they found it: idle."""
    with emulated_server(tmp_path_factory.mktemp("http") / "server.log", *FLAGS) as process:
        yield process


@pytest.fixture(autouse=True)
def _idle(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        leave_idle(request.getfixturevalue("server"))


def counts(documents: list[dict[str, Any]]) -> list[int]:
    return [document["meta_info"]["completion_tokens"] for document in documents]


def batch_lines(log: str, kind: str) -> list[str]:
    return [line for line in log.splitlines() if f"{kind} batch" in line]


def test_a_batch_of_prompts_is_answered_by_a_list(server: EmulatedProcess) -> None:
    body = {
        "input_ids": [[1, 2, 3], [4, 5], [6]],
        "sampling_params": [{"max_new_tokens": n} for n in (3, 4, 5)],
        "rid": ["a", "b", "c"],
    }
    documents = server.post("/generate", body).json()
    assert counts(documents) == [3, 4, 5]
    assert [document["meta_info"]["id"] for document in documents] == ["a", "b", "c"]
    assert [document["meta_info"]["prompt_tokens"] for document in documents] == [3, 2, 1]


def test_a_batch_of_texts_under_one_id(server: EmulatedProcess) -> None:
    body = {"text": ["one", "one two"], "sampling_params": {"max_new_tokens": 2}, "rid": "r"}
    documents = server.post("/generate", body).json()
    assert [document["meta_info"]["id"] for document in documents] == ["r_0", "r_1"]


def test_a_batch_as_a_stream_numbers_its_events(server: EmulatedProcess) -> None:
    body = {"input_ids": [[1, 2], [3, 4]], "sampling_params": {"max_new_tokens": 4}}
    events = server.events("/generate", body)
    for index in (0, 1):
        own = [event for event in events if event["index"] == index]
        assert counts(own) == [1, 2, 3, 4]
        assert own[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_samples_share_a_prompt_that_is_prefilled_first(server: EmulatedProcess) -> None:
    body = {"input_ids": [7, 8, 9], "sampling_params": {"max_new_tokens": 3, "n": 4}, "rid": "r"}
    before = len(batch_lines(server.log, "Prefill"))
    documents = server.post("/generate", body).json()
    assert counts(documents) == [3] * 4
    assert [document["meta_info"]["cached_tokens"] for document in documents] == [2] * 4
    ids = {document["meta_info"]["id"] for document in documents}
    assert len(ids) == 4
    assert "r" not in ids
    first, *rest = batch_lines(server.log, "Prefill")[before:]
    assert "#new-seq: 1, #new-token: 3, #cached-token: 0," in first
    assert any("#cached-token: 2," in line or "#cached-token: 4," in line for line in rest)


def test_several_prompts_and_samples_of_completions(server: EmulatedProcess) -> None:
    body = {"prompt": ["one", "one two"], "n": 2, "max_tokens": 3}
    document = server.post("/v1/completions", body).json()
    assert [choice["index"] for choice in document["choices"]] == [0, 1, 2, 3]
    assert [choice["text"].count(" t") for choice in document["choices"]] == [3] * 4
    usage = document["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 12)
    assert "cached_tokens" in usage["prompt_tokens_details"]


def test_samples_of_a_chat_as_a_stream(server: EmulatedProcess) -> None:
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 3,
        "max_completion_tokens": None,
        "n": 2,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    *events, last = server.events("/v1/chat/completions", body)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    for index in (0, 1):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [choice["delta"]["role"] for choice in own] == ["assistant", *[None] * 4]
        assert [choice["finish_reason"] for choice in own] == [*[None] * 4, "length"]
    assert all(event["usage"]["total_tokens"] >= 5 for event in events)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/generate", {"input_ids": [[1], []]}, "input_ids cannot be empty"),
        ("/generate", {"input_ids": [[1], [2]], "rid": ["a"]}, "rids length mismatch"),
        ("/generate", {"input_ids": [[1], [2]], "rid": ["a", "a"]}, "Duplicate request IDs"),
        ("/generate", {"input_ids": [1], "rid": 5}, "The rid should be a string"),
        ("/generate", {"input_ids": [[1], [2]], "sampling_params": [{}]}, "length of sampling_pa"),
        ("/generate", {"text": ["a", 5]}, "A prompt must be a text, got 5"),
        ("/generate", {"text": "a", "sampling_params": {"n": 0}}, "n must be positive"),
        ("/v1/completions", {"prompt": ""}, "Prompt cannot be empty"),
        ("/v1/completions", {"prompt": "x", "stream_options": 1}, "stream_options must be an obj"),
    ],
)
def test_a_wrong_batch_is_400(
    server: EmulatedProcess, path: str, body: dict[str, object], message: str
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert message in answer.text
    if path != "/generate":
        error = answer.json()
        assert (error["object"], error["type"], error["code"]) == ("error", "BadRequest", 400)


def test_an_abort_takes_all_ids_that_begin_with_it(tmp_path: Path) -> None:
    slow = ("--time-scale", "20", *FLAGS[2:])  # so that nothing ends by itself
    with (
        emulated_server(tmp_path / "server.log", *slow) as server,
        ThreadPoolExecutor(3) as pool,
    ):
        ids = ("job-1", "job-10", "other")
        found = [pool.submit(server.generate, LONG, n, rid=rid) for n, rid in enumerate(ids)]
        wait_until(lambda: server.get("/v1/loads").json()["loads"][0]["num_used_tokens"] > 50)
        server.post("/abort_request", {"rid": "job-1"})
        reasons = [future.result()["meta_info"]["finish_reason"] for future in found[:2]]
        assert [reason["type"] for reason in reasons] == ["abort", "abort"]
        assert not found[2].done()
        server.post("/abort_request", {"abort_all": True})
        assert found[2].result()["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_pause_aborts_what_runs_and_holds_what_comes(server: EmulatedProcess) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(server.generate, LONG, 1)
        wait_until(lambda: server.post("/flush_cache").status_code == 400)
        assert server.post("/pause_generation", {}).json()["status"] == "ok"
        assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
        held = pool.submit(server.generate, 2, 3)
        assert (server.get("/ready").status_code, server.get("/ping").status_code) == (503, 200)
        time.sleep(0.2)
        assert not held.done()
        server.post("/continue_generation", {})
        assert held.result()["meta_info"]["completion_tokens"] == 2
    assert server.get("/ready").status_code == 200
    assert server.post("/pause_generation", {"mode": "retract"}).status_code == 400


def test_a_busy_server_is_healthy_without_a_token_of_its_own(server: EmulatedProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate, LONG, 1)
        wait_until(lambda: server.post("/flush_cache").status_code == 400)
        before = len(batch_lines(server.log, "Prefill"))
        assert server.get("/health_generate").status_code == 200
        assert len(batch_lines(server.log, "Prefill")) == before
        server.post("/abort_request", {"abort_all": True})
        running.result()


def test_loads_are_told_by_section(server: EmulatedProcess) -> None:
    def sections(query: str) -> set[str]:
        (load,) = server.get("/v1/loads" + query).json()["loads"]
        return {name for name, value in load.items() if isinstance(value, dict)}

    assert sections("") == {"memory", "disaggregation", "queues"}
    assert sections("?include=core") == set()
    assert sections("?include=core,queues") == {"queues"}
    assert server.get("/v1/loads?include=nonsense").status_code == 500
    assert server.get("/v1/loads?dp_rank=1").json()["loads"] == []
    text = server.get("/v1/loads?format=prometheus&include=core,queues").text
    assert 'sglang_num_running_reqs{dp_rank="0"} 0' in text
    assert 'sglang_queues_waiting{dp_rank="0"} 0' in text


def test_what_the_server_says_of_itself(server: EmulatedProcess) -> None:
    assert server.get("/").json() == "SGLang is running"
    assert server.get("/v1/models/tiny-llama").json()["max_model_len"] == 4096
    assert server.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert server.get("/metrics").status_code == 404
    assert server.get("/nowhere").json()["object"] == "error"
    assert server.get("/get_model_info").json() == server.get("/model_info").json()
    assert "Endpoint '/get_model_info' is deprecated" in server.log


def test_every_stage_logs_its_batches(server: EmulatedProcess) -> None:
    logged = len(server.log)
    server.generate(10, 21, 22)
    lines = [
        re.sub(r"^\[\S+ \S+ (PP\d)\]", r"\1", line) for line in server.log[logged:].split("\n")
    ]
    stages = [[line[3:] for line in lines if line.startswith(f"PP{n} ")] for n in (0, 1)]
    assert stages[0] == stages[1]
    prefill, *decodes = stages[0]
    assert re.fullmatch(
        r" Prefill batch, #new-seq: 1, #new-token: 2, #cached-token: 0, token usage: 0.00, "
        r"#running-req: 0, #queue-req: 0, #pending-token: 0, cpu graph: False, "
        r"input throughput \(token/s\): [\d.]+",
        prefill,
    )
    assert len(decodes) == 3  # every third of nine


def test_what_waits_is_pending(server: EmulatedProcess) -> None:
    body = {
        "input_ids": [[number] * 100 for number in range(1, 41)],
        "sampling_params": {"max_new_tokens": 2},
    }
    logged = len(server.log)
    server.post("/generate", body)
    pending = re.findall(r"PP0\].*#queue-req: (\d+), #pending-token: (\d+)", server.log[logged:])
    assert any(int(tokens) > 0 for _, tokens in pending)
    assert pending[-1] == ("0", "0")
    assert all(int(tokens) % 100 == 0 for _, tokens in pending)


def test_replicas_behind_one_port_take_requests_in_turn(tmp_path: Path) -> None:
    flags = ("--time-scale", "1000", "--dp-size", "2", "--max-running-requests", "8")
    machine = tmp_path / "machine"
    log, gpus = tmp_path / "server.log", ("--gpu-folder", str(machine))
    with emulated_server(log, *flags, *gpus, "--enable-metrics") as server:
        ranks = [server.generate(3, number)["meta_info"]["dp_rank"] for number in range(4)]
        assert ranks == [0, 1, 0, 1]
        batch = {"input_ids": [[number] for number in range(6)]}
        documents = server.post("/generate", batch).json()
        assert [document["meta_info"]["dp_rank"] for document in documents] == [0, 1] * 3
        body = {"server_args": {"pp_max_micro_batch_size": 4}}
        assert server.post("/set_internal_state", body).json() == [True, True]
        states = server.get("/server_info").json()["internal_states"]
        assert [state["pp_max_micro_batch_size"] for state in states] == [4, 4]
        assert [load["dp_rank"] for load in server.get("/v1/loads").json()["loads"]] == [0, 1]
        assert [load["dp_rank"] for load in server.get("/v1/loads?dp_rank=1").json()["loads"]] == [
            1
        ]
        assert 'dp_rank="1"' in server.get("/metrics").text
        assert server.get("/health").status_code == 200
        assert server.post("/flush_cache").status_code == 200
        seen = EmulatedGpus(machine, Clock(20.0))
        owners = [[user.pid for user in seen.processes(gpu.uuid)] for gpu in seen.gpus()]
        seen.close()
        assert owners == [[server.process.pid]] * 2
        server.signal(signal.SIGTERM)
        assert server.wait_end() == 0
        for rank in (0, 1):
            assert re.search(rf"DP{rank}\] Load weight end", server.log)
            assert re.search(rf"DP{rank}\] Prefill batch", server.log)
            assert re.search(rf"DP{rank}\] Cache flushed successfully!", server.log)


def test_an_admin_key_guards_what_controls(tmp_path: Path) -> None:
    flags = ("--api-key", "user", "--admin-api-key", "admin")
    with emulated_server(tmp_path / "server.log", *flags) as server:

        def status(path: str, key: str) -> int:
            headers = {"Authorization": f"bearer {key}"}
            return requests.post(
                server.url + path, json={}, headers=headers, timeout=60
            ).status_code

        assert (status("/abort_request", "user"), status("/abort_request", "admin")) == (401, 200)
        assert (status("/generate", "user"), status("/generate", "admin")) == (400, 401)


def test_a_time_scale_that_no_machine_keeps_up_with_is_told(tmp_path: Path) -> None:
    with emulated_server(tmp_path / "server.log", "--time-scale", "20000") as server:
        body = {
            "input_ids": [[number] for number in range(1, 65)],
            "sampling_params": {"max_new_tokens": 300},
        }
        assert counts(server.post("/generate", body).json()) == [300] * 64
        server.wait_for("The emulation is behind its schedule by ")
        behind = re.findall(r"by [\d.]+ ms of real time on average, \d+% of a token", server.log)
        assert behind
        assert not any(shows_death(line) for line in server.log.splitlines())


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
