"""One server from start to end: real processes, real HTTP, a stand-in for SGLang's insides."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from runner.canary import PROMPTS, TOKENS
from runner.clock import Clock
from runner.engines.emulator.flags import emulated_environment
from runner.engines.lease import end_orphans, read_leases
from runner.engines.ports import HeldPorts, hold_ports
from runner.engines.processes import identify, is_running
from runner.engines.sglang.jit_cache import hold_cache
from runner.engines.sglang.replica import ReplicaSpec, ServerProgram
from runner.engines.sglang.server import Server
from runner.engines.sglang.start_limits import PhaseLimit
from runner.errors import ClusterLost, Infeasible, Interrupted, ServerFailed
from runner.trial import GreedyOutput, Params

TESTS = Path(__file__).parents[1]
LOGS = TESTS / "data" / "server_logs"
FAKE = (sys.executable, str(TESTS / "fake_sglang.py"))
SOON_S = 10.0


class MakeServer(Protocol):
    def __call__(
        self,
        *fakes: str,
        args: Params | None = None,
        hold: Callable[[int], HeldPorts] = ...,
        program: ServerProgram = ...,
    ) -> Server: ...


PROGRAM = ServerProgram(FAKE, {}, Clock(scale=10.0), emulated_environment())


def limited(phase: str, limit: PhaseLimit) -> ServerProgram:
    """The fake's program with another limit for one phase."""
    return replace(PROGRAM, limits={**PROGRAM.limits, phase: limit})


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    with ExitStack() as ends:

        def make(
            *fakes: str,
            args: Params | None = None,
            hold: Callable[[int], HeldPorts] = hold_ports,
            program: ServerProgram = PROGRAM,
        ) -> Server:
            words = [word for fake in fakes for word in ("--fake", fake)]
            spec = ReplicaSpec(
                index=1,
                launch_number=3,
                server_args=args or {},
                gpu_indices=(4, 5, 6, 7),
                visible_devices="4,5,6,7",
                program=replace(program, argv=(*program.argv, *words)),
                log_path=tmp_path / "logs" / "replica-1.log",
                lease_folder=tmp_path / "leases",
            )
            server = Server(spec, hold)
            ends.callback(server.stop)
            return server

        yield make


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + SOON_S
    while not is_true():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


def log_text(tmp_path: Path) -> str:
    return (tmp_path / "logs" / "replica-1.log").read_text(encoding="utf-8")


