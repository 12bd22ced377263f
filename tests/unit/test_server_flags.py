"""What each version of SGLang is told, and what is refused before it is started."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from runner.cluster.executor import Executor
from runner.config import load_study
from runner.engines.emulator.flags import emulated_environment
from runner.engines.sglang.environment import ServerEnvironment, Takes, parse_help
from runner.engines.sglang.flags import clash, mistake, render, resolved_params
from runner.engines.sglang.parameter_check import check_parameters
from runner.errors import ConfigError, Infeasible
from runner.insight.terminal import view_for
from runner.record.store import StudyStore
from runner.session import SessionRequest, open_machine
from runner.study_file.server_args import ALIASES, KNOWN, OWNED, name_mistake
from runner.trial import ParamValue
from tests.server_flags import VERSIONS, help_text, real_environment
from tests.studies import CPU, study

SPACES = Path(__file__).parents[2] / "search_spaces"
OLD, GRAPH_PHASES, NEW = ("0.5.12",), ("0.5.14", "0.5.16", "0.5.18", "0.5.20"), ("0.5.23",)


@pytest.fixture(params=VERSIONS)
def offered(request: pytest.FixtureRequest) -> ServerEnvironment:
    return real_environment(request.param)


def test_help_is_read_as_it_was_written(offered: ServerEnvironment) -> None:
    assert parse_help(help_text(offered)) == offered.flags


@pytest.mark.parametrize("version", VERSIONS)
def test_graphs_on_and_off(version: str) -> None:
    offered = real_environment(version)
    on, off = (render({"cuda_graph": value}, offered) for value in (True, False))
    if version in OLD:
        assert (on, off) == ([], ["--disable-cuda-graph"])
    else:
        assert on == ["--cuda-graph-backend-decode", "full"]
        assert off == ["--cuda-graph-backend-decode", "disabled"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_largest_graph(version: str) -> None:
    flag = "--cuda-graph-max-bs" if version in OLD else "--cuda-graph-max-bs-decode"
    assert render({"cuda_graph_max_bs": 16}, real_environment(version)) == [flag, "16"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("args", [{"attn_dp_size": 4}, {"attn_dp_size": 4, "dp_size": 1}])
def test_attention_dp(version: str, args: dict[str, ParamValue]) -> None:
    words = render({"tp_size": 8, **args}, real_environment(version))
    if version in NEW:
        dp_size = ["--dp-size", "1"] if "dp_size" in args else []
        assert words == ["--tp-size", "8", "--attn-dp-size", "4", *dp_size]
    else:
        assert words == ["--tp-size", "8", "--enable-dp-attention", "--dp-size", "4"]


@pytest.mark.parametrize("version", [*OLD, *GRAPH_PHASES])
def test_attention_dp_of_one_leaves_the_replicas_alone(version: str) -> None:
    words = render({"attn_dp_size": 1, "dp_size": 2}, real_environment(version))
    assert words == ["--dp-size", "2"]


def test_both_kinds_of_data_parallelism_exclude_each_other(offered: ServerEnvironment) -> None:
    with pytest.raises(Infeasible, match="cannot both be above 1"):
        render({"attn_dp_size": 2, "dp_size": 2}, offered)


def test_the_parameters_of_a_pipeline_have_flags(offered: ServerEnvironment) -> None:
    args: dict[str, ParamValue] = {
        "tp_size": 1,
        "pp_size": 8,
        "ep_size": 1,
        "pp_async_batch_depth": 8,
        "pp_max_micro_batch_size": 4,
        "max_running_requests": 64,
        "chunked_prefill_size": -1,
        "mem_fraction_static": 0.88,
        "attention_backend": "triton",
        "trust_remote_code": True,
        "disable_radix_cache": False,
        "pp_layer_partition": "8,8,8,8,8,7,7,7",
    }
    words = render(args, offered)
    assert [word for word in words if word.startswith("--")] == [
        *("--tp-size", "--pp-size", "--ep-size", "--pp-async-batch-depth"),
        *("--pp-max-micro-batch-size", "--max-running-requests", "--chunked-prefill-size"),
        *("--mem-fraction-static", "--attention-backend", "--trust-remote-code"),
    ]
    assert words[words.index("--chunked-prefill-size") + 1] == "-1"


def test_every_real_flag_can_be_given_by_its_name(offered: ServerEnvironment) -> None:
    names = {flag.removeprefix("--").replace("-", "_") for flag in offered.by_name}
    for name in names - OWNED - set(ALIASES):
        wrong = name_mistake(name)
        assert wrong is None or name == "speculative_draft_model", wrong  # an alias of one listed
        flag = offered.by_name["--" + name.replace("_", "-")]
        value = flag.takes is Takes.NOTHING or (flag.choices or ("1",))[0]
        refused = mistake(name, value, offered)
        others = {each.removeprefix("--").replace("-", "_") for each in flag.names} - {name}
        assert refused is None or (others & set(KNOWN) and "is written" in refused), name


@pytest.mark.parametrize(
    ("name", "neutral"),
    [
        ("tensor_parallel_size", "tp_size"),
        ("pipeline_parallel_size", "pp_size"),
        ("data_parallel_size", "dp_size"),
        ("expert_parallel_size", "ep_size"),
        ("enable_hicache", "enable_hierarchical_cache"),
        ("speculative_draft_model", "speculative_draft_model_path"),
    ],
)
def test_another_spelling_of_a_listed_flag_is_refused(name: str, neutral: str) -> None:
    offered = real_environment("0.5.23")
    assert mistake(name, "1", offered) == f"is written {neutral!r} here"


def test_another_spelling_is_refused_by_the_study_file_too() -> None:
    for name in ("tp", "tensor_parallel_size", "enable_dp_attention", "disable_decode_cuda_graph"):
        assert "is written" in str(name_mistake(name))


@pytest.mark.parametrize(
    ("version", "name", "value", "said"),
    [
        ("0.5.12", "cuda_graph_backend_decode", "full", "SGLang 0.5.12 has no flag for it"),
        ("0.5.12", "prefill_decode_interval", 1, "SGLang 0.5.12 has no flag for it"),
        ("0.5.16", "weight_cache_mode", "off", "SGLang 0.5.16 has no flag for it"),
        ("0.5.20", "cuda_graph_bs", 8, "did you mean 'cuda_graph_bs_decode'?"),
        ("0.5.20", "stream_output", True, "SGLang 0.5.20 has no flag --stream-output"),
        ("0.5.23", "max_running", 8, "did you mean 'max_running_requests'?"),
        ("0.5.23", "pp_max", 8, "did you mean 'pp_max_micro_batch_size'?"),
        ("0.5.23", "cuda_graph_max", 8, "did you mean 'cuda_graph_max_bs'?"),
        ("0.5.23", "zzz", 8, "SGLang 0.5.23 has no flag --zzz"),
        ("0.5.23", "attention_backend", "cutlass_mla", "expected one of triton, torch_native, "),
        ("0.5.23", "trust_remote_code", 1, "found 1, expected true or false"),
        ("0.5.23", "load_format", True, "found true, expected a value"),
        ("0.5.23", "port", 30000, "is set by this program; leave it out"),
        ("0.5.23", "help", True, "SGLang 0.5.23 has no flag --help"),
    ],
)
def test_what_a_version_does_not_take(
    version: str, name: str, value: ParamValue, said: str
) -> None:
    assert said in str(mistake(name, value, real_environment(version)))
    with pytest.raises(Infeasible, match=name):
        render({name: value}, real_environment(version))


def test_a_backend_that_went_away_was_there() -> None:
    assert mistake("attention_backend", "cutlass_mla", real_environment("0.5.12")) is None


def test_a_switch_that_is_on_by_default_can_be_switched_off() -> None:
    offered = real_environment("0.5.23")
    assert render({"dllm_fdfo": False}, offered) == ["--no-dllm-fdfo"]
    assert render({"dllm_fdfo": True}, offered) == ["--dllm-fdfo"]
    assert render({"enable_metrics": False}, offered) == []


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ("cuda_graph", "cuda_graph_backend_decode"),
            "are the same flag (--cuda-graph-backend-decode): give one of them",
        ),
        (("cuda_graph_config", "cuda_graph"), "cuda_graph_config overrules cuda_graph"),
        (("cuda_graph_max_bs", "cuda_graph_config"), "overrules cuda_graph_max_bs"),
        (("enable_torch_compile", "dllm_fdfo"), None),
        (("cuda_graph", "cuda_graph_max_bs", "cuda_graph_backend_prefill"), None),
        (("smg_http_sidecar_port", "grpc_http_sidecar_port"), "are the same flag"),
    ],
)
def test_parameters_that_contradict_each_other(names: tuple[str, ...], said: str | None) -> None:
    found = clash(names, real_environment("0.5.23"))
    assert found is None if said is None else said in str(found)


def test_a_study_is_checked_with_all_its_values() -> None:
    settings = study(
        CPU,
        engine={**CPU["engine"], "args": {"watchdog": 5}},
        parameters={**CPU["parameters"], "sampling_backend": {"choices": ["pytorch", "none"]}},
        baselines=[{"name": "first", "pp_size": 2, "ragged": True}],
    )
    with pytest.raises(ConfigError) as caught:
        check_parameters(settings, real_environment("0.5.23"))
    assert str(caught.value).startswith("engine.args.watchdog: SGLang 0.5.23 has no flag")
    assert str(caught.value).endswith("(and 2 more)")


def test_a_baseline_may_spell_otherwise_what_the_search_has() -> None:
    searched = {**CPU["parameters"], "cuda_graph": {"choices": [True, False]}}
    other = {"name": "other", "pp_size": 2, "cuda_graph_backend_decode": "breakable"}
    fine = study(CPU, parameters=searched, baselines=[other])
    check_parameters(fine, real_environment("0.5.23"))
    fixed = {**CPU["engine"], "args": {"cuda_graph_backend_decode": "breakable"}}
    with pytest.raises(ConfigError, match=r"parameters: .* are the same flag"):
        check_parameters(study(CPU, parameters=searched, engine=fixed), emulated_environment())


@pytest.mark.parametrize(
    ("version", "is_known"),
    [
        ("0.5.11", False),
        ("0.5.12", True),
        ("0.5.16.post1", True),
        ("0.5.23", True),
        ("0.5.24", False),
        ("0.6.0rc1", False),
    ],
)
def test_a_version_that_was_never_tried_has_a_note(version: str, *, is_known: bool) -> None:
    offered = ServerEnvironment(version, real_environment("0.5.23").flags)
    assert (offered.note is None) is is_known
    assert render({"cuda_graph": True}, offered)


@pytest.mark.parametrize(
    ("line", "names", "takes", "choices"),
    [
        ("  --tp-size TP_SIZE, --tp TP_SIZE", ("--tp-size", "--tp"), Takes.VALUE, ()),
        ("  --tp-size, --tp TP_SIZE  the size", ("--tp-size", "--tp"), Takes.VALUE, ()),
        ("  -v, --verbose         say more", ("--verbose",), Takes.NOTHING, ()),
        ("  --fast, --no-fast", ("--fast", "--no-fast"), Takes.NOTHING, ()),
        ("  --mode {a, b,c}  how", ("--mode",), Takes.VALUE, ("a", "b", "c")),
        ("  --sizes SIZES [SIZES ...]", ("--sizes",), Takes.VALUE, ()),
        ("  --sizes [SIZES ...]", ("--sizes",), Takes.VALUE, ()),
        ("  --sum [SUM]  a sum", ("--sum",), Takes.OPTIONAL, ()),
    ],
)
def test_lines_of_help(
    line: str, names: tuple[str, ...], takes: Takes, choices: tuple[str, ...]
) -> None:
    explained = f"options:\n{line}\n                        --not-a-flag is explained here\n"
    (flag,) = parse_help(explained)
    assert (flag.names, flag.takes, flag.choices) == (names, takes, choices)


def test_what_a_server_offers_travels_to_other_machines(offered: ServerEnvironment) -> None:
    assert offered.by_name
    assert pickle.loads(pickle.dumps(offered)) == offered


def test_what_the_oldest_server_resolved_is_told_by_neutral_names() -> None:
    info = {"tp_size": 8, "dp_size": 4, "enable_dp_attention": True, "cuda_graph_max_bs": 24}
    resolved = resolved_params({**info, "disable_cuda_graph": True}, ["attn_dp_size"])
    assert resolved == {
        "tp_size": 8,
        "dp_size": 1,
        "attn_dp_size": 4,
        "cuda_graph": False,
        "cuda_graph_max_bs": 24,
    }
    newer = {"dp_size": 1, "attn_dp_size": 4, "enable_dp_attention": True}
    assert resolved_params(newer, ["attn_dp_size"])["attn_dp_size"] == 4


class ExecutorOf:
    """An executor whose servers offer these flags."""

    def __init__(self, offered: ServerEnvironment) -> None:
        self.offered = offered
        self.is_closed = False

    def server_environment(self) -> ServerEnvironment:
        return self.offered

    def close(self) -> None:
        self.is_closed = True


def test_a_study_that_continues_is_checked_when_its_machine_is_opened(tmp_path: Path) -> None:
    executor = ExecutorOf(real_environment("0.5.12"))

    def opened(*_: object) -> Executor:
        return cast("Executor", executor)

    args: dict[str, Any] = {"weight_cache_mode": "off"}
    settings = study(CPU, engine={**CPU["engine"], "args": args})
    request = SessionRequest(settings, tmp_path, opened, "", "", False)
    with pytest.raises(ConfigError, match=r"engine\.args\.weight_cache_mode: SGLang 0\.5\.12 has"):
        open_machine(request, StudyStore(tmp_path, "tiny"), view_for(sys.stderr))
    assert executor.is_closed


@pytest.mark.parametrize("path", sorted(SPACES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_search_spaces_fit_every_version(path: Path, offered: ServerEnvironment) -> None:
    check_parameters(load_study(path), offered)
    check_parameters(load_study(path), emulated_environment())
