"""What our own server code makes of faults, told through a study's arguments."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from runner.clock import Clock
from runner.cluster.executor import NoteSight, RunningLaunch
from runner.cluster.inline import InlineExecutor
from runner.engines.emulator.faults.draw import draw
from runner.engines.emulator.flags import emulated_environment
from runner.engines.emulator.gpu import EmulatedGpus, GpuWriter
from runner.engines.lease import read_leases
from runner.engines.program import program_for
from runner.engines.sglang.replica import ReplicaSpec
from runner.engines.sglang.server import Server, ServerStarted
from runner.engines.sglang.start_limits import PhaseLimit
from runner.errors import ClusterLost, LoadFailed, ServerFailed, StudyError
from runner.launch import plan_launch
from runner.machine.profile import load_profile, profile_text
from runner.plans import rung_plans
from runner.settings import StudySettings
from runner.trial import LaunchSpec, LoadPlan, LoadRun, Params, ParamValue
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
            program = program_for(settings, tmp_path / "machine", emulated_environment())
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
    ends.callback(end_child, child)
    return child


def end_child(child: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        child.kill()
    psutil.wait_procs([child], LIMIT_S)


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


def profile_of(tmp_path: Path, gpus: int) -> str:
    """A machine of so many H200s."""
    profile = replace(load_profile("h200-llama-3.1-8b"), gpus=gpus)
    path = tmp_path / f"h200-x{gpus}.yaml"
    path.write_text(profile_text(profile), encoding="utf-8")
    return str(path)


class Launcher:
    """An executor on some of an emulated machine's GPUs; notes what the user is told."""

    def __init__(self, tmp_path: Path, wanted: int, gpus: int, **args: ParamValue) -> None:
        self._tmp_path = tmp_path
        self.settings = settings_of(profile_of(tmp_path, gpus), wanted, args)
        self.executor = InlineExecutor(self.settings, tmp_path / "machine", tmp_path / "leases")
        self.notes: list[str] = []
        self._launches = 0

    def launch(self, **params: ParamValue) -> AbstractContextManager[RunningLaunch]:
        self._launches += 1
        plan = plan_launch(self.settings, {"pp_size": 1, **params})
        shape = (plan.replicas, plan.gpus_per_replica)
        spec = LaunchSpec(self._launches, plan.key, plan.server_args, *shape)
        return self.executor.launch(spec, self._tmp_path / f"launch-{self._launches}", self._note)

    def _note(self, sight: object) -> None:
        if isinstance(sight, NoteSight):
            self.notes.append(sight.text)


def gpus_of(tmp_path: Path) -> list[int]:
    """The GPUs that servers run on now."""
    return sorted(gpu for lease in read_leases(tmp_path / "leases").leases for gpu in lease.gpus)


def test_a_dirty_gpu_is_replaced_by_a_spare(tmp_path: Path) -> None:
    machine = Launcher(tmp_path, wanted=1, gpus=3)
    leak = machine.launch(fault="leave-child:session")
    with ExitStack() as ends:
        ends.callback(machine.executor.close)
        with pytest.raises(ClusterLost, match="was not given back within 60 s"), leak:
            child = kill_child_at_the_end(ends, tmp_path / "leases")
        with machine.launch() as servers:
            assert gpus_of(tmp_path) == [1]
            assert len(servers.report.gpu_uuids) == 1
        assert machine.notes == [
            (
                "GPU 0 is in quarantine: the memory of a server was not given back within 60 s "
                "after the servers ended"
            )
        ]
        end_child(child)
        assert [gpu.index for gpu in machine.executor.gpus()] == [1]


def test_a_dirty_gpu_without_a_spare_ends_the_study_with_its_name(tmp_path: Path) -> None:
    machine = Launcher(tmp_path, wanted=1, gpus=1)
    leak = machine.launch(fault="leave-child:session")
    with ExitStack() as ends:
        ends.callback(machine.executor.close)
        with pytest.raises(ClusterLost, match="was not given back"), leak:
            child = kill_child_at_the_end(ends, tmp_path / "leases")
        with (
            pytest.raises(StudyError, match=rf"GPU 0 .* by process {child.pid} .*; in quarantine"),
            machine.launch(),
        ):
            pytest.fail("it was launched on a dirty GPU")
    assert gpus_of(tmp_path) == []


