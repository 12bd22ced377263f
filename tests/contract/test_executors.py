"""What every executor owes: servers on their GPUs, load, power, and nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from runner.cluster.executor import Executor, RunningLaunch
from runner.cluster.inline import InlineExecutor
from runner.engines.emulator.flags import emulated_environment
from runner.engines.emulator.gpu import GpuWriter, plant_power_offset
from runner.engines.lease import read_leases
from runner.errors import ClusterLost, Infeasible, Interrupted, ServerFailed, StudyError
from runner.launch import plan_launch
from runner.measure.energy import energy_over
from runner.measure.evidence import evidence_of
from runner.plans import rung_plans, warmup_plan
from runner.trial import LaunchSpec, Params, RequestStatus
from tests.studies import CPU, study

SETTINGS = study(CPU)
IDLE_S = 80.0  # by the launch's clock, 50 times faster than the wall's
TWO_SERVERS: Params = {"pp_size": 1, "max_running_requests": 16}
ONE_SERVER: Params = {"pp_size": 2, "pp_max_micro_batch_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("executor")


@pytest.fixture(scope="module")
def no_real_gpus() -> Iterator[None]:
    """Emulated GPUs have nothing to do with what the environment says of real ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="module", params=["inline", pytest.param("ray", marks=pytest.mark.ray)])
def executor(
    request: pytest.FixtureRequest, folder: Path, no_real_gpus: None
) -> Iterator[Executor]:
    assert no_real_gpus is None
    home = folder / request.param
    made: Executor
    if request.param == "inline":
        made = InlineExecutor(SETTINGS, home / "machine", home / "leases")
    else:
        from runner.cluster.ray_executor import RayExecutor

        made = RayExecutor(SETTINGS, home / "machine", home / "leases")
    yield made
    made.close()


@pytest.fixture
def home(request: pytest.FixtureRequest, folder: Path) -> Path:
    return folder / str(request.node.callspec.params["executor"])


def spec_of(params: Params, number: int) -> LaunchSpec:
    plan = plan_launch(SETTINGS, params)
    return LaunchSpec(number, plan.key, plan.server_args, plan.replicas, plan.gpus_per_replica)


def ignore(_: object) -> None:
    """Nobody looks."""


def test_two_servers_share_the_load_on_a_gpu_each(
    executor: Executor, home: Path, tmp_path: Path
) -> None:
    with executor.launch(spec_of(TWO_SERVERS, 0), tmp_path, ignore) as servers:
        leases = read_leases(home / "leases").leases
        run = servers.run_load(rung_plans(SETTINGS, 0)[0])
        power = servers.read_power(run.window_start_s, run.window_end_s)
        batches = servers.read_batches(*run.window)
        servers.check_alive()
        report = servers.report

    visible = sorted(command.split("CUDA_VISIBLE_DEVICES=")[1][0] for command in report.commands)
    assert visible == ["0", "1"]
    assert sorted(lease.gpus for lease in leases) == [(0,), (1,)]
    assert {record.replica for record in run.records} == {0, 1}
    assert {record.status for record in run.records} <= {RequestStatus.OK, RequestStatus.CUT}
    assert all(each.energy_j for each in energy_over(power, run.window_start_s, run.window_end_s))
    assert {sample.gpu_uuid for sample in power} == set(report.gpu_uuids)
    assert len(report.gpu_uuids) == 2
    assert report.phase_s["total"] > 0
    told = evidence_of(batches, [run.window])
    assert (told.schedulers, told.graph_share, told.retractions) == (2, 0.0, 0)
    assert told.batch_max is not None
    assert 1 <= told.batch_max <= 4
    assert "--enable-metrics --decode-log-interval 17" in report.commands[0]


def test_it_knows_the_flags_of_its_servers(executor: Executor) -> None:
    assert executor.server_environment() == emulated_environment()


def test_it_reads_the_gpus_that_it_is_asked_for(executor: Executor) -> None:
    gpus = executor.gpus()
    assert [gpu.index for gpu in gpus] == [0, 1]
    (idle,) = executor.idle_gpus(gpus[1:])
    assert (idle.index, idle.uuid, idle.name) == (1, gpus[1].uuid, gpus[1].name)
    assert idle.power_w is not None
    assert idle.memory_bytes == gpus[1].memory_total_bytes


def test_its_load_generator_can_be_tried(executor: Executor) -> None:
    (check,) = executor.check_load(4)
    assert check.streams == 4
    assert check.cpu_us > 0


def test_nothing_is_left_when_a_launch_is_over(
    executor: Executor, home: Path, tmp_path: Path
) -> None:
    with executor.launch(spec_of(TWO_SERVERS, 1), tmp_path, ignore):
        pids = [lease.pid for lease in read_leases(home / "leases").leases]
        assert all(psutil.pid_exists(pid) for pid in pids)

    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert read_leases(home / "leases").leases == ()


