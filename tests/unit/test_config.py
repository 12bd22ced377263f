from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from runner.config import MAY_CHANGE, diff, dump, load_study, parse_study
from runner.errors import ConfigError
from runner.settings import METRIC_NAMES, Choices, Direction, FloatRange, IntRange, SloLimit
from runner.trial import EngineKind, Lengths, LoadProtocol

DEPTH = "pp_async_batch_depth"
DOCUMENT: dict[str, Any] = {
    "name": "demo",
    "engine": {"kind": "emulated", "profile": "some-machine", "time_scale": 20},
    "parameters": {
        "tp_size": {"choices": [1, 2, 4, 8]},
        "pp_size": {"choices": [1, 2, 4, 8]},
        DEPTH: {"int": [0, 8], "when": "pp_size > 1"},
        "mem_fraction_static": {"float": [0.5, 0.9]},
    },
    "constraints": ["tp_size * pp_size == gpus"],
    "baselines": [{"name": "tp8", "tp_size": 8, "max_running_requests": 64}],
    "workload": {"concurrency": [1, 8, 32]},
}


def write(folder: Path, text: str) -> Path:
    path = folder / "demo.yaml"
    path.write_text(text)
    return path


def test_defaults_are_those_of_the_contract() -> None:
    settings = parse_study(
        {"name": "d", "engine": {"profile": "p"}, "parameters": {"tp_size": {"choices": [1]}}}
    )
    assert settings.engine.kind is EngineKind.EMULATED
    assert (settings.engine.time_scale, settings.engine.python) == (1.0, None)
    assert (settings.hardware.gpus, settings.hardware.nodes) == (8, 1)
    assert settings.hardware.isolation == "exclusive"
    assert [*settings.constraints, *settings.baselines, *settings.slo] == []
    work = settings.workload
    assert work.protocol == LoadProtocol.CLOSED_LOOP
    assert work.prompt_tokens == work.output_tokens == Lengths.fixed(256)
    assert list(work.ladder) == [1, 8, 16, 32, 48, 64]
    assert (work.rate, work.shared_prefix) == ((), 0.0)
    (objective,) = settings.objectives
    assert (objective.metric, objective.concurrency) == ("output_throughput", 64)
    assert objective.direction is Direction.MAXIMIZE
    search = settings.search
    assert (search.sampler, search.trials, search.seed) == ("auto", 40, 0)
    assert [search.minutes, search.launches, search.energy_j, search.parallel] == [None] * 4
    measure = settings.measure
    assert (measure.precision, measure.min_window_s, measure.max_window_s) == (0.01, 10.0, 120.0)
    assert (measure.repeats, measure.finalists) == (1, 3)
    assert [settings.storage, settings.tracking_uri] == [None, None]


def test_every_kind_of_parameter() -> None:
    document = deepcopy(DOCUMENT)
    document["parameters"]["max_queued_requests"] = {"int": [1, 9], "step": 3}
    document["parameters"]["pp_max_micro_batch_size"] = {"int": [1, 64], "log": True}
    parameters = {p.name: p for p in parse_study(document).parameters}
    assert parameters["tp_size"] == Choices("tp_size", (1, 2, 4, 8))
    assert parameters["max_queued_requests"] == IntRange("max_queued_requests", 1, 7, step=3)
    assert parameters["pp_max_micro_batch_size"] == IntRange(
        "pp_max_micro_batch_size", 1, 64, log=True
    )
    assert parameters["mem_fraction_static"] == FloatRange("mem_fraction_static", 0.5, 0.9)
    depth = parameters[DEPTH]
    assert depth.when is not None
    assert depth.when.text == "pp_size > 1"


def test_parameters_follow_those_that_their_conditions_name() -> None:
    document = deepcopy(DOCUMENT)
    document["parameters"] = {
        "aaa": {"choices": [1, 2], "when": "zzz > 1"},
        "zzz": {"choices": [1, 2], "when": "attention_backend == 'triton'"},
        "attention_backend": {"choices": ["triton", "fa3"]},
        "pp_size": {"choices": [1, 8], "when": "tp_size == 1"},
        "tp_size": {"choices": [1, 8]},
    }
    names = [parameter.name for parameter in parse_study(document).parameters]
    assert names == ["tp_size", "pp_size", "attention_backend", "zzz", "aaa"]


def test_the_order_of_the_file_does_not_change_the_study() -> None:
    turned = {key: DOCUMENT[key] for key in reversed(DOCUMENT)}
    turned["parameters"] = dict(reversed(DOCUMENT["parameters"].items()))
    assert parse_study(turned) == parse_study(DOCUMENT)


