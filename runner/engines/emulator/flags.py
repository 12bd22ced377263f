"""The command line of the emulated server: SGLang's flags, and a few of its own."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.engines.emulator.faults.active import ActiveFaults
from runner.engines.emulator.faults.fault import Fault, parse_faults
from runner.engines.emulator.faults.identity import LaunchIdentity
from runner.engines.emulator.faults.kind import FaultKind, help_text
from runner.engines.emulator.flag_table import (
    ALIASES,
    ALL_NAMES,
    CHOICES,
    INTEGERS,
    LISTS,
    REALS,
    SWITCHES,
    TEXTS,
    VERSION,
    ArgValue,
)
from runner.engines.sglang.environment import ServerEnvironment, parse_help
from runner.errors import ConfigError
from runner.trial import ParamValue

DEFAULT_PROFILE = "cpu-blocking-pp2"
OWN = ("profile", "time_scale", "gpu_folder", "fault", "fault_seed")
GRAPHS = ("cuda_graph", "cuda_graph_max_bs")
"""Settings with neutral names, which conditions may speak of besides SGLang's flags."""


@dataclass(frozen=True, slots=True)
class Flags:
    """A parsed command line. `server_args` are SGLang's, by its names, defaults filled in.

    `identity` tells launches apart, `faults` are those that were asked for.
    """

    profile: str
    time_scale: float
    gpu_folder: Path | None
    faults: tuple[Fault, ...]
    fault_seed: int
    identity: LaunchIdentity
    server_args: Mapping[str, ArgValue]
    command_line: str


def parse_flags(argv: Sequence[str]) -> Flags:
    """Read the command line; like SGLang, a wrong one ends the process with exit code 2.

    Abbreviated flags are taken as long as they are unambiguous; that is SGLang's way too.
    """
    parser = _parser()
    parsed = vars(parser.parse_args(argv))
    own = {name: parsed.pop(name) for name in OWN}
    flags = Flags(
        profile=own["profile"],
        time_scale=own["time_scale"],
        gpu_folder=own["gpu_folder"],
        faults=_faults(parser, own["fault"]),
        fault_seed=own["fault_seed"],
        identity=LaunchIdentity.of({**parsed, "profile": own["profile"]}, os.environ),
        server_args=parsed,
        command_line=shlex.join(argv),
    )
    _refuse(parser, argv, flags)
    return flags


def emulated_environment() -> ServerEnvironment:
    """What the emulated server offers, read as a real one's is; its own program is this one's."""
    return ServerEnvironment(VERSION, parse_help(_parser().format_help()), "the emulated server")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang serve",
        description="An emulated SGLang server: SGLang's flags, HTTP, logs and deaths, "
        "with the timing of a hardware profile. No GPU and no model are needed.",
        epilog=help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own = parser.add_argument_group("emulation")
    own.add_argument(
        "--profile",
        default=DEFAULT_PROFILE,
        help="hardware profile, name or file (default: %(default)s)",
    )
    own.add_argument(
        "--time-scale", type=_scale, default=1.0, help="run this many times faster (default: 1)"
    )
    own.add_argument("--gpu-folder", type=Path, help="where the emulated GPUs are; default none")
    own.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND[:ARG][@OPTION]...",
        help="break on purpose, see below; may be repeated",
    )
    own.add_argument("--fault-seed", type=int, default=0, help="what rates are drawn from")
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


def read_faults(text: str) -> tuple[Fault, ...]:
    """The faults of one text; raises ValueError with a message for the user."""
    return parse_faults(text, (*ALL_NAMES, *GRAPHS))


def _faults(parser: argparse.ArgumentParser, texts: Sequence[str]) -> tuple[Fault, ...]:
    """The faults asked for; a wrong one ends the program without SGLang's pages of usage."""
    try:
        return tuple(fault for text in texts for fault in read_faults(text))
    except ValueError as err:
        parser.exit(2, f"{parser.prog}: error: argument --fault: {err}\n")


def setting_values(args: Mapping[str, ArgValue], **resolved: ParamValue) -> dict[str, ParamValue]:
    """The values that a fault's condition sees; what has no value is not among them."""
    given = {name: value for name, value in args.items() if isinstance(value, ParamValue)}
    return {**given, **resolved}


def _refuse(parser: argparse.ArgumentParser, argv: Sequence[str], flags: Flags) -> None:
    """Refuse a flag as argparse does, where a fault says so."""
    refusals = [fault for fault in flags.faults if fault.kind is FaultKind.REFUSE_FLAG]
    values = setting_values(flags.server_args)
    try:
        active = ActiveFaults.choose(refusals, flags.fault_seed, flags.identity.words, values)
    except ConfigError as err:
        parser.error(str(err))
    fault = active.get(FaultKind.REFUSE_FLAG)
    if fault is None:
        return
    flag = fault.argument.text
    own = {"--" + name.replace("_", "-") for name in OWN}
    given = [word.partition("=")[0] for word in argv if word.startswith("--")]
    refused = flag or next((name for name in given if name not in own), None)
    if refused in given:
        parser.error(f"unrecognized arguments: {refused}")
