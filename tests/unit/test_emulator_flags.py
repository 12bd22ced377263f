"""The emulated server's command line: SGLang's flags as SGLang takes them, and its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.engines.emulator.faults.kind import FaultKind
from runner.engines.emulator.flags import parse_flags


def test_without_flags_everything_has_its_default() -> None:
    flags = parse_flags([])
    assert (flags.profile, flags.time_scale) == ("cpu-blocking-pp2", 1.0)
    assert (flags.gpu_folder, flags.faults, flags.fault_seed) == (None, (), 0)
    args = flags.server_args
    assert (args["tp_size"], args["pp_size"], args["pp_async_batch_depth"]) == (1, 1, 0)
    assert (args["pp_max_micro_batch_size"], args["max_running_requests"]) == (None, None)
    assert (args["port"], args["decode_log_interval"], args["stream_interval"]) == (30000, 40, 1)
    assert not {"profile", "time_scale", "gpu_folder", "fault"} & set(args)


def test_sglangs_flags_are_kept_under_sglangs_names() -> None:
    words = (
        "--tp 2 --pp-size 4 --ep 2 --dp 1 --pp-async-batch-depth 8 --attention-backend triton "
        "--cuda-graph-backend-decode disabled --cuda-graph-bs-decode 1 2 4 --mem-fraction-static "
        "0.88 --trust-remote-code --watchdog-timeout 60 --load-format dummy --model /m"
    )
    args = parse_flags(words.split()).server_args
    expected = {
        "tp_size": 2,
        "pp_size": 4,
        "ep_size": 2,
        "dp_size": 1,
        "pp_async_batch_depth": 8,
        "attention_backend": "triton",
        "cuda_graph_backend_decode": "disabled",
        "cuda_graph_bs_decode": [1, 2, 4],
        "mem_fraction_static": 0.88,
        "trust_remote_code": True,
        "watchdog_timeout": 60.0,
        "load_format": "dummy",
        "model_path": "/m",
    }
    assert {name: args[name] for name in expected} == expected


def test_own_flags() -> None:
    flags = parse_flags(
        ["--profile", "p.yaml", "--time-scale", "20", "--gpu-folder", "/g", "--port", "31000"]
    )
    assert (flags.profile, flags.time_scale, flags.gpu_folder) == ("p.yaml", 20.0, Path("/g"))
    assert flags.command_line == "--profile p.yaml --time-scale 20 --gpu-folder /g --port 31000"


def test_an_unambiguous_beginning_is_taken_for_the_flag() -> None:
    assert parse_flags(["--max-running", "64"]).server_args["max_running_requests"] == 64


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--no-such-flag 7", "unrecognized arguments: --no-such-flag 7"),
        ("--cuda-graph-max-bs 8", "ambiguous option: --cuda-graph-max-bs could match"),
        ("--attention-backend bogus", "argument --attention-backend: invalid choice: 'bogus'"),
        ("--pp-size two", "invalid int value: 'two'"),
        ("--time-scale 0", "argument --time-scale: must be above 0, found 0"),
        ("--time-scale nan", "argument --time-scale: must be above 0"),
        ("--fault explode", "unknown fault 'explode'; known are none, die-at-start, "),
        ("--fault die-after-requests", "die-after-requests takes a count of 1 or more"),
        ("--fault refuse-flag --pp-size 2", "unrecognized arguments: --pp-size"),
        ("--fault refuse-flag:--tp-size --tp-size=2", "unrecognized arguments: --tp-size"),
    ],
)
def test_a_wrong_command_line_ends_with_2(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_flags(words.split())
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("sglang serve: error: ")
    assert message in last


def test_a_flag_is_refused_only_where_it_is_given() -> None:
    flags = parse_flags(["--fault", "refuse-flag:--tp-size", "--pp-size", "2"])
    assert flags.server_args["pp_size"] == 2


def test_faults_may_be_given_together_or_one_by_one() -> None:
    flags = parse_flags(["--fault", "none; hang-at-start", "--fault", "die-after-requests:3"])
    assert [fault.kind for fault in flags.faults] == [
        FaultKind.HANG_AT_START,
        FaultKind.DIE_AFTER_REQUESTS,
    ]


def test_help_gives_each_fault_a_line_and_names_sglangs_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_flags(["--help"])
    shown = capsys.readouterr().out
    heads = [line.split()[0] for line in shown.splitlines() if line.startswith("  ") and line[2:3]]
    for kind in FaultKind:
        assert sum(head.partition(":")[0].partition("[")[0] == kind for head in heads) == 1
    assert "--pp-async-batch-depth" in shown
