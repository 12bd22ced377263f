"""What our own server code makes of faults, told through a study's arguments."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from runner.clock import Clock
from runner.cluster.inline import InlineExecutor
from runner.engines.emulator.faults.draw import draw
from runner.engines.emulator.gpu import EmulatedGpus
from runner.engines.lease import read_leases
from runner.engines.program import program_for
from runner.engines.sglang.replica import ReplicaSpec
from runner.engines.sglang.server import Server, ServerStarted
from runner.engines.sglang.start_limits import PhaseLimit
from runner.errors import ClusterLost, ServerFailed
from runner.launch import plan_launch
from runner.settings import StudySettings
from runner.trial import LaunchSpec, Params
from tests.emulated_server import generate_body
from tests.studies import CPU, study

SCALE = 50.0
LIMIT_S = 60.0


def settings_of(profile: str, gpus: int, args: Params, scale: float = SCALE) -> StudySettings:
    engine = {"kind": "emulated", "profile": profile, "time_scale": scale, "args": dict(args)}
    return study(CPU, engine=engine, hardware={"gpus": gpus}, baselines=[])


class MakeServer(Protocol):
    def __call__(
        self, fault: str, *, launch: int = ..., warm_up_s: float = ..., scale: float = ...
    ) -> Server: ...


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    with ExitStack() as ends:

        def make(
            fault: str, *, launch: int = 1, warm_up_s: float = 6000.0, scale: float = SCALE
        ) -> Server:
            settings = settings_of("cpu-blocking-pp2", 2, {"fault": fault}, scale)
            program = program_for(settings, tmp_path / "machine")
            limits = {**program.limits, "warmup": PhaseLimit(warm_up_s, 6000.0)}
            spec = ReplicaSpec(
                index=0,
                launch_number=launch,
                server_args=plan_launch(settings, {"pp_size": 2}).server_args,
                gpu_indices=(0, 1),
                visible_devices="0,1",
                program=replace(program, limits=limits),
                log_path=tmp_path / f"server-{launch}.log",
                lease_folder=tmp_path / "leases",
            )
            server = Server(spec)
            ends.callback(server.stop)
            return server

        yield make


def send_and_leave(started: ServerStarted, tokens: int) -> None:
    """A client that goes away in the middle of its stream."""
    body = json.dumps(generate_body(tokens, 7, stream=True)).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", started.port), LIMIT_S) as connection:
        connection.sendall(head.encode() + body)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")


def kill_child_at_the_end(ends: ExitStack, leases: Path) -> psutil.Process:
    """The child that a running server leaves behind."""
    (lease,) = read_leases(leases).leases
    (child,) = psutil.Process(lease.pid).children()
    ends.callback(child.kill)
    return child


def await_death(server: Server) -> None:
    while True:
        server.check_alive()


def test_a_taken_port_is_tried_again_with_another(make_server: MakeServer, tmp_path: Path) -> None:
    started = make_server("port-taken:1").start()
    log = (tmp_path / "server-1.log").read_text()
    assert log.count("[Errno 98] error while attempting to bind on address") == 1
    assert log.count(f"Uvicorn running on http://127.0.0.1:{started.port} ") == 1


def test_a_hang_in_warm_up_ends_at_the_limit_of_that_phase(make_server: MakeServer) -> None:
    server = make_server("hang-in-warm-up", warm_up_s=50.0)
    with pytest.raises(ServerFailed, match=r"phase warmup has taken .* at most 50 s"):
        server.start()


def test_a_server_that_stopped_sending_cannot_be_drained(make_server: MakeServer) -> None:
    server = make_server("stop-sending:1")  # the start's own request is the last one served
    send_and_leave(server.start(), 50)
    with pytest.raises(ServerFailed, match="requests still run 150 s after all were aborted"):
        server.drain()


def test_draining_waits_for_ghosts(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server("ghost-requests", scale=10.0)
    started = server.start()
    send_and_leave(started, 100)
    server.drain()
    log = (tmp_path / "server-1.log").read_text()
    assert '"POST /flush_cache HTTP/1.1" 400' in log
    assert server.set_live({})["pp_size"] == 2


def test_a_child_that_outlives_its_server_is_ended_with_the_lease(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server("leave-child")
    started = server.start()
    (child,) = psutil.Process(started.pid).children()
    os.kill(started.pid, signal.SIGKILL)
    (lease,) = read_leases(tmp_path / "leases").leases
    with pytest.raises(ServerFailed, match="the server died"):
        await_death(server)
    assert [stat.process.pid for stat in lease.group.members()] == [child.pid]
    server.stop()
    assert lease.group.members() == ()
    assert read_leases(tmp_path / "leases").leases == ()


def test_a_rate_decides_by_the_launchs_number(make_server: MakeServer) -> None:
    fault = "die-at-start@rate=0.5"
    dying = [n for n in range(50) if draw(0, f"launch {n}", fault) < 0.5]
    spared = [n for n in range(50) if n not in dying]
    with pytest.raises(ServerFailed, match="IndexError: list index out of range"):
        make_server(fault, launch=dying[0]).start()
    assert make_server(fault, launch=spared[0]).start().pid


def test_memory_that_never_comes_back_is_a_lost_machine(tmp_path: Path) -> None:
    settings = settings_of("h200-llama-3.1-8b", 1, {"fault": "leave-child:session"})
    executor = InlineExecutor(settings, tmp_path / "machine", tmp_path / "leases")
    plan = plan_launch(settings, {"pp_size": 1})
    spec = LaunchSpec(1, plan.key, plan.server_args, plan.replicas, plan.gpus_per_replica)
    with ExitStack() as ends:
        ends.callback(executor.close)
        with (
            pytest.raises(ClusterLost, match="was not given back within 60 s"),
            executor.launch(spec, tmp_path / "launch", lambda _: None),
        ):
            child = kill_child_at_the_end(ends, tmp_path / "leases")
        assert child.is_running()


def test_a_launch_ends_when_its_memory_is_back(tmp_path: Path) -> None:
    settings = settings_of("h200-llama-3.1-8b", 1, {"fault": "hold-memory:50"})
    executor = InlineExecutor(settings, tmp_path / "machine", tmp_path / "leases")
    plan = plan_launch(settings, {"pp_size": 1})
    spec = LaunchSpec(1, plan.key, plan.server_args, plan.replicas, plan.gpus_per_replica)
    with executor.launch(spec, tmp_path / "launch", lambda _: None) as servers:
        (uuid,) = servers.report.gpu_uuids
        (lease,) = read_leases(tmp_path / "leases").leases
        gpus = EmulatedGpus(tmp_path / "machine", Clock(SCALE))
        held = gpus.read(uuid).memory_used_bytes
    assert (held or 0) > 100 << 30
    assert not psutil.pid_exists(lease.pid)
    assert gpus.read(uuid).memory_used_bytes == 0
    gpus.close()
    executor.close()
