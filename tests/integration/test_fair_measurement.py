"""What must not be believed, must not be mixed up and must not go unseen while we measure."""

from __future__ import annotations

import statistics
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import requests

from runner.clock import Clock
from runner.cluster.executor import RunningLaunch
from runner.cluster.inline import InlineExecutor
from runner.engines.emulator.gpu import EmulatedGpus, GpuWriter
from runner.engines.lease import read_leases
from runner.engines.processes import identify
from runner.launch import plan_launch
from runner.measure.metrics import judge_rung
from runner.trial import (
    LaunchSpec,
    Lengths,
    LoadPlan,
    LoadProtocol,
    LoadStart,
    Params,
    RungRecord,
)
from tests.studies import CPU, study

PLAN = LoadPlan(
    phase="rung-0",
    protocol=LoadProtocol.CLOSED_LOOP,
    concurrency=4,
    prompt_tokens=Lengths.fixed(16),
    output_tokens=Lengths.fixed(64),
    seed=0,
    precision=1.0,
    min_window_s=40.0,
    max_window_s=80.0,
)


@contextmanager
def launch(folder: Path, params: Params, fault: str | None = None) -> Iterator[RunningLaunch]:
    """One emulated server on two GPUs, through the inline executor."""
    engine = dict(CPU["engine"], args={} if fault is None else {"fault": fault})
    settings = study(CPU, engine=engine, baselines=[])
    plan = plan_launch(settings, params)
    spec = LaunchSpec(1, plan.key, plan.server_args, plan.replicas, plan.gpus_per_replica)
    with (
        closing(InlineExecutor(settings, folder / "machine", folder / "leases")) as executor,
        executor.launch(spec, folder / "launch", lambda _: None) as servers,
    ):
        yield servers


def measure(plan: LoadPlan, servers: RunningLaunch) -> RungRecord:
    load = servers.run_load(plan)
    return RungRecord(0, plan.concurrency, (load,), servers.read_power(*load.window))


def ask(folder: Path, path: str) -> requests.Response:
    (lease,) = read_leases(folder / "leases").leases
    method = "POST" if path == "/flush_cache" else "GET"
    return requests.request(method, f"http://127.0.0.1:{lease.port}{path}", timeout=60)


def test_the_servers_running_count_is_not_the_concurrency(tmp_path: Path) -> None:
    # Four slots of 8 requests: SGLang reports what runs in one of them.
    four_slots: Params = {
        "pp_size": 2,
        "pp_async_batch_depth": 2,
        "pp_max_micro_batch_size": 8,
        "max_running_requests": 32,
    }
    told: list[int] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            (load,) = ask(tmp_path, "/v1/loads").json()["loads"]
            told.append(load["num_running_reqs"])

    with launch(tmp_path, four_slots) as servers:
        watcher = threading.Thread(target=watch)
        watcher.start()
        rung = measure(replace(PLAN, concurrency=32, start=LoadStart.TOGETHER), servers)
        is_over.set()
        watcher.join()
    assert statistics.median(count for count in told if count) <= 16  # 8 a slot, or two of them
    assert max(told) < 32
    result = judge_rung(rung, (), PLAN)
    assert 28.0 <= result.achieved_concurrency <= 32.0
    assert not any("in flight" in reason for reason in result.reasons)


def test_a_hopeless_load_ends_early_and_leaves_the_servers_drained(tmp_path: Path) -> None:
    with launch(tmp_path, {"pp_size": 2, "max_running_requests": 16}) as servers:
        rung = measure(replace(PLAN, worth=1e6), servers)
        assert ask(tmp_path, "/v1/loads").json()["loads"][0]["num_running_reqs"] == 0
    result = judge_rung(rung, (), PLAN)
    assert (result.valid, result.cut_below) == (False, 1e6)
    assert result.output_throughput > 0.0
    assert result.reasons[0].startswith("cut short: at ")


def test_no_phase_starts_while_ghosts_of_the_last_one_run(tmp_path: Path) -> None:
    with launch(tmp_path, {"pp_size": 2, "max_running_requests": 16}, "ghost-requests") as servers:
        # Ends by cutting its streams: each leaves a ghost, with far more to do than we need to ask.
        servers.run_load(replace(PLAN, output_tokens=Lengths.fixed(1024), max_ramp_s=40.0))
        assert ask(tmp_path, "/v1/loads").json()["loads"][0]["num_running_reqs"] == 0
        assert ask(tmp_path, "/flush_cache").status_code == 200
        log = (tmp_path / "launch" / "replica-0.log").read_text(encoding="utf-8")
        _, _, after = log.partition("POST /generate")
        assert '"POST /flush_cache HTTP/1.1" 400' in after  # it was not idle, and was waited for
        servers.run_load(replace(PLAN, phase="rung-1"))


def test_a_foreign_process_on_our_gpu_is_a_reason(tmp_path: Path) -> None:
    params: Params = {"pp_size": 2, "max_running_requests": 16}
    with launch(tmp_path, params) as servers:
        alone = measure(PLAN, servers)
        with subprocess.Popen(["sleep", "600"], start_new_session=True) as stranger:
            seat = GpuWriter(tmp_path / "machine", 1, identify(stranger.pid))
            seat.hold(1 << 20)
            shared = measure(replace(PLAN, phase="rung-1"), servers)
            seat.leave()
            stranger.kill()
        uuids = [gpu.uuid for gpu in EmulatedGpus(tmp_path / "machine", Clock()).gpus()]
    assert strangers(alone) == []
    said = f"process {stranger.pid}, none of ours, used GPU {uuids[1]} during the measurement"
    assert strangers(shared) == [said]


def strangers(rung: RungRecord) -> list[str]:
    return [reason for reason in judge_rung(rung, (), PLAN).reasons if "none of ours" in reason]
