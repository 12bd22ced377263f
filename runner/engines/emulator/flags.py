"""The command line of the emulated server: SGLang's flags, and a few of its own."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.engines.emulator.faults import Fault, FaultKind
from runner.engines.emulator.flag_table import (
    ALIASES,
    CHOICES,
    INTEGERS,
    LISTS,
    REALS,
    SWITCHES,
    TEXTS,
    ArgValue,
)

DEFAULT_PROFILE = "cpu-blocking-pp2"
OWN = ("profile", "time_scale", "gpu_folder", "fault")
FAULT_HELP = """break on purpose: die-at-start (a traceback, then SIGKILL), hang-at-start (never
ready), die-after-requests:N (a traceback and SIGKILL once N requests were answered),
refuse-flag[:FLAG] (as if this SGLang did not know FLAG; default: the first one given)"""


@dataclass(frozen=True, slots=True)
class Flags:
    """A parsed command line. `server_args` are SGLang's, by its names, defaults filled in."""

    profile: str
    time_scale: float
    gpu_folder: Path | None
    fault: Fault | None
    server_args: Mapping[str, ArgValue]
    command_line: str


def parse_flags(argv: Sequence[str]) -> Flags:
    """Read the command line; like SGLang, a wrong one ends the process with exit code 2.

    Abbreviated flags are taken as long as they are unambiguous; that is SGLang's way too.
    """
    parser = _parser()
    parsed = vars(parser.parse_args(argv))
    own = {name: parsed.pop(name) for name in OWN}
    fault: Fault | None = own["fault"]
    if fault is not None and fault.kind is FaultKind.REFUSE_FLAG:
        _refuse(parser, argv, fault.argument)
    return Flags(
        profile=own["profile"],
        time_scale=own["time_scale"],
        gpu_folder=own["gpu_folder"],
        fault=fault,
        server_args=parsed,
        command_line=shlex.join(argv),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang serve",
        description="An emulated SGLang server: SGLang's flags, HTTP, logs and deaths, "
        "with the timing of a hardware profile. No GPU and no model are needed.",
    )
    own = parser.add_argument_group("emulation")
    own.add_argument("--profile", default=DEFAULT_PROFILE, help="hardware profile, name or file")
    own.add_argument("--time-scale", type=_scale, default=1.0, help="run this many times faster")
    own.add_argument("--gpu-folder", type=Path, help="where the emulated GPUs are; default none")
    own.add_argument("--fault", type=_fault, metavar="KIND[:ARG]", help=FAULT_HELP)
    sglang = parser.add_argument_group("SGLang")
    _add_values(sglang)
    for name in LISTS:
        sglang.add_argument(*_spellings(name), type=int, nargs="+", dest=name)
    for name in SWITCHES:
        sglang.add_argument(*_spellings(name), action="store_true", dest=name)
    return parser


def _add_values(group: argparse._ArgumentGroup) -> None:
    for name, whole in INTEGERS.items():
        group.add_argument(*_spellings(name), type=int, default=whole, dest=name)
    for name, real in REALS.items():
        group.add_argument(*_spellings(name), type=float, default=real, dest=name)
    for name, text in TEXTS.items():
        group.add_argument(*_spellings(name), type=str, default=text, dest=name)
    for name, (choice, choices) in CHOICES.items():
        group.add_argument(*_spellings(name), type=str, choices=choices, default=choice, dest=name)


def _spellings(name: str) -> tuple[str, ...]:
    return ("--" + name.replace("_", "-"), *ALIASES.get(name, ()))


def _scale(text: str) -> float:
    scale = float(text)
    if not 0 < scale < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, found {text}")
    return scale


def _fault(text: str) -> Fault:
    try:
        return Fault.parse(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(str(err)) from err


def _refuse(parser: argparse.ArgumentParser, argv: Sequence[str], flag: str | None) -> None:
    own = {"--" + name.replace("_", "-") for name in OWN}
    given = [word.partition("=")[0] for word in argv if word.startswith("--")]
    refused = flag or next((name for name in given if name not in own), None)
    if refused in given:
        parser.error(f"unrecognized arguments: {refused}")
