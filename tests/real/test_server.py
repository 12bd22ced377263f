"""One real server with two stages: its slots, its death under load, and nothing left of it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from runner.cluster.executor import RunningLaunch
from runner.cluster.inline import InlineExecutor
from runner.config import parse_study
from runner.engines.lease import read_leases
from runner.engines.processes import ProcessId, is_running
from runner.errors import ServerFailed
from runner.launch import plan_launch
from runner.trial import LaunchSpec, Lengths, LoadPlan, LoadProtocol
from tests.emulated_server import generate_body
from tests.real.cpu_study import cpu_study, needs_sglang
from tests.slot_bursts import BURSTS, send_at_once, sequence

pytestmark = [pytest.mark.real, pytest.mark.timeout(900), needs_sglang]

SETTING = {"pp_size": 2, "pp_async_batch_depth": 2, "pp_max_micro_batch_size": 8}
LOAD = LoadPlan(
    phase="rung-0",
    protocol=LoadProtocol.CLOSED_LOOP,
    concurrency=4,
    prompt_tokens=Lengths.fixed(16),
    output_tokens=Lengths.fixed(48),
    seed=0,
    precision=1.0,
    min_window_s=1.0,
    max_window_s=60.0,
)
SLOTS = 4  # pp_size + pp_async_batch_depth
LATE_S = 0.3  # from the end of an answer to the line of its batch


@dataclass(frozen=True)
class Real:
    """A running launch and its folder."""

    servers: RunningLaunch
    folder: Path
    stack: ExitStack

    @property
    def log(self) -> str:
        return (self.folder / "launch" / "replica-0.log").read_text(encoding="utf-8")

    @property
    def port(self) -> int:
        (lease,) = read_leases(self.folder / "leases").leases
        return lease.port

    def processes(self) -> list[ProcessId]:
        (lease,) = read_leases(self.folder / "leases").leases
        return [stat.process for stat in lease.group.members()]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder = tmp_path_factory.mktemp("real")
    settings = parse_study(cpu_study(folder))
    plan = plan_launch(settings, SETTING)
    spec = LaunchSpec(1, plan.key, plan.server_args, plan.replicas, plan.gpus_per_replica)
    with (
        closing(InlineExecutor(settings, folder / "machine", folder / "leases")) as executor,
        ExitStack() as stack,
    ):
        launch = executor.launch(spec, folder / "launch", lambda _: None)
        yield Real(stack.enter_context(launch), folder, stack)


@pytest.mark.parametrize(("cap", "count", "expected"), BURSTS)
def test_a_burst_fills_the_slots(
    real: Real,
    cap: int,
    count: int,
    expected: str,
    record_property: Callable[[str, object], None],
) -> None:
    resolved = real.servers.set_live({"pp_max_micro_batch_size": cap})
    assert resolved["pp_max_micro_batch_size"] == cap
    time.sleep(LATE_S)
    before = len(real.log)
    send_at_once(real.port, json.dumps(generate_body(8, *range(3, 19))).encode(), count)
    time.sleep(LATE_S)
    words = sequence(real.log[before:])
    record_property("batches", f"{words[:120]}; recorded: {expected}")
    check_rules(words, cap, count)


def test_a_stage_killed_under_load_ends_the_server_and_is_named(real: Real) -> None:
    group = [psutil.Process(process.pid) for process in real.processes()]
    stages = [process for process in group if "scheduler" in " ".join(process.cmdline())]
    assert len(stages) == 2
    identities = real.processes()

    def kill() -> None:
        seen = real.log.count("Decode batch")
        while real.log.count("Decode batch") < seen + 20:
            time.sleep(0.1)
        stages[1].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(ServerFailed) as caught:
        real.servers.run_load(replace(LOAD, min_window_s=1e6, max_window_s=1e6))
    killer.join()
    assert "a process of the server was killed" in str(caught.value)
    real.stack.close()
    assert [process for process in identities if is_running(process)] == []
    assert read_leases(real.folder / "leases").leases == ()


def check_rules(words: str, cap: int, count: int) -> None:
    """Whenever the requests arrive: no slot is above the cap, none waits while one has room.

    A visit to a slot without requests opens it; after it the slots are decoded in turn.
    """
    visits = [tuple(map(int, v)) for v in re.findall(r"P(\d+)/(\d+)/\d+", words)]
    assert sum(new for new, _ in visits) == count, words
    assert all(new + running <= cap for new, running in visits), words
    opened = len(re.findall(r"P\d+/0/", words.partition("D")[0]))
    assert opened <= SLOTS, words
    found = re.search(rf"(?:D\d+/\d+ ){{{opened}}}", words + " ")
    assert found is not None, words
    first_round = [tuple(map(int, d)) for d in re.findall(r"D(\d+)/(\d+)", found.group())]
    sizes, waiting = [size for size, _ in first_round], first_round[-1][1]
    assert max(sizes) <= cap, words
    assert sum(sizes) == (SLOTS * cap if waiting else count), words
