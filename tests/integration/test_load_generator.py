from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from runner.clock import Clock
from runner.errors import ConfigError, Interrupted, LoadFailed
from runner.load.api import Api
from runner.load.client import Target
from runner.load.generator import LoadGenerator, LoadProgress, merge_runs
from runner.measure.metrics import judge_rung
from runner.trial import (
    Arrivals,
    ClientHealth,
    Lengths,
    LoadPlan,
    LoadProtocol,
    LoadRun,
    LoadStart,
    RequestRecord,
    RequestStatus,
    RungRecord,
)
from tests.scripted_server import (
    DONE,
    END,
    HEAD,
    Body,
    ScriptedServer,
    chunk,
    event,
    plain_reply,
    wanted_of,
)

BURST = LoadPlan(
    phase="rung-0",
    protocol=LoadProtocol.BURST,
    concurrency=4,
    prompt_tokens=Lengths.fixed(8),
    output_tokens=Lengths.fixed(6),
    seed=1,
    min_window_s=0.2,
    max_window_s=5.0,
)
# Tiny requests jitter; these tests are not about how steady they are.
LOOP = replace(BURST, protocol=LoadProtocol.CLOSED_LOOP, precision=1.0)


def drive(plan: LoadPlan, *servers: ScriptedServer, clock: Clock | None = None) -> LoadRun:
    targets = [Target(replica, server.url) for replica, server in enumerate(servers)]
    return LoadGenerator(clock or Clock()).run(plan, targets)


def test_chunks_of_several_tokens_are_counted_by_the_usage_field() -> None:
    async def script(_: int, body: Body) -> AsyncIterator[bytes]:
        yield HEAD
        for count in (1, 4, 6):
            yield chunk(event(count, wanted_of(body)))
            await asyncio.sleep(0.02)
        yield chunk(DONE) + END

    with ScriptedServer(script) as server:
        run = drive(BURST, server)
    assert [record.status for record in run.records] == [RequestStatus.OK] * 4
    for record in run.records:
        assert (record.output_tokens, record.wanted_tokens, record.prompt_tokens) == (6, 6, 8)
        # 1, 3 and 2 tokens: those of one chunk have one time.
        assert [record.token_s.count(time_s) for time_s in sorted(set(record.token_s))] == [1, 3, 2]
        assert record.send_s < record.token_s[0] == record.first_token_s
        assert record.token_s[-1] <= record.end_s <= run.window_end_s
    assert run.window_start_s <= run.records[0].send_s
    assert run.is_steady


def test_events_may_be_split_over_reads_and_be_long() -> None:
    async def script(_: int, body: Body) -> AsyncIterator[bytes]:
        filler = b'{"text":"' + b"x" * 300_000 + b'",'
        reply = HEAD
        for count in range(1, 7):
            data = event(count, wanted_of(body)).replace(b"data: {", b"data: " + filler)
            reply += chunk(data)
        reply += chunk(DONE) + END
        for place in range(0, len(reply), 40_009):
            yield reply[place : place + 40_009]
            await asyncio.sleep(0)

    with ScriptedServer(script) as server:
        run = drive(BURST, server)
    assert [(r.status, r.output_tokens) for r in run.records] == [(RequestStatus.OK, 6)] * 4


def test_single_bytes_are_enough_for_the_parser() -> None:
    async def script(_: int, body: Body) -> AsyncIterator[bytes]:
        wanted = wanted_of(body)
        reply = HEAD + chunk(event(1, wanted)) + chunk(event(wanted, wanted)) + chunk(DONE) + END
        for place in range(len(reply)):
            yield reply[place : place + 1]
            await asyncio.sleep(0)

    with ScriptedServer(script) as server:
        run = drive(replace(BURST, concurrency=1), server)
    assert (run.records[0].status, run.records[0].output_tokens) == (RequestStatus.OK, 6)


async def failing_in_four_ways(number: int, body: Body) -> AsyncIterator[bytes]:
    wanted = wanted_of(body)
    match number:
        case 25:
            yield b"HTTP/1.1 503 Busy\r\ncontent-length: 32\r\n\r\n"
            yield b'{"error":{"message":"too busy"}}'
        case 26:
            yield HEAD + chunk(event(1, wanted))
            yield chunk(b'data: {"error":{"message":"lost a rank"}}\n\n') + chunk(DONE) + END
        case 27:
            yield HEAD + chunk(event(1, wanted))
            raise ConnectionAbortedError
        case 28:
            yield HEAD + chunk(event(1, wanted)) + END
        case _:
            async for piece in plain_reply(number, body):
                yield piece


