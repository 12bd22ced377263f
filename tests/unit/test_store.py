"""The files of a study: whole or absent, read back exactly, one driver at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.clock import ClockAnchor
from runner.cluster.executor import LaunchReport
from runner.errors import ConfigError, StudyError
from runner.record.store import StoredSpec, StudyState, StudyStore
from runner.trial import (
    BatchSample,
    ClientHealth,
    Distribution,
    GpuEnergy,
    LaunchSpec,
    Lengths,
    LoadPlan,
    LoadProtocol,
    LoadRun,
    LoadStart,
    Outcome,
    PowerSample,
    RequestRecord,
    RequestStatus,
    RungRecord,
    RungResult,
    Stage,
    TrialResult,
    TrialSpec,
)

GPUS = ("GPU-a", "GPU-b")
PLAN = LoadPlan(
    phase="rung-0",
    protocol=LoadProtocol.CLOSED_LOOP,
    concurrency=32,
    prompt_tokens=Lengths("uniform", 100, 300),
    output_tokens=Lengths("recorded", values=(3, 5, 8)),
    seed=2**32 - 1,
    shared_prefix=0.25,
)
SPEC = TrialSpec(
    number=7,
    params={"pp_size": 8, "cuda_graph": True, "attention_backend": "triton", "mem": 0.9},
    live={"pp_max_micro_batch_size": 4},
    rungs=(PLAN, replace(PLAN, phase="rung-1", concurrency=1)),
    warmup=replace(PLAN, phase="warmup", is_warmup=True),
    spec_hash="0123456789abcdef",
    name="pp8-auto",
    retry_of=3,
)
LAUNCH = LaunchSpec(2, "fedcba9876543210", {"pp_size": 8, "cuda_graph": True}, 1, 8)


@pytest.fixture
def store(tmp_path: Path) -> StudyStore:
    return StudyStore(tmp_path, "demo")


def power_samples(start_s: float, count: int = 3) -> tuple[PowerSample, ...]:
    return tuple(
        PowerSample(start_s + 0.1 * n + 0.01 * gpu, uuid, 200.0 + n, None, 0.5, 10**10, None, False)
        for n in range(count)
        for gpu, uuid in enumerate(GPUS)
    )


def make_rung(position: int = 0, concurrency: int = 64, start_s: float = 10.0) -> RungRecord:
    token_s = (start_s + 0.5, start_s + 0.6, start_s + 0.6)
    good = RequestRecord(
        "r-1", 0, start_s, token_s[0], token_s[-1], token_s, 256, 3, 3, 0, RequestStatus.OK
    )
    bad = RequestRecord(
        "r-2", 1, start_s, None, start_s + 1, (), 256, 0, 3, 0, RequestStatus.FAILED, "reset ä"
    )
    load = LoadRun((good, bad), start_s, start_s, start_s + 1, True, ClientHealth(0.25, 0.003))
    probe = replace(load, records=(good,), is_steady=False, start=LoadStart.TOGETHER)
    batches = (
        BatchSample(start_s + 0.5, 0, 1, 8, 12, in_graph=True, kv_usage=1 / 3),
        BatchSample(start_s + 0.2, 1, graph_passes=2**40, eager_passes=0),
        BatchSample(start_s + 0.6, 0, retracted=3),
    )
    return RungRecord(position, concurrency, (load, probe), power_samples(start_s), batches)


def make_result(number: int = 7, **changes: object) -> TrialResult:
    latency = Distribution(0.1, 0.1, 0.2, 1 / 3)
    rung = RungResult(
        position=0,
        concurrency=64,
        valid=True,
        reasons=(),
        window_start_s=10.0,
        window_s=1.0,
        output_throughput=1234.5678901234567,
        output_throughput_halfwidth=None,
        total_throughput=2000.0,
        request_throughput=3.5,
        goodput=None,
        achieved_concurrency=63.9,
        requests=100,
        errors=1,
        ttft_s=latency,
        tpot_s=latency,
        itl_s=None,
        e2e_s=latency,
        power_w=1600.0,
        energy_j=None,
        tokens_per_joule=None,
        joules_per_request=None,
        gpus=(GpuEnergy("GPU-a", None, 200.0, 0.5, 2**40, False),),
    )
    result = TrialResult(
        number=number,
        name=None,
        params={"pp_size": 8, "cuda_graph": False, "attention_backend": "triton"},
        resolved={"pp_size": 8, "pp_max_micro_batch_size": 16},
        outcome=Outcome.COMPLETE,
        reason=None,
        retry_of=None,
        repeat_of=None,
        spec_hash="0123456789abcdef",
        launch=2,
        stage=None,
        values=(1234.5678901234567,),
        constraints=(-0.5,),
        rungs=(rung,),
        timing_s={"measured": 1.0},
    )
    return replace(result, **changes)  # type: ignore[arg-type]  # any field of TrialResult


# --- the study ------------------------------------------------------------------------------


def test_a_study_reads_back_as_written(store: StudyStore) -> None:
    assert not store.exists()
    store.create({"name": "demo", "search": {"seed": 0}}, {"python": "3.11.2"})
    study = store.read_study()
    assert study["settings"] == {"name": "demo", "search": {"seed": 0}}
    assert study["environment"] == {"python": "3.11.2"}
    assert store.exists()


def test_an_unknown_study_names_near_ones(tmp_path: Path, store: StudyStore) -> None:
    store.create({}, {})
    StudyStore(tmp_path, "other").create({}, {})
    with pytest.raises(ConfigError, match=r"no study dmeo in .*did you mean demo\?"):
        StudyStore(tmp_path, "dmeo").read_study()
    with pytest.raises(ConfigError, match="there are: demo, other"):
        StudyStore(tmp_path, "zzzzzzz").read_study()


def test_a_home_without_studies_says_so(store: StudyStore) -> None:
    with pytest.raises(ConfigError, match=r"holds none\. Start one with runner tune"):
        store.read_study()


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"", b'{"settings": 3}'])
def test_a_damaged_study_is_the_users_to_repair(store: StudyStore, content: bytes) -> None:
    store.create({}, {})
    store.study_path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"study\.json is damaged"):
        store.read_study()


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "../x", "Demo", "a b", "mlflow.db", "mlflow.db-wal", "mlartifacts"],
)
def test_names_that_would_leave_or_hide_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a study"):
        StudyStore(tmp_path, name)


def test_paths_are_those_of_the_contract(tmp_path: Path, store: StudyStore) -> None:
    studies = tmp_path.resolve() / "studies"
    assert store.optuna_url == f"sqlite:///{studies}/demo/optuna.db"
    assert store.mlflow_uri == f"sqlite:///{studies}/mlflow.db"
    assert store.artifacts_folder == studies / "mlartifacts"
    assert store.leases_folder == studies / "demo" / "leases"
    assert store.launch_folder(3) == studies / "demo" / "launches" / "0003"
    assert store.trial_folder(7) == studies / "demo" / "trials" / "0007"


# --- one driver -----------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from runner.record.store import StudyStore
with StudyStore(Path(sys.argv[1]), "demo").lock():
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_second_driver_is_told_who_the_first_is_until_it_dies(
    tmp_path: Path, store: StudyStore
) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        try:
            assert driver.stdout.readline() == "locked\n"
            message = f"study demo is being run by process {driver.pid}; wait for it or stop it"
            with pytest.raises(ConfigError) as caught, store.lock():
                pytest.fail("two drivers")
            assert str(caught.value) == message
            progress = store.progress()
            assert (progress.state, progress.driver_pid) == (StudyState.RUNNING, driver.pid)
        finally:
            driver.send_signal(signal.SIGKILL)
    with store.lock():
        assert store.progress().driver_pid == os.getpid()
    assert store.progress().driver_pid is None


def test_the_lock_holds_within_one_process_too(tmp_path: Path, store: StudyStore) -> None:
    with (
        store.lock(),
        pytest.raises(ConfigError, match=f"process {os.getpid()}"),
        StudyStore(tmp_path, "demo").lock(),
    ):
        pytest.fail("two drivers")


def test_sessions_add_up_and_a_killed_one_counts_to_its_last_write(tmp_path: Path) -> None:
    now_s = 1000.0
    store = StudyStore(tmp_path, "demo", wall_s=lambda: now_s)
    with store.lock():
        now_s += 120
        assert store.minutes_used() == 2
    now_s += 9999
    assert store.minutes_used() == 2
    killed = store.lock()
    killed.__enter__()
    now_s += 60
    store.write_spec(SPEC, None, ClockAnchor(0, 0, 1))
    now_s += 600  # never heard of again
    assert StudyStore(tmp_path, "demo", wall_s=lambda: now_s).minutes_used() == 3


def test_progress_tells_the_state_and_the_trials_that_have_begun(store: StudyStore) -> None:
    assert store.progress().state is None
    store.write_spec(SPEC, None, ClockAnchor(0, 0, 1))
    store.write_result(make_result(8))
    store.next_launch_number()
    store.write_state("interrupted", 20)
    progress = store.progress()
    assert progress.state is StudyState.INTERRUPTED
    assert (progress.running, progress.launches_used) == ((7,), 1)


# --- launches and specs ---------------------------------------------------------------------


def test_launch_numbers_are_never_given_twice(tmp_path: Path, store: StudyStore) -> None:
    assert [store.next_launch_number() for _ in range(3)] == [0, 1, 2]
    assert StudyStore(tmp_path, "demo").next_launch_number() == 3
    assert store.launches_used() == 4


def test_a_launch_reads_back_before_and_after_it_is_up(store: StudyStore) -> None:
    assert store.read_launch(2) is None
    store.write_launch(LAUNCH, None)
    assert store.read_launch(2) == (LAUNCH, None)
    report = LaunchReport({"load": 3.5}, ({"a": [1, {"b": None}]},), ("python -m x",), GPUS)
    store.write_launch(LAUNCH, report)
    read = store.read_launch(2)
    assert read is not None
    assert read[1] is not None
    assert replace(read[1], server_info=()) == replace(report, server_info=())
    assert read[1].server_info == ({"a": [1, {"b": None}]},)


def test_a_server_that_reports_infinity_does_not_end_the_study(store: StudyStore) -> None:
    report = LaunchReport({}, ({"load": math.inf},), (), ())
    store.write_launch(LAUNCH, report)
    read = store.read_launch(2)
    assert read is not None
    assert read[1] is not None
    assert read[1].server_info == ({"load": "inf"},)


@pytest.mark.parametrize("launch", [None, LAUNCH])
def test_a_spec_reads_back_exactly(store: StudyStore, launch: LaunchSpec | None) -> None:
    anchor = ClockAnchor(1764400000.123456, 98765.4321, 20.0)
    assert store.read_spec(7) is None
    store.write_spec(SPEC, launch, anchor)
    assert store.read_spec(7) == StoredSpec(SPEC, launch, anchor)
    document = json.loads((store.trial_folder(7) / "spec.json").read_text())
    assert document["params"] == SPEC.params
    assert document["spec_hash"] == SPEC.spec_hash


# --- rungs ----------------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**40)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
records = st.builds(
    RequestRecord,
    request_id=texts,
    replica=st.integers(0, 63),
    send_s=finite,
    first_token_s=st.none() | finite,
    end_s=finite,
    token_s=st.lists(finite, max_size=5).map(tuple),
    prompt_tokens=counts,
    output_tokens=counts,
    wanted_tokens=counts,
    cached_tokens=counts,
    status=st.sampled_from(RequestStatus),
    error=st.none() | texts,
)
samples = st.builds(
    PowerSample,
    time_s=finite,
    gpu_uuid=st.sampled_from(["GPU-a", "GPU-b", "ä"]),
    power_w=st.none() | finite,
    energy_j=st.none() | finite,
    utilization=st.none() | finite,
    memory_used_bytes=st.none() | counts,
    sm_clock_mhz=st.none() | finite,
    throttled=st.none() | st.booleans(),
)
loads = st.builds(
    LoadRun,
    records=st.lists(records, max_size=4).map(tuple),
    started_s=finite,
    window_start_s=finite,
    window_end_s=finite,
    is_steady=st.booleans(),
    client=st.builds(ClientHealth, finite, finite),
    start=st.sampled_from(LoadStart),
    cut_below=st.none() | finite,
)


numbers = st.none() | st.integers(0, 2**31 - 1)
batches = st.builds(
    BatchSample,
    time_s=finite,
    replica=st.integers(0, 99),
    dp_rank=st.integers(0, 99),
    running=numbers,
    waiting=numbers,
    in_graph=st.none() | st.booleans(),
    kv_usage=st.none() | finite,
    retracted=numbers,
    graph_passes=numbers,
    eager_passes=numbers,
)
restarts = st.lists(loads, max_size=3).map(tuple)


@st.composite
def trials_rungs(draw: st.DrawFn) -> list[RungRecord]:
    """Rungs that draw their samples, in any order, from one stream of readings."""
    by_key = {(sample.time_s, sample.gpu_uuid): sample for sample in draw(st.lists(samples))}
    stream = list(by_key.values())
    some = st.lists(st.sampled_from(stream), unique=True) if stream else st.just([])
    return [
        RungRecord(
            *(position, draw(st.integers(1, 4096)), draw(restarts), tuple(draw(some))),
            tuple(draw(st.lists(batches, max_size=3))),
        )
        for position in range(draw(st.integers(1, 3)))
    ]


@settings(max_examples=60, deadline=None)
@given(trials_rungs())
def test_any_rungs_read_back_exactly(rungs: list[RungRecord]) -> None:
    with TemporaryDirectory() as home:
        store = StudyStore(Path(home), "demo")
        for rung in rungs:
            store.write_rung(0, rung)
        assert store.measured_rungs(0) == rungs
        power = store.power_samples(0)
    keys = [(sample.time_s, sample.gpu_uuid) for sample in power]
    assert keys == sorted(set(keys))
    assert set(power) == {sample for rung in rungs for sample in rung.power}


def test_the_columns_are_those_of_the_contract(store: StudyStore) -> None:
    store.write_rung(7, make_rung())
    requests = pq.read_schema(store.trial_folder(7) / "rung-0-c64.parquet")
    power = pq.read_schema(store.trial_folder(7) / "power.parquet")
    wanted = [field.name for field in fields(RequestRecord)]
    assert sorted(requests.names) == sorted([*wanted, "restart"])
    assert str(requests.field("token_s").type.value_type) == "double"
    assert power.names == [field.name for field in fields(PowerSample)]
    server = pq.read_schema(store.trial_folder(7) / "server.parquet")
    assert server.names == [*(field.name for field in fields(BatchSample)), "rung"]


def test_a_rung_measured_again_takes_its_old_samples_with_it(store: StudyStore) -> None:
    store.write_rung(7, make_rung(0, 64, start_s=10))
    store.write_rung(7, make_rung(1, 8, start_s=20))
    again = make_rung(1, 8, start_s=30)
    store.write_rung(7, again)
    assert store.measured_rungs(7) == [make_rung(0, 64, start_s=10), again]
    assert {round(sample.time_s) for sample in store.power_samples(7)} == {10, 30}


def test_rungs_count_up_to_the_first_that_is_missing(store: StudyStore) -> None:
    assert store.measured_rungs(7) == []
    for position in range(3):
        store.write_rung(7, make_rung(position, 64 >> position, start_s=10 * position))
    (store.trial_folder(7) / "rung-1-c32.parquet").unlink()
    assert store.measured_rungs(7) == [make_rung(0, 64, start_s=0)]


def test_what_a_killed_driver_left_half_written_is_not_a_rung(store: StudyStore) -> None:
    store.write_rung(7, make_rung())
    (store.trial_folder(7) / ".rung-1-c8.parquet.tmp").write_bytes(b"PAR1")
    assert store.measured_rungs(7) == [make_rung()]


@pytest.mark.parametrize("name", ["rung-0-c64.parquet", "power.parquet", "server.parquet"])
@pytest.mark.parametrize("keep", [0, 10, -20])
def test_a_truncated_parquet_file_is_named(store: StudyStore, name: str, keep: int) -> None:
    store.write_rung(7, make_rung())
    path = store.trial_folder(7) / name
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StudyError, match=rf"{name} is damaged .*Delete it and .*continue"):
        store.measured_rungs(7)


def test_a_rung_whose_power_is_gone_is_named(store: StudyStore) -> None:
    store.write_rung(7, make_rung())
    (store.trial_folder(7) / "power.parquet").unlink()
    with pytest.raises(StudyError, match=r"rung-0-c64\.parquet is damaged .*power\.parquet"):
        store.measured_rungs(7)


def test_a_rung_without_a_table_of_batches_has_none(store: StudyStore) -> None:
    store.write_rung(7, make_rung())
    (store.trial_folder(7) / "server.parquet").unlink()
    assert store.measured_rungs(7) == [replace(make_rung(), batches=())]


def test_a_foreign_parquet_file_is_named(store: StudyStore) -> None:
    store.write_rung(7, make_rung())
    folder = store.trial_folder(7)
    shutil.copy(folder / "power.parquet", folder / "rung-1-c8.parquet")
    with pytest.raises(StudyError, match=r"rung-1-c8\.parquet is damaged"):
        store.write_rung(7, make_rung(2, 1))


# --- results --------------------------------------------------------------------------------


def test_a_result_reads_back_exactly(tmp_path: Path, store: StudyStore) -> None:
    failed = make_result(
        3,
        outcome=Outcome.FAILED,
        reason="hung",
        stage=Stage.START,
        rungs=(),
        values=(),
        launch=None,
    )
    assert store.read_result(7) is None
    store.write_result(make_result(7))
    store.write_result(failed)
    (store.trial_folder(5)).mkdir()
    for reader in (store, StudyStore(tmp_path, "demo")):
        assert reader.read_result(7) == make_result(7)
        assert reader.results() == [failed, make_result(7)]


def test_a_result_has_the_keys_of_the_contract_in_order(store: StudyStore) -> None:
    store.write_result(make_result())
    document = json.loads((store.trial_folder(7) / "result.json").read_text())
    contract = (
        "schema_version number name params resolved outcome reason retry_of repeat_of values rungs"
    )
    assert list(document)[:11] == contract.split()
    assert set(document) == {field.name for field in fields(TrialResult)}
    assert document["outcome"] == "complete"


@settings(max_examples=60, deadline=None)
@given(
    params=st.dictionaries(texts, st.booleans() | st.integers() | finite | texts, max_size=4),
    values=st.lists(finite, max_size=3).map(tuple),
    reason=st.none() | st.text(),
    outcome=st.sampled_from(Outcome),
    power_w=st.none() | finite,
)
def test_any_result_reads_back_exactly(
    params: dict[str, bool | int | float | str],
    values: tuple[float, ...],
    reason: str | None,
    outcome: Outcome,
    power_w: float | None,
) -> None:
    rung = replace(make_result().rungs[0], power_w=power_w)
    result = make_result(
        params=params, values=values, reason=reason, outcome=outcome, rungs=(rung,)
    )
    with TemporaryDirectory() as home:
        StudyStore(Path(home), "demo").write_result(result)
        read = StudyStore(Path(home), "demo").read_result(7)
    assert read == result
    assert read is not None
    assert {key: type(value) for key, value in read.params.items()} == {
        key: type(value) for key, value in params.items()
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda result, x: replace(result, values=(1.0, x)), r"values\[1\]"),
        (
            lambda result, x: replace(result, rungs=(replace(result.rungs[0], power_w=x),)),
            r"rungs\[0\]\.power_w",
        ),
        (lambda result, x: replace(result, params={"mem": x}), r"params\.mem"),
    ],
)
def test_json_never_holds_nan(
    store: StudyStore,
    spoil: Callable[[TrialResult, float], TrialResult],
    field: str,
    value: float,
) -> None:
    with pytest.raises(StudyError, match=rf"result\.json .*{field} is {value}"):
        store.write_result(spoil(make_result(), value))
    assert store.read_result(7) is None


def test_a_finished_trial_is_never_rewritten(store: StudyStore) -> None:
    store.write_result(make_result())
    with pytest.raises(StudyError, match="trial 7 is finished"):
        store.write_result(make_result())
    with pytest.raises(StudyError, match="trial 7 is finished"):
        store.write_rung(7, make_rung())
    with pytest.raises(StudyError, match="trial 7 is finished"):
        store.write_spec(SPEC, None, ClockAnchor(0, 0, 1))
    assert [path.name for path in store.trial_folder(7).iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"number": 7}', "lacks name, params, resolved, outcome, reason"),
        ('{"number": "7"}', "number is '7', expected int"),
        ('{"values": [NaN]}', "NaN is no finite number"),
        ('{"values": [1e400]}', "1e400 is no finite number"),
        ('{"values": [1%s]}' % ("0" * 400), "0000 is no finite number"),
        ('{"reason": "\\ud800"}', "surrogates not allowed"),
        ('{"outcome": "splendid"}', "outcome is 'splendid', expected complete or"),
        ('{"schema_version": 2}', "schema_version 2, this runner knows 1"),
    ],
)
def test_a_damaged_result_is_named(store: StudyStore, content: str, why: str) -> None:
    folder = store.trial_folder(7)
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(content)
    with pytest.raises(StudyError, match=rf"0007/result\.json .*{why}"):
        store.results()


def test_a_launch_file_without_its_launch_is_named(store: StudyStore) -> None:
    folder = store.launch_folder(3)
    folder.mkdir(parents=True)
    (folder / "launch.json").write_text("{}")
    with pytest.raises(
        StudyError, match=r"0003/launch\.json is damaged \(the document lacks number, key"
    ):
        store.read_launch(3)


# --- a disk that is full --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("result.json", lambda store: store.write_result(make_result())),
        ("power.parquet", lambda store: store.write_rung(7, make_rung())),
        ("rung-0-c64.parquet", lambda store: store.write_rung(7, make_rung())),
        ("spec.json", lambda store: store.write_spec(SPEC, None, ClockAnchor(0, 0, 1))),
    ],
)
def test_a_full_disk_leaves_no_half_file(
    store: StudyStore, name: str, write: Callable[[StudyStore], None]
) -> None:
    folder = store.trial_folder(7)
    folder.mkdir(parents=True)
    # The passing name leads to the kernel's always-full device: the write itself fails.
    (folder / f".{name}.tmp").symlink_to("/dev/full")
    with pytest.raises(StudyError, match=rf"0007/{name} cannot be written: No space left"):
        write(store)
    assert not (folder / name).exists()
    assert not list(folder.glob(".*.tmp"))
    write(store)
    assert (folder / name).exists()


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "studies").write_text("")
    with pytest.raises(StudyError, match=r"study\.json cannot be written: (Not a dir|File exists)"):
        StudyStore(tmp_path, "demo").create({}, {})


@pytest.mark.parametrize("name", ["what?", "100%"])
def test_a_home_that_no_database_url_can_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be in the path of a database"):
        StudyStore(tmp_path / name, "demo")


def test_a_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.touch()
    with pytest.raises(ConfigError, match="this is a file, a folder is expected"):
        StudyStore(file, "demo")


def test_a_home_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="--home ~nosuchuser"):
        StudyStore(Path("~nosuchuser"), "demo")


def test_a_rung_of_an_earlier_version_has_no_due_times(store: StudyStore) -> None:
    store.write_rung(7, make_rung())
    path = store.trial_folder(7) / "rung-0-c64.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["due_s"]), path)
    assert store.measured_rungs(7) == [make_rung()]


def test_due_times_are_kept(store: StudyStore) -> None:
    rung = make_rung()
    records = tuple(replace(r, due_s=r.send_s - 0.001) for r in rung.loads[0].records)
    rung = replace(rung, loads=(replace(rung.loads[0], records=records),))
    store.write_rung(7, rung)
    assert store.measured_rungs(7) == [rung]
