"""Ports: free, distinct, and never given to two holders at once."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from runner.engines.ports import PORTS, hold_ports, is_free
from runner.errors import ClusterLost

HOLDER = """
import sys, time
from pathlib import Path
from runner.engines.ports import hold_ports
held = hold_ports(1, Path(sys.argv[1]), range(int(sys.argv[2]), int(sys.argv[2]) + 1))
print(held.numbers[0], flush=True)
time.sleep(60)
"""


def free_port(folder: Path) -> int:
    held = hold_ports(1, folder)
    held.release()
    return held.numbers[0]


def test_ports_are_distinct_and_below_the_ephemeral_range(tmp_path: Path) -> None:
    held = hold_ports(20, tmp_path)
    assert len(set(held.numbers)) == 20
    assert all(port in PORTS and is_free(port) for port in held.numbers)
    held.release()


def test_a_held_port_is_given_to_nobody_else_until_it_is_released(tmp_path: Path) -> None:
    port = free_port(tmp_path)
    only = range(port, port + 1)
    first = hold_ports(1, tmp_path, only)
    with pytest.raises(ClusterLost, match="1 free ports needed, 0 found"):
        hold_ports(1, tmp_path, only)
    first.release()
    first.release()
    again = hold_ports(1, tmp_path, only)
    assert again.numbers == (port,)
    again.release()


def test_a_port_in_use_is_passed_over(tmp_path: Path) -> None:
    port = free_port(tmp_path)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        assert not is_free(port)
        with pytest.raises(ClusterLost):
            hold_ports(1, tmp_path, range(port, port + 1))


def test_too_few_ports_holds_none(tmp_path: Path) -> None:
    port = free_port(tmp_path)
    only = range(port, port + 1)
    with pytest.raises(ClusterLost):
        hold_ports(2, tmp_path, only)
    held = hold_ports(1, tmp_path, only)
    held.release()


def test_the_kernel_gives_back_the_ports_of_a_killed_runner(tmp_path: Path) -> None:
    port = free_port(tmp_path)
    command = [sys.executable, "-c", HOLDER, str(tmp_path), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == str(port)
        with pytest.raises(ClusterLost):
            hold_ports(1, tmp_path, range(port, port + 1))
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
    held = hold_ports(1, tmp_path, range(port, port + 1))
    assert held.numbers == (port,)
    held.release()