def test_a_baseline_may_lie_outside_the_range_and_name_other_arguments() -> None:
    document = deepcopy(DOCUMENT)
    document["baselines"] = [{"name": "odd", "tp_size": 3, DEPTH: 99, "page_size": 64}]
    (baseline,) = parse_study(document).baselines
    assert baseline.params == {"tp_size": 3, DEPTH: 99, "page_size": 64}


def test_time_scale_is_for_emulated_servers_only() -> None:
    for kind, scale in {"emulated": 20.0, "simulated": 1.0, "sglang": 1.0}.items():
        settings = parse_study(DOCUMENT, [f"engine.kind={kind}", "engine.model=/m"])
        assert settings.engine.time_scale == scale


def test_open_loop_has_rates_for_rungs() -> None:
    settings = parse_study(
        DOCUMENT,
        ["workload={protocol: open_loop, rate: [0.5, 2, 4]}", "objectives=[{metric: ttft_s.p99}]"],
    )
    assert settings.workload.ladder == (0.5, 2.0, 4.0)
    assert settings.workload.concurrency == ()
    assert settings.objectives[0].concurrency == 4.0
    assert settings.objectives[0].direction is Direction.MINIMIZE


def test_slo_limits_come_in_one_order() -> None:
    settings = parse_study(DOCUMENT, ["slo={tpot_s: {p99: 0.1}, ttft_s: {p99: 2, mean: 1}}"])
    assert settings.slo == (
        SloLimit("ttft_s", "mean", 1.0),
        SloLimit("ttft_s", "p99", 2.0),
        SloLimit("tpot_s", "p99", 0.1),
    )


@pytest.mark.parametrize("metric", METRIC_NAMES)
def test_every_metric_can_be_an_objective(metric: str) -> None:
    options = [f"objectives=[{{metric: {metric}, concurrency: 8}}]", "slo.ttft_s.p99=2"]
    assert parse_study(DOCUMENT, options).objectives[0].metric == metric


def test_environment_values_are_text() -> None:
    settings = parse_study(DOCUMENT, ["engine.env={A: x, B: 1, C: 0.5}"])
    assert settings.engine.env == {"A": "x", "B": "1", "C": "0.5"}


def test_a_key_without_a_value_counts_as_left_out() -> None:
    assert parse_study(DOCUMENT, ["workload.concurrency=", "slo=", "search.minutes="]) == (
        parse_study({**DOCUMENT, "workload": {}})
    )


def test_files_are_looked_up_beside_the_study_file(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("")
    (tmp_path / "lengths.jsonl").write_text('17\n\n{"prompt_tokens": 5, "output_tokens": 6}\n')
    path = write(
        tmp_path,
        "name: demo\nengine: {profile: own.yaml}\nparameters: {tp_size: {choices: [1, 2]}}\n"
        "workload: {prompt_tokens: {file: lengths.jsonl}, output_tokens: {file: lengths.jsonl}}\n",
    )
    settings = load_study(path)
    assert settings.engine.profile == str(tmp_path / "own.yaml")
    assert settings.workload.prompt_tokens == Lengths("recorded", values=(17, 5), paired=True)
    assert settings.workload.output_tokens == Lengths("recorded", values=(17, 6), paired=True)
    (tmp_path / "lengths.jsonl").unlink()
    assert parse_study(json.loads(json.dumps(dump(settings)))) == settings


LENGTHS = st.one_of(
    st.integers(1, 9999),
    st.tuples(st.integers(1, 99), st.integers(0, 99)).map(
        lambda ends: {"uniform": [ends[0], ends[0] + ends[1]]}
    ),
    st.tuples(st.floats(1, 1e4), st.floats(0, 1e3)).map(lambda law: {"normal": list(law)}),
    st.lists(st.integers(1, 9999), min_size=1, max_size=5).map(lambda each: {"recorded": each}),
)
BUDGET = st.none() | st.floats(0.001, 1e6)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    workload=st.fixed_dictionaries({"prompt_tokens": LENGTHS, "output_tokens": LENGTHS}),
    ladder=st.lists(st.integers(1, 999), min_size=1, max_size=6, unique=True),
    is_open=st.booleans(),
    kind=st.sampled_from(["simulated", "emulated", "sglang"]),
    minutes=BUDGET,
    parallel=st.just("auto") | st.integers(1, 8),
    objectives=st.lists(st.sampled_from(METRIC_NAMES), max_size=3, unique=True),
)
def test_what_is_dumped_is_read_back_exactly(  # noqa: PLR0913 (each is one section)
    *,
    workload: dict[str, Any],
    ladder: list[int],
    is_open: bool,
    kind: str,
    minutes: float | None,
    parallel: str | int,
    objectives: list[str],
) -> None:
    document = deepcopy(DOCUMENT)
    rungs = {"protocol": "open_loop", "rate": ladder} if is_open else {"concurrency": ladder}
    document["workload"] = {**workload, **rungs}
    document["engine"] |= {"kind": kind, "model": "/m", "env": {"A": 1}, "args": {"page_size": 16}}
    document["search"] = {"minutes": minutes, "parallel": parallel}
    document["slo"] = {"itl_s": {"p90": 0.25}, "ttft_s": {"mean": 1}}
    document["objectives"] = [{"metric": name} for name in objectives] or None
    settings = parse_study(document)
    stored = json.loads(json.dumps(dump(settings), allow_nan=False, sort_keys=True))
    assert parse_study(stored) == settings
    assert diff(dump(settings), stored) == []


