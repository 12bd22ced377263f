"""The command line: parse, call the command, turn errors into a message and an exit code."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from runner.errors import ConfigError, Interrupted, RunnerError

HIGHEST_PORT = 65535
STDERR_FILENO = 2
EXIT_STOPPED, EXIT_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def fill_descriptors() -> None:
    """Open what the caller closed of 0, 1 and 2, or the next files get these numbers."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR_FILENO:
        os.set_inheritable(number, True)  # noqa: FBT003 - the only form
    os.close(number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0 done, 1 stopped, 2 wrong input, 130 cut)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["emulate"]:
        words = ["emulate", "--", *[word for word in words[1:] if word != "--"]]
    args = parser().parse_args(words)
    fill_descriptors()
    if sys.stdout is None:  # closed by the caller
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for good
    try:
        command = getattr(importlib.import_module("runner.commands"), args.run)
        code = int(command(args))
        sys.stdout.flush()
        return code
    except ConfigError as error:
        print(f"runner: {error}", file=sys.stderr)
        return EXIT_INPUT
    except Interrupted as error:
        print(f"runner: {error}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_STOPPED
    except KeyboardInterrupt:
        print("\nrunner: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except RunnerError as error:
        print(f"runner: {error}", file=sys.stderr)
        return EXIT_STOPPED
    except OSError as error:  # our output cannot be written, or a folder cannot be read
        print(f"runner: {error}", file=sys.stderr)
        return EXIT_STOPPED


def parser() -> argparse.ArgumentParser:
    """Every command and option."""
    top = argparse.ArgumentParser(
        prog="runner", description="Finds the fastest SGLang configuration of a machine."
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--home",
        type=Path,
        default=Path(os.environ.get("RUNNER_HOME") or "."),
        help="folder that holds studies/ (default: RUNNER_HOME, else the current folder)",
    )
    shared.add_argument("--json", action="store_true", help="one JSON document on stdout")
    running = argparse.ArgumentParser(add_help=False)
    running.add_argument("--executor", choices=["ray", "inline"], help="default: ray")
    running.add_argument("--address", help="join this Ray cluster instead of starting one")
    setting = argparse.ArgumentParser(add_help=False)
    setting.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="A.B=VALUE",
        help="override a field of the study; may be given again",
    )
    add_tune(commands, [shared, running, setting])
    add_forecast(commands, [shared, setting])
    add_calibrate(commands, [shared])
    add_reading(commands, [shared])
    add_load(commands)
    emulate = commands.add_parser(
        "emulate", help="run an emulated SGLang server by hand: runner emulate -- FLAGS"
    )
    emulate.add_argument("flags", nargs="*", metavar="FLAGS", help="-- --help lists them")
    emulate.set_defaults(run="run_emulate")
    return top


def port_number(text: str) -> int:
    """A port as argparse wants it."""
    port = int(text)
    if not 1 <= port <= HIGHEST_PORT:
        raise ValueError(text)
    return port


def count(text: str) -> int:
    """A whole number from 1 on, as argparse wants it."""
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, 1 or more")
    return int(text)


def add_tune(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    parents: list[argparse.ArgumentParser],
) -> None:
    """The commands that measure."""
    tune = commands.add_parser("tune", parents=parents, help="start a study, or continue it")
    tune.add_argument("study", type=Path, metavar="STUDY.yaml")
    tune.set_defaults(run="run_tune")
    resume = commands.add_parser("resume", parents=parents, help="continue a study by its name")
    resume.add_argument("name")
    resume.set_defaults(run="run_resume")


def add_forecast(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    parents: list[argparse.ArgumentParser],
) -> None:
    """The commands that compute and launch nothing."""
    plan = commands.add_parser(
        "plan", parents=parents, help="what a study would do: no launch, needs a hardware profile"
    )
    plan.add_argument("study", type=Path, metavar="STUDY.yaml")
    plan.add_argument(
        "--top", type=count, default=10, metavar="N", help="settings to rank (default: 10)"
    )
    plan.set_defaults(run="run_plan")
    predict = commands.add_parser(
        "predict", parents=parents, help="the model's answer for one setting"
    )
    predict.add_argument("study", type=Path, metavar="STUDY.yaml")
    predict.add_argument(
        "--params",
        required=True,
        metavar="NAME=VALUE,...",
        help="the setting; what is left out takes SGLang's default",
    )
    predict.add_argument(
        "--seeds", type=count, default=5, metavar="N", help="simulate under N seeds (default: 5)"
    )
    predict.set_defaults(run="run_predict")


def add_calibrate(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    parents: list[argparse.ArgumentParser],
) -> None:
    """The command that makes the model fit the machine."""
    calibrate = commands.add_parser(
        "calibrate",
        parents=parents,
        help="refit the hardware profile to what studies measured",
        description="Refit a hardware profile to the trials of a study, or of several of the same "
        "model and machine, say how far the model was and is off, and which numbers these trials "
        "cannot tell. Nothing is launched.",
    )
    calibrate.add_argument("name", nargs="+")
    calibrate.add_argument(
        "--profile", metavar="P", help="the profile to start from (default: the study's)"
    )
    calibrate.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the profile here, too (always: calibration/profile.yaml in the folder of "
        "the first study)",
    )
    calibrate.set_defaults(run="run_calibrate")


def add_load(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The load generator alone."""
    load = commands.add_parser(
        "load",
        help="load any running server and show its throughput and latencies",
        description="Load a running server that speaks SGLang's or an OpenAI-like interface, and "
        "show throughput and latencies: over all requests, and over the steady window alone.",
    )
    load.add_argument("url", metavar="URL", help="http://HOST:PORT or https://HOST:PORT")
    load.add_argument(
        "--api",
        choices=["generate", "completions", "chat"],
        default="generate",
        help="the interface: /generate (default), /v1/completions or /v1/chat/completions",
    )
    load.add_argument("--model", metavar="NAME", help="default: what the server says it serves")
    add_requests(load)
    judged = load.add_argument_group("what is asked of the server")
    judged.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="METRIC=SECONDS",
        help="a latency limit such as ttft_s.p99=2.0, of ttft_s, tpot_s, itl_s or e2e_s, as mean, "
        "p50, p90 or p99; may be given again; a missed one makes the exit code 1",
    )
    judged.add_argument(
        "--timeout",
        default="600",
        metavar="S",
        help="a request fails when no byte came for S seconds (default: 600)",
    )
    load.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="the environment variable that holds the server's key (sent as a bearer token)",
    )
    load.add_argument("--json", action="store_true", help="one JSON document on stdout")
    load.add_argument("--home", help=argparse.SUPPRESS)  # every command takes it
    load.set_defaults(run="run_load")


def add_requests(load: argparse.ArgumentParser) -> None:
    """How a load sends its requests, and which."""
    sending = load.add_argument_group("how requests are sent")
    how = sending.add_mutually_exclusive_group()
    how.add_argument(
        "--concurrency",
        type=count,
        metavar="C",
        help="keep C requests in flight (a closed loop; default: 8)",
    )
    how.add_argument(
        "--rate", metavar="R", help="send R requests per second, whatever the server does"
    )
    how.add_argument("--burst", action="store_true", help="send all requests at once")
    sending.add_argument(
        "--arrivals",
        choices=["poisson", "constant"],
        help="with --rate: at random (poisson, default) or evenly (constant)",
    )
    what = load.add_argument_group("what is sent")
    what.add_argument(
        "--requests",
        type=count,
        metavar="N",
        help="how many requests (default: 10 per stream; with --rate those of a minute)",
    )
    for name in ("input", "output"):
        what.add_argument(
            f"--{name}-tokens",
            default="128",
            metavar="TOKENS",
            help="a number (default: 128), LOW-HIGH for evenly between them, or a JSON lines file "
            "of recorded token counts",
        )
    what.add_argument(
        "--shared-prefix",
        default="0",
        metavar="SHARE",
        help="the share of each prompt that all prompts have in common (0 to 1, default: 0)",
    )
    what.add_argument(
        "--seed",
        type=int,
        help="repeats the prompts and lengths of a load; by default each load has its own, so that "
        "a server has none of them in its cache",
    )
    what.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help="requests sent before, that do not count (default: one per stream, at most 8 without "
        "streams; 0: none)",
    )


def add_reading(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    parents: list[argparse.ArgumentParser],
) -> None:
    """The commands that read, show and clean."""
    status = commands.add_parser("status", parents=parents, help="how far a study is")
    status.add_argument("name")
    status.set_defaults(run="run_status")
    report = commands.add_parser("report", parents=parents, help="the table: what won, by how much")
    report.add_argument("name")
    report.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")
    report.set_defaults(run="run_report")
    ui = commands.add_parser("ui", parents=parents, help="browse the trials in MLflow")
    ui.add_argument("name", nargs="?")
    ui.add_argument(
        "--port", type=port_number, help="1 to 65535; default: 5000, or the next free one"
    )
    ui.set_defaults(run="run_ui")
    clean = commands.add_parser("clean", parents=parents, help="end servers that a dead run left")
    clean.set_defaults(run="run_clean")


if __name__ == "__main__":
    sys.exit(main())
