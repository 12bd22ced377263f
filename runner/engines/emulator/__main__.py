"""An emulated SGLang server: `python -m runner.engines.emulator [own flags] [SGLang's flags]`.

It speaks SGLang's HTTP, writes its log lines and dies its deaths, while a pipeline model says how
long everything takes on the hardware of a profile. It is one process where SGLang has several
(HTTP and tokenizer, one scheduler per GPU, detokenizer): signals, exit codes and the log's ranks
are SGLang's, the process tree is not.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from runner.clock import Clock
from runner.engines.emulator.flags import Flags, parse_flags
from runner.errors import ConfigError, StudyError
from runner.machine.hardware import Profile

EXIT_REFUSED = 1
EXIT_USAGE = 2
_TRACEBACK = """\
Traceback (most recent call last):
  File "sglang/srt/server_args.py", line 1, in check_server_args"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one server; returns the exit code, unless the server ends by a signal of its own."""
    flags = parse_flags(sys.argv[1:] if argv is None else argv)
    from runner.machine.profile import load_profile

    try:
        profile = load_profile(flags.profile)
        return _serve(flags, profile)
    except ConfigError as err:
        print(err, file=sys.stderr)
        return EXIT_USAGE
    except StudyError as err:
        print(err, file=sys.stderr)
        return EXIT_REFUSED


def _serve(flags: Flags, profile: Profile) -> int:
    # The web server's imports take most of a second: not before the command line is known to hold.
    import uvloop

    from runner.engines.emulator.gpu import create_machine
    from runner.engines.emulator.log import Ranks, ServerLog
    from runner.engines.emulator.process import ServerProcess
    from runner.engines.emulator.server_gpus import ServerGpus
    from runner.engines.emulator.setup import set_up
    from runner.engines.emulator.startup import Startup

    try:
        setup = set_up(flags, profile)
    except ValueError as err:
        print(f"{_TRACEBACK}\nValueError: {err}", file=sys.stderr)
        return EXIT_REFUSED
    if flags.gpu_folder is not None:
        create_machine(flags.gpu_folder, profile)
    clock = Clock(flags.time_scale)
    shape = setup.shape
    log = ServerLog(Ranks(shape.pp_size, shape.tp_size, shape.ep_size, setup.dp_size))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = ServerGpus(flags.gpu_folder, visible, profile.gpus)
    Startup(setup, clock, log, gpus).run()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(ServerProcess(setup, clock, log, gpus).run())


if __name__ == "__main__":
    sys.exit(main())