def test_a_stored_study_takes_overrides() -> None:
    settings = parse_study(dump(parse_study(DOCUMENT)), ["search.trials=99"])
    assert settings.search.trials == 99


def test_differences_are_told_by_place() -> None:
    old = parse_study(DOCUMENT)
    new = parse_study(
        DOCUMENT,
        [
            "workload.concurrency=[1, 32]",
            "search.trials=60",
            "search.minutes=5",
            "tracking.uri=http://host",
            "storage=postgresql://host/db",
            "baselines.0.tp_size=4",
            "slo.ttft_s.p99=2",
            "parameters.cuda_graph.choices=[true]",
            "engine.kind=simulated",
        ],
    )
    changes = diff(dump(old), dump(new))
    assert changes == [
        'engine.kind: "emulated" -> "simulated"',
        "engine.time_scale: 20.0 -> 1.0",
        'parameters.cuda_graph: absent -> {"choices": [true]}',
        "baselines.0.tp_size: 8 -> 4",
        "workload.concurrency: [1, 8, 32] -> [1, 32]",
        'slo.ttft_s: absent -> {"p99": 2.0}',
        "search.trials: 40 -> 60",
        "search.minutes: null -> 5.0",
        'storage: null -> "postgresql://host/db"',
        'tracking.uri: null -> "http://host"',
    ]
    allowed = [line for line in changes if line.startswith(tuple(MAY_CHANGE))]
    assert [line.split(":")[0] for line in allowed] == [
        "search.trials",
        "search.minutes",
        "storage",
        "tracking.uri",
    ]


def test_a_baseline_more_or_less_is_a_difference() -> None:
    one = {"baselines": [{"name": "a"}]}
    two = {"baselines": [{"name": "a"}, {"name": "b"}]}
    assert diff(one, two) == ['baselines.1: absent -> {"name": "b"}']
    assert diff(two, one) == ['baselines.1: {"name": "b"} -> absent']
    assert diff({"constraints": []}, {"constraints": []}) == []


def test_the_command_line_can_import_it_at_once() -> None:
    heavy = ("ray", "optuna", "mlflow", "pynvml", "numpy", "pyarrow", "pydantic", "yaml", "rich")
    code = f"import sys, runner.config; print([m for m in {heavy!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_mistake_is_blamed_on_the_file_or_the_option(tmp_path: Path) -> None:
    path = write(tmp_path, "name: demo\nengine: {profile: p}\nparameters: {tp_size: {int: [8, 0]}}")
    with pytest.raises(ConfigError) as caught:
        load_study(path)
    assert str(caught.value) == (
        "demo.yaml: parameters.tp_size.int: found [8, 0], expected [low, high] with low <= high"
    )
    with pytest.raises(ConfigError) as caught:
        load_study(path, ["parameters.tp_size.int=[0, 8]"])
    assert str(caught.value) == (
        "--set parameters.tp_size.int: found [0, 8], but tp_size is a whole number, 1 or more"
    )


def test_paths_from_the_home_folder_are_a_shells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    document = {
        **DOCUMENT,
        "engine": {"kind": "sglang", "model": "~/m", "python": "~/sgl/bin/python"},
    }
    engine = parse_study(document).engine
    assert (engine.model, engine.python) == ("/home/ada/m", "/home/ada/sgl/bin/python")