def test_memory_that_a_dead_driver_left_is_awaited_by_the_next(tmp_path: Path) -> None:
    Launcher(tmp_path, wanted=1, gpus=1).executor.close()
    writer = GpuWriter(tmp_path / "machine", 0)  # a server that goes when its driver has gone
    machine = Launcher(tmp_path, wanted=1, gpus=1)
    gpus = EmulatedGpus(tmp_path / "machine", Clock(SCALE))
    uuid = gpus.gpus()[0].uuid
    writer.hold(100 << 30)
    writer.keep_memory(40.0 / SCALE)
    writer.leave()
    assert gpus.processes(uuid) == ()
    assert gpus.read(uuid).memory_used_bytes == 100 << 30
    with machine.launch():
        assert (gpus.read(uuid).memory_used_bytes or 0) > 100 << 30  # of 140: the server's alone
    gpus.close()
    machine.executor.close()


def test_a_server_that_hangs_under_load_is_found_in_time_and_ended(tmp_path: Path) -> None:
    machine = Launcher(tmp_path, wanted=1, gpus=1)
    (plan, *_) = rung_plans(machine.settings, 0)
    endless = replace(plan, max_window_s=1e6)
    hanging = machine.launch(fault="stop-sending:1requests")  # the start's own is the last served
    with pytest.raises(LoadFailed, match="the server hangs: no output token came in"):
        drive(hanging, endless)
    assert read_leases(tmp_path / "leases").leases == ()
    machine.executor.close()


def test_a_death_under_load_has_the_servers_own_reason_and_leaves_nothing(tmp_path: Path) -> None:
    machine = Launcher(tmp_path, wanted=1, gpus=1)
    (plan, *_) = rung_plans(machine.settings, 0)
    dying = machine.launch(fault="die-after-requests:3")
    with pytest.raises(ServerFailed, match=r"the server died: .*: died after 3 req") as error:
        drive(dying, replace(plan, max_window_s=1e6))
    assert error.value.log_path == str(tmp_path / "launch-1" / "replica-0.log")
    assert read_leases(tmp_path / "leases").leases == ()
    machine.executor.check_gpus()
    machine.executor.close()


def drive(launch: AbstractContextManager[RunningLaunch], plan: LoadPlan) -> LoadRun:
    with launch as servers:
        return servers.run_load(plan)


STRANGER = """
import sys
from pathlib import Path
from runner.engines.emulator.gpu import GpuWriter
writer = GpuWriter(Path(sys.argv[1]), int(sys.argv[2]))
writer.hold(int(sys.argv[3]) << 20)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def stranger(machine: Path, gpu: int, mib: int) -> Iterator[int]:
    """Somebody else's process with memory on a GPU."""
    words = [sys.executable, "-c", STRANGER, str(machine), str(gpu), str(mib)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process.pid
        process.kill()


def test_a_stranger_on_a_gpu_is_refused_before_every_launch(tmp_path: Path) -> None:
    machine = Launcher(tmp_path, wanted=1, gpus=2)
    machine.executor.check_gpus()
    with stranger(tmp_path / "machine", gpu=0, mib=50 << 10) as pid:
        said = rf"GPU 0 .* 50.0 GiB in use, by process {pid} \(.*python.*\) with 50.0 GiB\n.*=1$"
        with pytest.raises(StudyError, match=said):
            machine.executor.check_gpus()
        with pytest.raises(StudyError, match=said), machine.launch():
            pytest.fail("it was launched beside a stranger")
    with stranger(tmp_path / "machine", gpu=0, mib=900):
        machine.executor.check_gpus()
    machine.executor.close()


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
        reports = [servers.report]
    reports.append(servers.report)
    before_s, after_s = (report.memory_s for report in reports)
    assert before_s is None
    assert after_s is not None
    assert after_s > 1.0  # of the 50 s that it was told to hold it
    assert (held or 0) > 100 << 30
    assert not psutil.pid_exists(lease.pid)
    assert gpus.read(uuid).memory_used_bytes == 0
    gpus.close()
    executor.close()