def test_trials_of_one_launch_set_their_caps_live(executor: Executor, tmp_path: Path) -> None:
    with executor.launch(spec_of(ONE_SERVER, 2), tmp_path, ignore) as servers:
        first = servers.set_live({"pp_max_micro_batch_size": 2})
        second = servers.set_live({"pp_max_micro_batch_size": 3})
        plan = warmup_plan(SETTINGS, 0)
        assert len(servers.run_load(plan).records) >= plan.concurrency

    assert first["pp_max_micro_batch_size"] == 2
    assert second["pp_max_micro_batch_size"] == 3
    assert first["max_running_requests"] == second["max_running_requests"] == 16


def test_a_cap_out_of_range_is_infeasible(executor: Executor, tmp_path: Path) -> None:
    with (
        pytest.raises(Infeasible, match=r"outside 1\.\.8"),
        executor.launch(spec_of(ONE_SERVER, 3), tmp_path, ignore) as servers,
    ):
        servers.set_live({"pp_max_micro_batch_size": 9})


def test_a_server_that_dies_while_starting_names_its_log(
    executor: Executor, tmp_path: Path
) -> None:
    dying = {**TWO_SERVERS, "fault": "die-at-start"}

    with (
        pytest.raises(ServerFailed) as caught,
        executor.launch(spec_of(dying, 4), tmp_path, ignore),
    ):
        pytest.fail("the launch came up")

    assert caught.value.log_path is not None
    assert Path(caught.value.log_path).parent == tmp_path


def test_watts_planted_on_one_gpu_are_seen_on_that_gpu_alone(
    executor: Executor, home: Path, tmp_path: Path
) -> None:
    with executor.launch(spec_of(TWO_SERVERS, 5), tmp_path, ignore) as servers:
        before = idle_watts(servers)
        plant_power_offset(home / "machine", 1, 50.0)
        after = idle_watts(servers)
        plant_power_offset(home / "machine", 1, 0.0)
        planted = read_leases(home / "leases").leases

    grown = {uuid: after[uuid] - before[uuid] for uuid in before}
    assert len(planted) == 2
    assert sorted(grown.values()) == pytest.approx([0.0, 50.0], abs=1.0)


def idle_watts(servers: RunningLaunch) -> dict[str, float]:
    """Mean watts of each GPU over a span in which nothing is asked of the servers."""
    start_s = servers.now_s()
    end_s = start_s + IDLE_S
    while servers.now_s() < end_s + 20.0:
        threading.Event().wait(0.05)
    energy = energy_over(servers.read_power(start_s, end_s), start_s, end_s)
    return {each.gpu_uuid: each.energy_j / IDLE_S for each in energy if each.energy_j is not None}


def keep_checking(servers: RunningLaunch) -> None:
    """Until it raises."""
    while True:
        servers.check_alive()


def test_a_dead_server_is_noticed(executor: Executor, home: Path, tmp_path: Path) -> None:
    with executor.launch(spec_of(ONE_SERVER, 6), tmp_path, ignore) as servers:
        psutil.Process(read_leases(home / "leases").leases[0].pid).kill()
        with pytest.raises(ServerFailed):
            keep_checking(servers)


def test_gpus_that_others_use_are_refused(executor: Executor, home: Path, tmp_path: Path) -> None:
    other = GpuWriter(home / "machine", 1)
    other.hold(4 << 30)
    try:
        with pytest.raises(StudyError, match=r"GPU 1 .*: 4\.0 GiB in use, by process \d+ \("):
            executor.check_gpus()
        with (
            pytest.raises(StudyError, match="run the same command again"),
            executor.launch(spec_of(ONE_SERVER, 11), tmp_path, ignore),
        ):
            pytest.fail("it was launched beside a stranger")
    finally:
        other.leave()
    executor.check_gpus()
    assert read_leases(home / "leases").leases == ()


@pytest.mark.ray
@pytest.mark.parametrize("executor", ["ray"], indirect=True)
def test_a_killed_actor_is_a_loss_and_takes_its_server_along(
    executor: Executor, home: Path, tmp_path: Path
) -> None:
    def lose_the_actor() -> None:
        with executor.launch(spec_of(ONE_SERVER, 9), tmp_path, ignore) as servers:
            server = psutil.Process(read_leases(home / "leases").leases[0].pid)
            actor = server.parent()
            assert actor is not None
            actor.kill()
            psutil.wait_procs([server], timeout=20)
            assert not server.is_running()
            servers.check_alive()

    with pytest.raises(ClusterLost):
        lose_the_actor()

    with executor.launch(spec_of(ONE_SERVER, 10), tmp_path, ignore) as servers:
        servers.check_alive()


def test_an_interruption_ends_the_load(executor: Executor, home: Path, tmp_path: Path) -> None:
    """Last: an executor that was interrupted launches nothing more."""
    endless = replace(rung_plans(SETTINGS, 0)[0], min_window_s=1e6, max_window_s=1e6)

    with (
        pytest.raises(Interrupted),
        executor.launch(spec_of(ONE_SERVER, 7), tmp_path, lambda _: executor.interrupt()) as up,
    ):
        up.run_load(endless)

    assert read_leases(home / "leases").leases == ()
    with pytest.raises(Interrupted), executor.launch(spec_of(ONE_SERVER, 8), tmp_path, ignore):
        pytest.fail("it launched")
