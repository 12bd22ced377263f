"""The same server code on the emulated server, as a study of the emulated engine starts it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from runner.engines.emulator.flags import emulated_environment
from runner.engines.lease import read_leases
from runner.engines.program import program_for, sensor_for
from runner.engines.sglang.replica import ReplicaSpec
from runner.engines.sglang.server import Server
from runner.errors import Infeasible, ServerFailed
from runner.settings import EngineSettings, StudySettings
from runner.trial import EngineKind, Params
from tests.samples import make_settings

SCALES = {"cpu-blocking-pp2": 20.0, "rtx-pro-6000-x8-kimi-k2.6": 1000.0}
PP2: Params = {"pp_size": 2, "max_running_requests": 16}


class MakeServer(Protocol):
    def __call__(
        self, args: Params, *flags: str, devices: str = ..., profile: str = ...
    ) -> Server: ...


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    with ExitStack() as ends:

        def make(
            args: Params, *flags: str, devices: str = "0,1", profile: str = "cpu-blocking-pp2"
        ) -> Server:
            settings = settings_for(profile)
            program = program_for(settings, tmp_path / "machine", emulated_environment())
            spec = ReplicaSpec(
                index=0,
                launch_number=1,
                server_args=args,
                gpu_indices=tuple(int(device) for device in devices.split(",")),
                visible_devices=devices,
                program=replace(program, argv=(*program.argv, *flags)),
                log_path=tmp_path / "replica-0.log",
                lease_folder=tmp_path / "leases",
            )
            server = Server(spec)
            ends.callback(server.stop)
            return server

        yield make


def settings_for(profile: str) -> StudySettings:
    engine = EngineSettings(EngineKind.EMULATED, profile, SCALES[profile], None, None, {}, {})
    return make_settings(engine=engine)


def test_start_change_and_stop(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(PP2)
    started = server.start()
    assert set(started.phase_s) == {
        *("import", "init", "load_weights", "kv_cache", "cuda_graph", "warmup", "total")
    }
    resolved = server.set_live({"pp_max_micro_batch_size": 3})
    assert resolved["pp_max_micro_batch_size"] == 3
    assert resolved["max_running_requests"] == 16
    assert resolved["attention_backend"] == "torch_native"
    assert resolved["cuda_graph"] is False
    assert server.set_live({})["pp_max_micro_batch_size"] == 8
    with pytest.raises(Infeasible, match=r"kept pp_max_micro_batch_size 8; 9 is outside 1\.\.8"):
        server.set_live({"pp_max_micro_batch_size": 9})
    server.check_alive()
    settings = settings_for("cpu-blocking-pp2")
    sensor = sensor_for(settings, tmp_path / "machine")
    owners = [sensor.processes(gpu.uuid) for gpu in sensor.gpus()]
    assert [[process.pid for process in each] for each in owners] == [[started.pid]] * 2
    server.stop()
    assert [sensor.processes(gpu.uuid) for gpu in sensor.gpus()] == [(), ()]
    sensor.close()
    assert read_leases(tmp_path / "leases").leases == ()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"attention_backend": "fa3"}, "not supported here: .*fa3"),
        ({"attention_backend": "bogus"}, "attention_backend: found the text 'bogus', expected one"),
        ({"tensor_size": 2}, "tensor_size: the emulated server has no flag --tensor-size"),
        ({"tp_size": 3}, "the server wants GPUs it was not given"),
        ({"chunked_prefill_size": 100, "page_size": 64}, "do not fit the model: ValueError: chunk"),
    ],
)
def test_a_setting_that_cannot_run_is_infeasible(
    make_server: MakeServer, args: Params, message: str
) -> None:
    with pytest.raises(Infeasible, match=message):
        make_server(args).start()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--attention-backend", "bogus"), "refused a flag: argument --attention-backend: invalid"),
        (("--tensor-size", "2"), "does not know the flag: --tensor-size 2"),
    ],
)
def test_a_flag_that_the_server_refuses_is_infeasible(
    make_server: MakeServer, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(Infeasible, match=message):
        make_server({}, *flags).start()


def test_a_model_that_does_not_fit_is_infeasible(make_server: MakeServer) -> None:
    server = make_server({"tp_size": 1}, devices="0", profile="rtx-pro-6000-x8-kimi-k2.6")
    with pytest.raises(Infeasible, match="out of GPU memory"):
        server.start()


def test_a_crash_at_the_start_is_a_failure_with_its_reason(make_server: MakeServer) -> None:
    with pytest.raises(ServerFailed, match="died while starting: "):
        make_server(PP2, "--fault", "die-at-start").start()


def test_a_refused_flag_is_infeasible(make_server: MakeServer) -> None:
    with pytest.raises(Infeasible, match="does not know the flag: --pp-size"):
        make_server(PP2, "--fault", "refuse-flag:--pp-size").start()
