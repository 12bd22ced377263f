"""Leases on disk, and whom `end_orphans` may touch: real processes, started and ended here."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from runner.engines.lease import (
    Driver,
    Lease,
    boot_id,
    end_orphans,
    end_own,
    read_leases,
    remove_lease,
    write_lease,
)
from runner.engines.processes import LEASE_VARIABLE, ProcessId, identify, is_running
from tests.driving import wait_for

Start = Callable[..., subprocess.Popen[bytes]]
TOKEN = "0123456789abcdef"


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as ends:

        def start_group(*argv: str, token: str = TOKEN) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                argv,
                start_new_session=True,
                env={"PATH": os.environ["PATH"], LEASE_VARIABLE: token},
                stdout=subprocess.PIPE,
            )
            ends.enter_context(process)
            ends.callback(end_group, process.pid)
            return process

        yield start_group


def end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.fixture
def dead_driver(start: Start) -> Driver:
    process = start("sleep", "600")
    driver = Driver(identify(process.pid), Driver.here().host)
    process.kill()
    process.wait()
    return driver


def lease_of(process: ProcessId, driver: Driver, replica: int = 0) -> Lease:
    return Lease(
        pid=process.pid,
        start_time=process.start_time,
        pgid=process.pid,
        gpus=(4, 5),
        port=22001,
        launch=3,
        replica=replica,
        driver_pid=driver.process.pid,
        driver_start_time=driver.process.start_time,
        driver_host=driver.host,
        host=Driver.here().host,
        boot_id=boot_id(),
        token=TOKEN,
    )


def test_a_lease_is_read_as_it_was_written(tmp_path: Path) -> None:
    leases = [lease_of(ProcessId(10 + n, 99), Driver.here(), replica=n) for n in range(3)]
    for lease in leases:
        write_lease(tmp_path / "leases", lease)
    assert read_leases(tmp_path / "leases").leases == tuple(leases)
    remove_lease(tmp_path / "leases", leases[1])
    remove_lease(tmp_path / "leases", leases[1])
    assert read_leases(tmp_path / "leases").leases == (leases[0], leases[2])


def test_a_folder_that_is_not_there_holds_no_lease(tmp_path: Path) -> None:
    assert read_leases(tmp_path / "none").leases == ()
    assert end_orphans(tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "Expecting value"),
        ("[]", "not a JSON object"),
        ("{}", "pid must be a whole number, found None"),
        ('{"pid": "12"}', "pid must be a whole number, found '12'"),
        ("\udcff", "codec can't decode"),
    ],
)
def test_an_unreadable_lease_is_reported(tmp_path: Path, text: str, complaint: str) -> None:
    good = lease_of(ProcessId(10, 99), Driver.here())
    write_lease(tmp_path, good)
    (tmp_path / "bad.json").write_bytes(text.encode("utf-8", errors="surrogateescape"))
    folder = read_leases(tmp_path)
    assert folder.leases == (good,)
    assert len(folder.unreadable) == 1
    assert str(tmp_path / "bad.json") in folder.unreadable[0]
    assert complaint in folder.unreadable[0]


def test_the_server_of_a_dead_driver_is_ended(
    tmp_path: Path, start: Start, dead_driver: Driver
) -> None:
    server = start("sh", "-c", "sleep 600 & sleep 600")
    lease = lease_of(identify(server.pid), dead_driver)
    write_lease(tmp_path, lease)
    assert end_orphans(tmp_path) == (lease,)
    assert server.wait(5) == -signal.SIGKILL
    assert lease.group.members() == ()
    assert read_leases(tmp_path).leases == ()
    assert end_orphans(tmp_path) == ()


def test_the_server_of_a_living_driver_is_left_alone(tmp_path: Path, start: Start) -> None:
    server = start("sleep", "600")
    write_lease(tmp_path, lease_of(identify(server.pid), Driver.here()))
    assert end_orphans(tmp_path) == ()
    assert is_running(identify(server.pid))
    assert len(read_leases(tmp_path).leases) == 1


def test_a_process_with_another_start_time_is_left_alone(
    tmp_path: Path, start: Start, dead_driver: Driver
) -> None:
    server = start("sleep", "600")
    process = identify(server.pid)
    heir = replace(process, start_time=process.start_time - 1)
    write_lease(tmp_path, lease_of(heir, dead_driver))
    assert end_orphans(tmp_path) == ()
    assert is_running(process)
    assert read_leases(tmp_path).leases == (), "the lease's own server is gone"


def test_a_driver_whose_pid_was_given_to_another_process_is_dead(
    tmp_path: Path, start: Start
) -> None:
    server = start("sleep", "600")
    here = Driver.here()
    reused = replace(here, process=replace(here.process, start_time=here.process.start_time - 1))
    lease = lease_of(identify(server.pid), reused)
    write_lease(tmp_path, lease)
    assert end_orphans(tmp_path) == (lease,)
    assert server.wait(5) == -signal.SIGKILL


def test_members_whose_leader_is_gone_are_ended(
    tmp_path: Path, start: Start, dead_driver: Driver
) -> None:
    leader, child = start_and_leave(start, TOKEN)
    lease = lease_of(leader, dead_driver)
    assert [stat.process for stat in lease.group.members()] == [child]
    write_lease(tmp_path, lease)
    assert end_orphans(tmp_path) == (lease,)
    assert not is_running(child)


def test_members_that_carry_another_token_are_not_ours(
    tmp_path: Path, start: Start, dead_driver: Driver
) -> None:
    leader, child = start_and_leave(start, "another")
    write_lease(tmp_path, lease_of(leader, dead_driver))
    assert end_orphans(tmp_path) == ()
    assert is_running(child)


def start_and_leave(start: Start, token: str) -> tuple[ProcessId, ProcessId]:
    """A group whose leader has ended and was reaped, and its one member."""
    process = start("sh", "-c", "sleep 600 >/dev/null & echo $!; read _ </dev/null", token=token)
    leader = identify(process.pid)
    assert process.stdout is not None
    child = identify(int(process.stdout.readline()))
    process.wait(5)
    # While it becomes `sleep` it shows no environment, and would be taken for one of ours.
    environ = Path("/proc", str(child.pid), "environ")
    name = Path("/proc", str(child.pid), "comm")
    wait_for(lambda: name.read_text() == "sleep\n" and environ.read_bytes() != b"", "sleep")
    return leader, child


def test_leases_of_another_machine_or_driver_host_are_left_alone(
    tmp_path: Path, start: Start, dead_driver: Driver
) -> None:
    server = start("sleep", "600")
    lease = lease_of(identify(server.pid), dead_driver)
    write_lease(tmp_path, replace(lease, host="another"))
    write_lease(tmp_path, replace(lease, driver_host="another", replica=1))
    assert end_orphans(tmp_path) == ()
    assert is_running(identify(server.pid))
    assert len(read_leases(tmp_path).leases) == 2


def test_a_lease_from_before_a_reboot_names_no_process(
    tmp_path: Path, start: Start, dead_driver: Driver
) -> None:
    server = start("sleep", "600")
    lease = lease_of(identify(server.pid), dead_driver)
    write_lease(tmp_path, replace(lease, boot_id="another"))
    assert end_orphans(tmp_path) == ()
    assert is_running(identify(server.pid))
    assert read_leases(tmp_path).leases == ()


def test_end_own_kills_the_servers_of_this_process_only(
    tmp_path: Path, start: Start, dead_driver: Driver
) -> None:
    mine, other = start("sleep", "600"), start("sleep", "600")
    write_lease(tmp_path, lease_of(identify(mine.pid), Driver.here(), replica=0))
    write_lease(tmp_path, lease_of(identify(other.pid), dead_driver, replica=1))
    end_own(tmp_path)
    assert mine.wait(5) == -signal.SIGKILL
    assert is_running(identify(other.pid))
    assert [lease.replica for lease in read_leases(tmp_path).leases] == [1]