def test_each_way_to_fail_is_recorded_with_its_cause() -> None:
    with ScriptedServer(failing_in_four_ways) as server:
        run = drive(replace(BURST, concurrency=60), server)
    errors = sorted(record.error for record in run.records if record.error is not None)
    assert errors == [
        "HTTP 503: too busy",
        "error in the stream: lost a rank",
        "the connection was closed before the reply ended",
        "the stream ended without [DONE]",
    ]
    failed = [record for record in run.records if record.status is RequestStatus.FAILED]
    assert len(failed) == 4
    assert all(record.end_s > record.send_s for record in failed)


def test_a_load_whose_first_requests_all_fail_is_given_up() -> None:
    async def script(_: int, _body: Body) -> AsyncIterator[bytes]:
        yield b"HTTP/1.1 400 Bad Request\r\ncontent-length: 9\r\n\r\nno ids,no"

    with (
        ScriptedServer(script) as server,
        pytest.raises(LoadFailed, match=r"4 of 4 requests failed; the first: HTTP 400: no ids,no"),
    ):
        drive(LOOP, server)


def test_a_load_with_one_failure_in_five_is_given_up() -> None:
    async def script(number: int, body: Body) -> AsyncIterator[bytes]:
        if number % 5 == 4:
            raise ConnectionAbortedError
        async for piece in plain_reply(number, body):
            yield piece

    with (
        ScriptedServer(script) as server,
        pytest.raises(LoadFailed, match=r"4 of 2\d requests failed; the first: the connection was"),
    ):
        drive(replace(LOOP, min_window_s=60.0, max_window_s=60.0), server)


def test_a_server_that_is_not_there_is_a_failed_load() -> None:
    with ScriptedServer() as server:
        url = server.url
    with pytest.raises(LoadFailed, match=f"cannot connect to {url}"):
        LoadGenerator(Clock()).run(BURST, [Target(0, url)])


def test_a_server_that_never_answers_is_a_failed_load() -> None:
    async def script(_: int, _body: Body) -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    with (
        ScriptedServer(script) as server,
        pytest.raises(
            LoadFailed,
            match=r"the server hangs: no output token came in 1[23]. s with 1 request in ",
        ),
    ):
        drive(replace(LOOP, max_window_s=1e6), server, clock=Clock(40.0))
    assert server.aborts == [{"rid": "", "abort_all": True}]


def test_cached_tokens_are_seen() -> None:
    async def script(_: int, body: Body) -> AsyncIterator[bytes]:
        wanted = wanted_of(body)
        yield HEAD + chunk(event(wanted, wanted, prompt=8, cached=8)) + chunk(DONE) + END

    with ScriptedServer(script) as server:
        run = drive(BURST, server)
    assert [record.cached_tokens for record in run.records] == [8] * 4
    result = judge_rung(RungRecord(0, 4, (run,), ()), (), BURST)
    assert "the prefix cache served 100% of the prompt tokens" in result.reasons[0]


def test_as_many_requests_are_in_flight_as_there_are_streams() -> None:
    everyone_is_here = asyncio.Event()

    async def script(number: int, body: Body) -> AsyncIterator[bytes]:
        # A client that holds requests back would wait here for ever.
        if number == 127:
            everyone_is_here.set()
        await everyone_is_here.wait()
        async for piece in plain_reply(number, body):
            yield piece

    with ScriptedServer(script) as server:
        run = drive(replace(BURST, concurrency=128), server)
    assert server.most_in_flight == 128
    assert all(record.status is RequestStatus.OK for record in run.records)


