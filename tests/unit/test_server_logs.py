"""Why a server died and how far it came, from lines that real servers wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.engines.sglang.logs import (
    TABLE,
    LogReader,
    PhaseTimes,
    Verdict,
    explain_death,
    last_line,
    shows_death,
)

DATA = Path(__file__).parents[1] / "data" / "server_logs"
HIT = "[2026-03-04 09:11:08 TP3] Scheduler hit an exception: Traceback (most recent call last):\n"
FRAME = (
    '  File "/sgl/python/sglang/srt/managers/scheduler.py", line 3130, in run_scheduler_process\n'
)
MAIN = "Traceback (most recent call last):\n"
RESOLVE = '  File "/site/sglang/srt/server_args.py", line 1200, in __post_init__\n'
OVERRIDES = '  File "/site/sglang/srt/arg_groups/validation_hook.py", line 88, in check\n'
SIGQUIT = (
    "\n[2026-03-04 09:11:09] Received sigquit from a child process. It usually means the child "
    "failed.\n"
)


def captured(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("log", "exit_code", "verdict", "message"),
    [
        (
            "unknown-flag.log",
            2,
            Verdict.INFEASIBLE,
            "the server does not know the flag: --no-such-flag 7",
        ),
        (
            "bad-value.log",
            2,
            Verdict.INFEASIBLE,
            (
                "the server refused a flag: argument --attention-backend: invalid choice: 'bogus' "
                "(choose from "
            ),
        ),
        (
            "out-of-memory.log",
            -9,
            Verdict.INFEASIBLE,
            (
                "out of GPU memory: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate "
                "1.93 GiB."
            ),
        ),
        (
            "too-little-memory.log",
            -9,
            Verdict.INFEASIBLE,
            (
                "no GPU memory is left for the KV cache: ValueError: Loaded weights leave no GPU "
                "memory for the KV cache under --mem-fraction-static=0.1."
            ),
        ),
        (
            "two-gpus.log",
            -9,
            Verdict.INFEASIBLE,
            (
                "the server wants GPUs it was not given: torch.AcceleratorError: CUDA error: "
                "invalid device ordinal"
            ),
        ),
        (
            "crash-while-serving.log",
            -9,
            Verdict.FAILED,
            (
                "a GPU fault: RuntimeError: Check failed: (status == cudaSuccess) is false: "
                "FusedAddRMSNorm failed with error code device-side assert triggered"
            ),
        ),
        (
            "killed-scheduler.log",
            -9,
            Verdict.FAILED,
            (
                "a process of the server was killed, perhaps because the machine is out of memory: "
                "Subprocess scheduler_0 (pid=587) crashed with exit code -9"
            ),
        ),
    ],
)
def test_a_captured_log_names_its_first_cause(
    log: str, exit_code: int, verdict: Verdict, message: str
) -> None:
    death = explain_death(captured(log), exit_code)
    assert death.verdict is verdict
    assert death.message.startswith(message)


REPORTED = [
    # Lines of public reports, with the traceback they stood in.
    (
        HIT + FRAME + "RuntimeError: Not enough memory. Please try to increase "
        "--mem-fraction-static." + SIGQUIT,
        Verdict.INFEASIBLE,
        "no GPU memory is left for the KV cache",
    ),
    (
        HIT + FRAME + "Exception: Capture cuda graph failed: CUDA out of memory. Tried to "
        "allocate 448.00 MiB. GPU 7 has a total capacity of 95.00 GiB\nPossible solutions:\n"
        "1. disable cuda graph by --disable-cuda-graph\n" + SIGQUIT,
        Verdict.INFEASIBLE,
        "out of GPU memory",
    ),
    (
        HIT + FRAME + "AssertionError: Only SM 10.x and 11.x are supported" + SIGQUIT,
        Verdict.INFEASIBLE,
        "not supported here",
    ),
    (
        HIT + FRAME + "AssertionError: Only {'trtllm_mha', 'triton', 'fa4'} backends are "
        "supported on Blackwell GPUs for hybrid GDN models. Got attention_backend=flashinfer.",
        Verdict.INFEASIBLE,
        "not supported here",
    ),
    (
        MAIN + RESOLVE + "ValueError: TRTLLM MHA backend is only supported on Blackwell GPUs "
        "(SM100). Please use a different backend.",
        Verdict.INFEASIBLE,
        "not supported here",
    ),
    (
        HIT + FRAME + "RuntimeError: TllmGenFmhaRunner: Unsupported architecture" + SIGQUIT,
        Verdict.INFEASIBLE,
        "not supported here",
    ),
    (
        HIT + FRAME + "AssertionError: 25 is not divisible by 4" + SIGQUIT,
        Verdict.INFEASIBLE,
        "the sizes do not fit the model",
    ),
    (
        MAIN + OVERRIDES + "AssertionError: chunked_prefill_size 100 and page_size 64",
        Verdict.INFEASIBLE,
        "the server refused its arguments",
    ),
    (
        (
            "[2026-03-04 09:11:08] ERROR:    [Errno 98] error while attempting to bind on address "
            "('127.0.0.1', 30000): address already in use\n"
        ),
        Verdict.PORT,
        "a port was taken",
    ),
    (
        HIT + FRAME + "torch.distributed.DistNetworkError: The server socket has failed to "
        "listen on any local network address. port: 29500, useIpv6: false, code: -98, name: "
        "EADDRINUSE, message: address already in use" + SIGQUIT,
        Verdict.PORT,
        "a port was taken",
    ),
    (
        HIT + FRAME + "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:24111')",
        Verdict.PORT,
        "a port was taken",
    ),
    (
        MAIN + RESOLVE + "ValueError: nccl_port at 24003 is not available in 30 seconds. nccl_port "
        "is used by a process already.",
        Verdict.PORT,
        "a port was taken",
    ),
    (
        "[2025-08-02 19:24:30 TP3] Watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n"
        "[2025-08-02 06:06:21 TP2] Pyspy failed to dump PID 171. Error: py-spy: not found\n"
        + SIGQUIT,
        Verdict.FAILED,
        "the server hung",
    ),
    (
        HIT + FRAME + "Exception: Capture cuda graph failed: Triton Error [CUDA]: an illegal "
        "memory access was encountered" + SIGQUIT,
        Verdict.FAILED,
        "a GPU fault",
    ),
    (
        MAIN + FRAME + "RuntimeError: Rank 0 scheduler died during initialization (exit code: "
        "-9). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer.",
        Verdict.FAILED,
        "a process of the server was killed",
    ),
    (
        "[2026-03-04 09:11:08] Initialization failed. warmup error: Traceback (most recent call "
        "last):\n"
        + FRAME
        + "AssertionError: res=<Response [500]>, res.text='Internal Server Error'",
        Verdict.FAILED,
        "the server's own warm-up failed: AssertionError: res=<Response [500]>",
    ),
    (
        "cannot start /opt/none/bin/python: No such file or directory\n",
        Verdict.FAILED,
        "the server could not be executed: cannot start /opt/none/bin/python",
    ),
    (
        HIT + FRAME + "IndexError: list index out of range" + SIGQUIT,
        Verdict.FAILED,
        "the server crashed: IndexError: list index out of range",
    ),
]


@pytest.mark.parametrize(("text", "verdict", "message"), REPORTED)
def test_a_reported_death_is_recognised(text: str, verdict: Verdict, message: str) -> None:
    death = explain_death(text, -9)
    assert death.verdict is verdict
    assert death.message.startswith(message)


def test_every_row_of_the_table_has_a_real_line() -> None:
    codes = {"unknown-flag.log": 2, "bad-value.log": 2}
    messages = [explain_death(text, -9).message for text, _, _ in REPORTED]
    messages += [
        explain_death(captured(path.name), codes.get(path.name, -9)).message
        for path in DATA.glob("*.log")
    ]
    for row in TABLE:
        assert any(message.startswith(row.message) for message in messages), row.message


def test_the_first_rank_to_die_is_believed() -> None:
    later = HIT.replace("TP3", "TP1") + FRAME + "torch.OutOfMemoryError: CUDA out of memory.\n"
    text = HIT + FRAME + "KeyError: 'model.layers.0'\n" + later + SIGQUIT
    assert explain_death(text, -9).message == "the server crashed: KeyError: 'model.layers.0'"


def test_what_follows_a_death_is_never_its_reason() -> None:
    text = "[2026-03-04 09:11:07] Load weight begin. avail mem=1.00 GB\n" + SIGQUIT
    death = explain_death(text, -9)
    assert death.verdict is Verdict.FAILED
    assert "sigquit" not in death.message
    assert "exit code -9" in death.message
    assert death.message.endswith("Load weight begin. avail mem=1.00 GB")


def test_advice_that_mentions_memory_is_no_death_by_memory() -> None:
    death = explain_death(captured("start-cpu-pp2.log"), -9)
    assert death.verdict is Verdict.FAILED
    assert death.message.startswith("the server ended with exit code -9 and names no reason")


def test_an_operand_type_is_not_an_unsupported_setting() -> None:
    text = HIT + FRAME + "TypeError: unsupported operand type(s) for +: 'int' and 'str'\n"
    assert explain_death(text, -9).verdict is Verdict.FAILED


def test_a_compiler_error_is_not_a_usage_error() -> None:
    text = "nvcc: error: no input files\n" + HIT + FRAME + "RuntimeError: Ninja build failed\n"
    assert explain_death(text, 1).message == "the server crashed: RuntimeError: Ninja build failed"
    assert explain_death("nvcc: error: no input files\n", 1).verdict is Verdict.FAILED


def test_a_soft_watchdog_only_warns() -> None:
    text = "[2026-03-04 09:11:08 TP3] watchdog timeout (self.watchdog_timeout=30, self.soft=True)\n"
    assert "hung" not in explain_death(text, -9).message


def test_an_empty_log_is_said_to_be_empty() -> None:
    assert explain_death("", 137).message == (
        "the server ended with exit code 137 and names no reason; its log is empty"
    )


def test_the_death_of_a_part_shows_before_the_main_process_ends() -> None:
    killed = captured("killed-scheduler.log").splitlines()
    crashed = captured("crash-while-serving.log").splitlines()
    healthy = captured("start-cpu-pp2.log").splitlines()
    assert any(map(shows_death, killed))
    assert any(map(shows_death, crashed))
    assert not any(map(shows_death, healthy))


def test_the_last_line_says_something() -> None:
    assert last_line(captured("two-gpus.log")).startswith("Compile with `TORCH_USE_CUDA_DSA`")
    assert last_line("\n\n") == ""
    echo = 'INFO:     127.0.0.1:41580 - "GET /v1/loads HTTP/1.1" 200 OK'
    assert last_line(f"ready\n[2026-03-04 09:11:08] {echo}\n") == "ready"


def test_phases_of_a_captured_start() -> None:
    phases = PhaseTimes(started_s=0.0)
    for stamp_s, line in json.loads(captured("start-h200.json")):
        phases.note(line, stamp_s)
    assert phases.durations_s(ready_s=48.831) == pytest.approx(
        {
            "import": 32.464,
            "init": 0.946,
            "load_weights": 0.154,
            "kv_cache": 0.055,
            "cuda_graph": 14.055,
            "warmup": 1.157,
            "total": 48.831,
        }
    )


def test_phases_of_several_ranks_end_with_the_last_rank() -> None:
    phases = PhaseTimes(started_s=0.0)
    for number, line in enumerate(captured("start-cpu-pp2.log").splitlines()):
        phases.note(line, float(number))
    durations_s = phases.durations_s(ready_s=100.0)
    assert set(durations_s) == {
        *("import", "init", "load_weights", "kv_cache", "cuda_graph", "warmup", "total")
    }
    assert sum(durations_s.values()) == 2 * durations_s["total"]
    lines = captured("start-cpu-pp2.log").splitlines()
    loads = [number for number, line in enumerate(lines) if "Load weight end" in line]
    begins = [number for number, line in enumerate(lines) if "Load weight begin" in line]
    assert durations_s["load_weights"] == loads[-1] - begins[0]


def test_a_phase_without_a_line_counts_to_the_next() -> None:
    phases = PhaseTimes(started_s=10.0)
    phases.note("[2026-11-29 12:39:24 PP0] Load weight end. elapsed=0.05 s", 14.0)
    assert phases.durations_s(ready_s=15.0) == {"load_weights": 4.0, "warmup": 1.0, "total": 5.0}


def test_a_reader_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"an earlier start\n")
    reader = LogReader(path, start_bytes=path.stat().st_size)
    assert reader.read_lines() == []
    with path.open("ab") as log:
        log.write(b"one\ntw")
    assert reader.read_lines() == ["one"]
    with path.open("ab") as log:
        log.write("o\r 50%\r100% ä\n".encode())
    assert reader.read_lines() == ["two", " 50%", "100% ä"]
    assert reader.read_lines() == []
    assert reader.read_tail() == "one\ntwo\n 50%\n100% ä\n"


def test_a_reader_leaves_out_the_echo_of_our_own_requests(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(
        '[2026-03-04 09:11:08] INFO:     127.0.0.1:41580 - "GET /health HTTP/1.1" 503 Service\n'
        'INFO:     127.0.0.1:41580 - "POST /generate HTTP/1.1" 200 OK\n'
        "[2026-03-04 09:11:08] INFO:     Application startup complete.\n"
    )
    reader = LogReader(path, start_bytes=0)
    assert [line[22:] for line in reader.read_lines()] == [
        "INFO:     Application startup complete."
    ]


LOST_PEER = """\
[2026-11-30 01:46:14 PP0] Scheduler hit an exception: Traceback (most recent call last):
  File "sglang/srt/managers/scheduler_pp_mixin.py", line 699, in _pp_commit_comm_work
    p2p_work.work.wait()
RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:416.

[2026-11-30 01:46:14] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
"""
KILLED = "[2026-11-30 01:46:15] Subprocess scheduler_1 (pid=77) crashed with exit code -9.\n"
CAUSE = """\
[2026-11-30 01:46:14 PP1] Scheduler hit an exception: Traceback (most recent call last):
  File "x.py", line 1, in forward
IndexError: index out of range in self
"""


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (LOST_PEER, "a process of the server was killed"),
        (LOST_PEER + KILLED, "Subprocess scheduler_1 (pid=77) crashed with exit code -9"),
        (LOST_PEER + CAUSE, "IndexError: index out of range in self"),
        (CAUSE + LOST_PEER, "IndexError: index out of range in self"),
    ],
)
def test_a_rank_that_dies_of_anothers_loss_is_not_the_cause(log: str, words: str) -> None:
    assert words in explain_death(log, -9).message