def test_a_server_starts_serves_and_leaves_nothing(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(args={"pp_size": 2, "max_running_requests": 16})
    started = server.start()
    lease = read_leases(tmp_path / "leases").leases[0]
    process = identify(started.pid)
    assert (lease.pid, lease.start_time, lease.pgid) == (
        *(started.pid, process.start_time),
        os.getpgid(started.pid),
    )
    assert (lease.port, lease.gpus, lease.launch, lease.replica) == (
        started.port,
        (4, 5, 6, 7),
        3,
        1,
    )
    assert lease.driver == identify(os.getpid())
    assert started.url == f"http://127.0.0.1:{started.port}"
    server.check_alive()
    server.stop()
    assert not is_running(process)
    assert lease.group.members() == ()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", started.port))
    assert read_leases(tmp_path / "leases").leases == ()
    server.stop()


def test_gpu_numbers_are_local_and_devices_explicit(make_server: MakeServer) -> None:
    started = make_server().start()
    assert started.server_info["base_gpu_id"] == 0
    assert started.server_info["cuda_devices"] == "4,5,6,7"
    assert started.server_info["device_order"] == "PCI_BUS_ID"
    assert started.server_info["nccl_port"] != started.port
    assert started.command.startswith("CUDA_VISIBLE_DEVICES=4,5,6,7 ")
    assert f"--port {started.port}" in started.command


def test_a_server_does_not_depend_on_who_starts_it(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_JOB_ID", "OMP_NUM_THREADS", "HF_HOME"):
        monkeypatch.setenv(name, "1")
    program = replace(PROGRAM, env={"SGLANG_CACHE_DIR": "/var/cache"})
    names = make_server(program=program).start().server_info["environment"]
    assert isinstance(names, list)
    assert {"HF_HOME", "SGLANG_CACHE_DIR"} <= set(names)
    assert not {"RAY_JOB_ID", "OMP_NUM_THREADS"} & set(names)


def test_what_servers_compile_is_kept_and_its_locks_are_theirs(
    make_server: MakeServer, tmp_path: Path
) -> None:
    folder = tmp_path / "cache" / "jit" / "0.5.23-H200-570"
    program = replace(PROGRAM, cache_folder=folder, env={"TRITON_CACHE_DIR": "/mine"})
    lock = folder / "torch_extensions" / "op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    server = make_server(program=program)
    command = server.start().command
    assert not lock.exists()
    assert f"SGLANG_CACHE_DIR={folder} " in command
    assert f"FLASHINFER_WORKSPACE_BASE={folder / 'flashinfer'} " in command
    assert "TRITON_CACHE_DIR=/mine " in command
    lock.touch()
    with hold_cache(folder):
        assert lock.exists()
    server.stop()
    with hold_cache(folder):
        assert not lock.exists()


def test_phases_add_up_to_the_start(make_server: MakeServer) -> None:
    phase_s = make_server("delay=0.3").start().phase_s
    assert {"import", "init", "load_weights", "warmup", "total"} == set(phase_s)
    assert sum(phase_s.values()) == pytest.approx(2 * phase_s["total"])


def test_times_are_in_seconds_of_the_scaled_clock(make_server: MakeServer) -> None:
    program = replace(PROGRAM, clock=Clock(scale=100.0))
    phase_s = make_server("delay=0.3", program=program).start().phase_s
    assert phase_s["total"] >= 30.0


def test_a_live_value_is_set_read_back_and_given_back(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server(args={"pp_size": 2, "max_running_requests": 16})
    server.start()
    assert server.set_live({})["pp_max_micro_batch_size"] == 8
    assert server.set_live({"pp_max_micro_batch_size": 3})["pp_max_micro_batch_size"] == 3
    assert server.set_live({})["pp_max_micro_batch_size"] == 8
    assert "abort_all" in log_text(tmp_path)


@pytest.mark.parametrize("asked", [0, 9, 64])
def test_a_live_value_out_of_range_is_infeasible(make_server: MakeServer, asked: int) -> None:
    server = make_server(args={"pp_size": 2, "max_running_requests": 16})
    server.start()
    with pytest.raises(Infeasible) as error:
        server.set_live({"pp_max_micro_batch_size": asked})
    assert str(error.value) == (
        f"the server kept pp_max_micro_batch_size 8; {asked} is outside 1..8"
    )
    assert server.set_live({"pp_max_micro_batch_size": 2})["pp_max_micro_batch_size"] == 2


def test_a_value_that_is_not_applied_is_infeasible_whatever_the_answer_was(
    make_server: MakeServer,
) -> None:
    server = make_server("deaf=1", args={"pp_size": 2, "max_running_requests": 16})
    server.start()
    with pytest.raises(Infeasible, match="kept pp_max_micro_batch_size 8; 4 was refused"):
        server.set_live({"pp_max_micro_batch_size": 4})


@pytest.mark.parametrize("words", [(), ("strict=1",)])
def test_greedy_outputs_are_asked_for_and_the_server_is_left_drained(
    make_server: MakeServer, tmp_path: Path, words: tuple[str, ...]
) -> None:
    server = make_server(*words)
    server.start()
    outputs = server.greedy_outputs()
    firsts = [prompt[0] for prompt in PROMPTS]
    assert outputs == tuple(GreedyOutput((first,) * TOKENS, (None,) * TOKENS) for first in firsts)
    assert "abort_all" in log_text(tmp_path)


def test_greedy_outputs_that_are_not_whole_are_a_failure(make_server: MakeServer) -> None:
    server = make_server("curt=1")
    server.start()
    with pytest.raises(ServerFailed, match=f"was answered with {TOKENS - 1} of {TOKENS} greedy"):
        server.greedy_outputs()


def test_a_server_that_is_not_idle_after_its_greedy_outputs_failed(
    make_server: MakeServer,
) -> None:
    server = make_server("ghosts=1000000", program=replace(PROGRAM, drain_deadline_s=1.0))
    server.start()
    with pytest.raises(ServerFailed, match="requests still run"):
        server.greedy_outputs()


def test_draining_waits_for_requests_that_survive_the_abort(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server("ghosts=3")
    server.start()
    server.drain()
    assert log_text(tmp_path).count("abort_all") == 4


def test_draining_gives_up_at_its_deadline(make_server: MakeServer) -> None:
    server = make_server("ghosts=1000000", program=replace(PROGRAM, drain_deadline_s=1.0))
    server.start()
    with pytest.raises(ServerFailed, match="requests still run"):
        server.drain()


@pytest.mark.parametrize(
    ("log", "exit_code", "kind", "message"),
    [
        ("unknown-flag.log", 2, Infeasible, "the server does not know the flag: --no-such-flag 7"),
        ("bad-value.log", 2, Infeasible, "the server refused a flag: argument --attention"),
        ("out-of-memory.log", -9, Infeasible, "out of GPU memory: "),
        ("too-little-memory.log", -9, Infeasible, "no GPU memory is left for the KV cache: "),
        ("two-gpus.log", -9, Infeasible, "the server wants GPUs it was not given: "),
        ("crash-while-serving.log", -9, ServerFailed, "died while starting: a GPU fault"),
        ("start-cpu-pp2.log", 1, ServerFailed, "ended with exit code 1 and names no reason"),
        ("start-cpu-pp2.log", -9, ServerFailed, "ended with exit code -9 and names no reason"),
    ],
)
def test_a_death_at_start_is_classified_by_its_log(
    make_server: MakeServer,
    tmp_path: Path,
    log: str,
    exit_code: int,
    kind: type[Infeasible | ServerFailed],
    message: str,
) -> None:
    server = make_server(f"log={LOGS / log}", f"exit={exit_code}")
    with pytest.raises(kind) as error:
        server.start()
    assert message in str(error.value)
    assert error.value.log_path == str(tmp_path / "logs" / "replica-1.log")
    assert read_leases(tmp_path / "leases").leases == ()


def test_a_program_that_is_not_there_is_named(make_server: MakeServer) -> None:
    server = make_server(program=replace(PROGRAM, argv=("/none/bin/python", "-m", "sglang")))
    with pytest.raises(ServerFailed, match="cannot start /none/bin/python: No such file"):
        server.start()


def test_a_quiet_start_is_a_hang(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server("hang=1", program=limited("init", PhaseLimit(6000.0, 10.0)))
    with pytest.raises(ServerFailed, match=r"in phase init, .* neither logged nor computed nor "):
        server.start()
    assert read_leases(tmp_path / "leases").leases == ()


def test_a_server_that_never_gets_well_misses_its_deadline(make_server: MakeServer) -> None:
    server = make_server("sick=1", program=limited("warmup", PhaseLimit(8.0, 6000.0)))
    with pytest.raises(ServerFailed, match=r"phase warmup has taken \d+ s, at most 8 s") as error:
        server.start()
    assert "last log line: " in str(error.value)
    assert "Uvicorn running on" in str(error.value)


LOADING = "[2026-03-04 09:11:07 TP0] Load weight begin. avail mem=90.00 GB\n"
CAPTURING = LOADING + "".join(
    f"[2026-03-04 09:11:08 TP0] {line}\n"
    for line in (
        "Load weight end. elapsed=1.00 s",
        "Memory pool end. avail mem=9.00 GB",
        "Capture target prefill CUDA graph begin. backend=breakable",
        "Capture target prefill CUDA graph end. bs=[1], elapsed=1.00 s",
        "Capture target decode CUDA graph begin. backend=full",
    )
)


@pytest.mark.parametrize(("said", "phase"), [(LOADING, "load_weights"), (CAPTURING, "cuda_graph")])
def test_each_phase_has_a_limit_of_its_own(
    make_server: MakeServer, tmp_path: Path, said: str, phase: str
) -> None:
    (tmp_path / "said").write_text(said)
    program = limited(phase, PhaseLimit(3.0, 6000.0))
    with pytest.raises(ServerFailed, match=f"phase {phase} has taken .* at most 3 s") as error:
        make_server(f"stall={tmp_path / 'said'}", program=program).start()
    assert str(error.value).endswith(f"last log line: {said.splitlines()[-1]}")


@pytest.mark.parametrize("busy", ["cpu", "read"])
def test_a_start_that_works_is_not_stalled(
    make_server: MakeServer, tmp_path: Path, busy: str
) -> None:
    (tmp_path / "said").write_text(LOADING)
    program = limited("load_weights", PhaseLimit(35.0, 15.0))
    with pytest.raises(ServerFailed, match=r"phase load_weights has taken .* at most 35 s"):
        make_server(f"stall={tmp_path / 'said'}", f"busy={busy}", program=program).start()


WATCHDOG = """\
[2026-03-04 09:18:08 PP2] Watchdog timeout (self.watchdog_timeout=300, self.soft=False)
[2026-03-04 09:18:09 PP2] Pyspy dump for PID 171:
Process 171: sglang::scheduler_PP2
Thread 171 (active): "MainThread"
    recv_object (torch/distributed/distributed_c10d.py:2441)
[2026-03-04 09:18:14 PP3] Scheduler hit an exception: Traceback (most recent call last):
  File "/site/sglang/srt/managers/scheduler_pp_mixin.py", line 400, in event_loop_pp
RuntimeError: Connection closed by peer [127.0.0.1]:41234
[2026-03-04 09:18:14] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
"""


def test_a_watchdogs_dump_is_kept_whole_and_is_the_reason(
    make_server: MakeServer, tmp_path: Path
) -> None:
    (tmp_path / "dump").write_text(WATCHDOG)
    program = limited("warmup", PhaseLimit(5.0, 6000.0))  # passes while the dump is written
    with pytest.raises(ServerFailed) as error:
        make_server("sick=1", f"bark={tmp_path / 'dump'}", program=program).start()
    assert str(error.value).startswith(
        "the server died while starting: the server hung: Watchdog timeout (self.watchdog_timeout="
    )
    assert WATCHDOG in log_text(tmp_path)
    assert error.value.log_path == str(tmp_path / "logs" / "replica-1.log")


def test_death_while_serving_is_noticed_with_its_reason(make_server: MakeServer) -> None:
    server = make_server()
    started = server.start()
    os.kill(started.pid, signal.SIGKILL)
    wait_until(lambda: not is_running_pid(started.pid))
    with pytest.raises(ServerFailed, match=r"the server died: .*exit code -9"):
        server.check_alive()
    with pytest.raises(ServerFailed, match=r"the server died: .*exit code -9"):
        server.drain()


def is_running_pid(pid: int) -> bool:
    try:
        return is_running(identify(pid))
    except ProcessLookupError:
        return False


def test_the_death_of_a_part_is_noticed_before_the_main_process_ends(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server()
    server.start()
    server.check_alive()
    killed = (LOGS / "killed-scheduler.log").read_text(encoding="utf-8")
    with (tmp_path / "logs" / "replica-1.log").open("a", encoding="utf-8") as log:
        log.write(killed)
    for _ in range(2):
        with pytest.raises(ServerFailed, match=r"scheduler_0 .* crashed with exit code -9"):
            server.check_alive()


def occupy(times: int, ends: ExitStack) -> Callable[[int], HeldPorts]:
    """Ports of which the first ones are taken between their choice and the server's start."""
    left = times

    def hold(count: int) -> HeldPorts:
        nonlocal left
        held = hold_ports(count)
        if left > 0:
            left -= 1
            taker = ends.enter_context(socket.socket())
            taker.bind(("127.0.0.1", held.numbers[0]))
        return held

    return hold


def test_a_port_taken_before_the_start_is_replaced(make_server: MakeServer, tmp_path: Path) -> None:
    with ExitStack() as ends:
        server = make_server(hold=occupy(3, ends))
        started = server.start()
        assert log_text(tmp_path).count("address already in use") == 3
        assert [lease.port for lease in read_leases(tmp_path / "leases").leases] == [started.port]


def test_ports_taken_four_times_in_a_row_are_a_loss(make_server: MakeServer) -> None:
    with ExitStack() as ends:
        server = make_server(hold=occupy(4, ends))
        with pytest.raises(ClusterLost, match="4 ports in a row were taken"):
            server.start()


def test_a_foreign_server_on_the_port_is_not_taken_for_ours(make_server: MakeServer) -> None:
    foreign = make_server()
    port = foreign.start().port
    calls = 0

    def hold(count: int) -> HeldPorts:
        nonlocal calls
        calls += 1
        held = hold_ports(count)
        if calls == 1:  # as if the other server had come a moment later
            held.numbers = (port, held.numbers[1])
        return held

    started = make_server("delay=1.0", hold=hold).start()
    assert calls == 2
    assert started.port != port


def test_a_stop_request_ends_the_start_promptly(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server("hang=1")
    began_s = time.monotonic()
    asker = threading.Timer(0.5, server.request_stop)
    asker.start()
    with pytest.raises(Interrupted):
        server.start()
    asker.join()
    assert time.monotonic() - began_s < SOON_S
    assert read_leases(tmp_path / "leases").leases == ()
    with pytest.raises(Interrupted):
        server.start()


def test_a_stop_request_ends_even_a_call_that_is_never_answered(make_server: MakeServer) -> None:
    server = make_server("mute=1")
    asker = threading.Timer(1.0, server.request_stop)
    asker.start()
    with pytest.raises(Interrupted):
        server.start()
    asker.join()


def test_a_stop_request_ends_draining_promptly(make_server: MakeServer) -> None:
    server = make_server("ghosts=1000000")
    server.start()
    asker = threading.Timer(0.3, server.request_stop)
    asker.start()
    with pytest.raises(Interrupted):
        server.drain()
    asker.join()


def test_stop_from_another_thread_ends_a_start(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server("hang=1")
    stopper = threading.Timer(0.5, server.stop)
    stopper.start()
    with pytest.raises(Interrupted):
        server.start()
    stopper.join()
    assert read_leases(tmp_path / "leases").leases == ()


def test_stop_before_the_start_is_allowed(make_server: MakeServer) -> None:
    server = make_server()
    server.stop()
    with pytest.raises(Interrupted):
        server.start()


def test_a_child_that_outlives_its_server_is_killed_too(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server("stubborn=1")
    server.start()
    group = read_leases(tmp_path / "leases").leases[0].group
    assert len(group.members()) == 2
    server.stop()
    assert group.members() == ()


OWNER = """
import sys, time
from pathlib import Path
from runner.clock import Clock
from runner.engines.emulator.flags import emulated_environment
from runner.engines.sglang.jit_cache import hold_cache
from runner.engines.sglang.replica import ReplicaSpec, ServerProgram
from runner.engines.sglang.server import Server
folder = Path(sys.argv[1])
program = ServerProgram(tuple(sys.argv[2:]), {}, Clock(), emulated_environment())
spec = ReplicaSpec(0, 1, {}, (0,), "0", program, folder / "server.log", folder / "leases")
print(Server(spec).start().pid, flush=True)
time.sleep(600)
"""


def test_the_server_dies_with_its_owner(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path), *FAKE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        server = identify(int(owner.stdout.readline()))
        assert is_running(server)
        owner.kill()
        owner.wait()
    wait_until(lambda: not is_running(server))
    assert len(read_leases(tmp_path / "leases").leases) == 1
    assert end_orphans(tmp_path / "leases") == ()
    assert read_leases(tmp_path / "leases").leases == ()


def test_children_that_outlive_the_owner_are_found_by_the_lease(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path), *FAKE, "--fake", "stubborn=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        server = identify(int(owner.stdout.readline()))
        owner.kill()
        owner.wait()
    wait_until(lambda: not is_running(server))
    lease = read_leases(tmp_path / "leases").leases[0]
    assert len(lease.group.members()) == 1
    assert end_orphans(tmp_path / "leases") == (lease,)
    assert lease.group.members() == ()


def test_a_lease_that_cannot_be_written_lets_no_server_run(
    make_server: MakeServer, tmp_path: Path
) -> None:
    (tmp_path / "leases").write_text("in the way", encoding="utf-8")
    with pytest.raises(FileExistsError):
        make_server().start()
    assert log_text(tmp_path) == ""


def test_a_server_that_its_wrapper_started_again_is_another_one(make_server: MakeServer) -> None:
    server = make_server("keeper=1")
    started = server.start()
    server.check_alive()
    (first,) = psutil.Process(started.pid).children()
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(ServerFailed, match=rf"restarted .*: process {first.pid} .*, now none"):
        server.check_alive()
    wait_until(lambda: is_listening(started.port))
    with pytest.raises(ServerFailed, match=rf"restarted .*: process {first.pid} .*, now \d+"):
        server.check_alive()


def is_listening(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0