def test_closed_loop_keeps_its_streams_busy_and_cuts_them_at_the_end() -> None:
    with ScriptedServer() as first, ScriptedServer() as second:
        run = drive(LOOP, first, second)
    assert run.window_end_s - run.window_start_s >= LOOP.min_window_s
    assert first.most_in_flight == second.most_in_flight == 2
    by_status = dict.fromkeys(RequestStatus, 0)
    for record in run.records:
        by_status[record.status] += 1
    assert by_status[RequestStatus.FAILED] == 0
    assert by_status[RequestStatus.OK] > 20
    assert {record.replica for record in run.records} == {0, 1}
    assert len({record.request_id for record in run.records}) == len(run.records)
    # Streams keep their connections; one more is for the abort.
    assert first.connections <= 3
    cut_replicas = {r.replica for r in run.records if r.status is RequestStatus.CUT}
    for replica, server in enumerate((first, second)):
        expected = [{"rid": "", "abort_all": True}] if replica in cut_replicas else []
        assert server.aborts == expected
    result = judge_rung(RungRecord(0, 4, (run,), ()), ())
    assert 3.0 < result.achieved_concurrency <= 4.0


def test_prompts_are_distinct_and_asked_for_as_planned() -> None:
    with ScriptedServer() as server:
        drive(LOOP, server)
    bodies = [body for _, body in server.requests]
    assert len({body["input_ids"][0] for body in bodies}) == len(bodies)
    assert all(len(body["input_ids"]) == 8 for body in bodies)
    assert all(body["stream"] is True for body in bodies)
    assert bodies[0]["sampling_params"] == {
        "max_new_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
    }


def test_warmup_sends_one_request_per_stream() -> None:
    with ScriptedServer() as server:
        run = drive(replace(LOOP, is_warmup=True), server)
    assert len(server.requests) == len(run.records) == 4
    assert server.aborts == []


def test_servers_that_close_after_each_reply_are_reconnected() -> None:
    async def script(number: int, body: Body) -> AsyncIterator[bytes]:
        async for piece in plain_reply(number, body):
            yield piece.replace(b"transfer-encoding", b"connection: close\r\ntransfer-encoding")
        raise ConnectionAbortedError

    with ScriptedServer(script) as server:
        run = drive(LOOP, server)
    assert all(record.status is not RequestStatus.FAILED for record in run.records)
    assert server.connections >= len(run.records)


def test_open_loop_sends_at_its_rate_whatever_the_server_does() -> None:
    plan = replace(
        BURST, protocol=LoadProtocol.OPEN_LOOP, rate=20.0, min_window_s=4.0, max_window_s=16.0
    )
    with ScriptedServer() as server:
        run = drive(plan, server, clock=Clock(20.0))
    window_s = run.window_end_s - run.window_start_s
    sent = sum(run.window_start_s < r.send_s <= run.window_end_s for r in run.records)
    # Poisson: four standard deviations.
    assert abs(sent - 20.0 * window_s) < 4 * (20.0 * window_s) ** 0.5
    gaps = [b.send_s - a.send_s for a, b in zip(run.records, run.records[1:], strict=False)]
    assert max(gaps) > 2 * sum(gaps) / len(gaps)


def test_shards_share_one_load_and_abort_only_their_own() -> None:
    runs: list[LoadRun] = []
    plan = replace(LOOP, concurrency=5, output_tokens=Lengths("uniform", 4, 12))

    def shard(number: int, url: str) -> None:
        runs.append(LoadGenerator(Clock()).run(plan, [Target(0, url)], number, 2))

    with ScriptedServer() as server:
        threads = [threading.Thread(target=shard, args=(n, server.url)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    merged = merge_runs(runs)
    assert len({record.request_id for record in merged.records}) == len(merged.records)
    assert all(record.status is not RequestStatus.FAILED for record in merged.records)
    cut = {r.request_id for r in merged.records if r.status is RequestStatus.CUT}
    assert {abort["rid"] for abort in server.aborts} == cut
    assert merged.window_start_s == max(run.window_start_s for run in runs)
    assert merged.window_end_s == min(run.window_end_s for run in runs)


@pytest.mark.parametrize(
    ("windows", "is_steady"),
    [
        (((0.0, 10.0), (1.0, 12.0)), True),
        (((0.0, 10.0), (4.9, 30.0)), True),
        (((0.0, 10.0), (5.1, 30.0)), False),  # less than half of the shorter one is common
        (((0.0, 10.0), (11.0, 30.0)), False),
    ],
)
def test_shards_that_hardly_ran_together_are_not_steady(
    windows: tuple[tuple[float, float], ...], *, is_steady: bool
) -> None:
    health = ClientHealth(0.1, 0.0)
    runs = [LoadRun((), start_s, start_s, end_s, True, health) for start_s, end_s in windows]
    assert merge_runs(runs).is_steady is is_steady


def shard_of(start_s: float, end_s: float, rate: float, cut_below: float | None = None) -> LoadRun:
    """A shard that saw `rate` tokens a second from 0 to its end."""
    times_s = tuple(turn / rate for turn in range(1, round(rate * end_s) + 1))
    record = RequestRecord(
        "r", 0, 0.0, times_s[0], end_s, times_s, 8, len(times_s), 99, 0, RequestStatus.CUT
    )
    health, is_steady = ClientHealth(0.1, 0.0), cut_below is None
    return LoadRun((record,), 0.0, start_s, end_s, is_steady, health, cut_below=cut_below)


def test_the_shard_that_ends_first_as_hopeless_gives_its_window() -> None:
    # Without the first one the second has the server for itself, and gets fast.
    cut, later = shard_of(5.0, 9.0, 2.0, cut_below=20.0), shard_of(10.0, 40.0, 3.0)
    merged = merge_runs([later, cut])
    assert (merged.window, merged.is_steady, merged.cut_below) == ((5.0, 9.0), False, 20.0)


def test_shards_that_were_not_hopeless_together_are_not_steady() -> None:
    cut, fast = shard_of(5.0, 9.0, 2.0, cut_below=20.0), shard_of(4.0, 40.0, 12.0)
    merged = merge_runs([cut, fast])
    assert (merged.window, merged.is_steady, merged.cut_below) == ((5.0, 9.0), False, None)


def test_a_shard_that_ends_as_hopeless_behind_the_others_decides_nothing() -> None:
    whole, cut = shard_of(2.0, 9.0, 2.0), shard_of(4.0, 40.0, 2.0, cut_below=20.0)
    merged = merge_runs([whole, cut])
    assert (merged.window, merged.is_steady, merged.cut_below) == ((4.0, 9.0), False, None)


def test_shards_of_a_hopeless_load_end_early_by_their_share_of_the_streams() -> None:
    plan = replace(LOOP, concurrency=5, max_window_s=60.0, min_window_s=30.0)
    runs: dict[tuple[int, float], LoadRun] = {}

    def shard(number: int, url: str, worth: float) -> None:
        load = replace(plan, worth=worth)
        runs[number, worth] = LoadGenerator(Clock()).run(load, [Target(0, url)], number, 2)

    with ScriptedServer() as server:
        threads = [threading.Thread(target=shard, args=(n, server.url, 1e6)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [run.cut_below for run in runs.values()] == [1e6, 1e6]
    merged = merge_runs(list(runs.values()))
    assert (merged.cut_below, merged.is_steady) == (1e6, False)
    assert all(record.status is not RequestStatus.FAILED for record in merged.records)


def test_cancel_ends_a_load_and_frees_the_server() -> None:
    all_asked = threading.Event()

    async def script(number: int, body: Body) -> AsyncIterator[bytes]:
        yield HEAD + chunk(event(1, wanted_of(body)))
        if number == 3:
            all_asked.set()
        await asyncio.Event().wait()

    generator = LoadGenerator(Clock())

    def cancel() -> None:
        all_asked.wait()
        generator.cancel()
        generator.cancel()

    with ScriptedServer(script) as server:
        canceller = threading.Thread(target=cancel)
        canceller.start()
        plan = replace(LOOP, max_window_s=1e6, start=LoadStart.TOGETHER)
        with pytest.raises(Interrupted):
            generator.run(plan, [Target(0, server.url)])
        canceller.join()
        assert server.aborts == [{"rid": "", "abort_all": True}]
    # The generator can be used again.
    with ScriptedServer() as server:
        assert len(generator.run(BURST, [Target(0, server.url)]).records) == 4


def test_cancel_without_a_load_does_nothing() -> None:
    generator = LoadGenerator(Clock())
    generator.cancel()
    with ScriptedServer() as server:
        assert generator.run(BURST, [Target(0, server.url)]).is_steady


def test_progress_is_told_while_the_load_runs() -> None:
    told: list[LoadProgress] = []
    plan = replace(LOOP, min_window_s=1.2, max_window_s=30.0)
    with ScriptedServer() as server:
        LoadGenerator(Clock()).run(plan, [Target(0, server.url)], on_progress=told.append)
    assert told
    assert told[-1].output_tokens > 0
    assert told[-1].output_throughput > 0


def test_an_unforeseen_error_surfaces() -> None:
    def broken(_: LoadProgress) -> None:
        raise ZeroDivisionError

    plan = replace(LOOP, min_window_s=60.0, max_window_s=60.0)
    with ScriptedServer() as server, pytest.raises(ZeroDivisionError):
        LoadGenerator(Clock()).run(plan, [Target(0, server.url)], on_progress=broken)


@pytest.mark.parametrize(
    ("api", "path", "prompt"),
    [
        (Api.COMPLETIONS, "/v1/completions", "prompt"),
        (Api.CHAT, "/v1/chat/completions", "messages"),
    ],
)
def test_openai_like_interfaces(api: Api, path: str, prompt: str) -> None:
    async def script(_: int, body: Body) -> AsyncIterator[bytes]:
        wanted = body["max_tokens"]
        yield HEAD
        for count in range(1, wanted + 1):
            finish = b'"length"' if count == wanted else b"null"
            choice = b'[{"index":0,"text":" a","finish_reason":%s}]' % finish
            usage = b'{"prompt_tokens":8,"completion_tokens":%d}' % count
            yield chunk(b'data: {"choices":%s,"usage":%s}\n\n' % (choice, usage))
        yield chunk(b'data: {"choices":[],"usage":%s}\n\n' % usage)
        yield chunk(DONE) + END

    with ScriptedServer(script) as server:
        target = Target(0, f"{server.url}/prefix/", api, "a-model")
        run = LoadGenerator(Clock()).run(BURST, [target])
    assert [(r.status, r.output_tokens) for r in run.records] == [(RequestStatus.OK, 6)] * 4
    asked_path, body = server.requests[0]
    assert asked_path == f"/prefix{path}"
    assert body["model"] == "a-model"
    assert body[prompt]
    assert body["stream_options"]["continuous_usage_stats"] is True


@pytest.mark.parametrize("url", ["ftp://host:1", "host:8000", "http://", "http://host:port"])
def test_addresses_that_cannot_be_used_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no server address"):
        LoadGenerator(Clock()).run(BURST, [Target(0, url)])


def test_a_captured_reply_is_read_from_the_wire() -> None:
    captured = (Path(__file__).parents[1] / "data/sse/generate-0.5.16.http").read_bytes()

    async def script(_: int, _body: Body) -> AsyncIterator[bytes]:
        yield captured
        raise ConnectionAbortedError

    with ScriptedServer(script) as server:
        run = drive(replace(BURST, output_tokens=Lengths.fixed(12)), server)
    for record in run.records:
        assert (record.status, record.error) == (RequestStatus.OK, None)
        assert (record.output_tokens, record.prompt_tokens, record.cached_tokens) == (12, 16, 0)


def test_constant_arrivals_are_due_at_equal_gaps_and_say_so() -> None:
    plan = replace(
        BURST,
        protocol=LoadProtocol.OPEN_LOOP,
        arrivals=Arrivals.CONSTANT,
        rate=20.0,
        min_window_s=1.0,
        max_window_s=4.0,
    )
    with ScriptedServer() as server:
        run = drive(plan, server)
    due_s = [record.due_s for record in run.records if record.due_s is not None]
    assert len(due_s) == len(run.records)
    gaps_s = {round(b - a, 6) for a, b in pairwise(due_s)}
    assert gaps_s == {0.05}
    # A timer may fire a little before its time.
    assert all(r.send_s > due - 0.005 for r, due in zip(run.records, due_s, strict=True))


def test_an_early_hint_is_not_the_reply() -> None:
    async def script(number: int, body: Body) -> AsyncIterator[bytes]:
        yield b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
        async for piece in plain_reply(number, body):
            yield piece

    with ScriptedServer(script) as server:
        run = drive(BURST, server)
    assert [(r.status, r.output_tokens) for r in run.records] == [(RequestStatus.OK, 6)] * 4
