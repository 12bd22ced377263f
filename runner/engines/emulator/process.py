"""The emulated server as a process on its event loop: port, warm-up, signals, end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import traceback
from typing import Any

from aiohttp import web

from runner.clock import Clock
from runner.engines.emulator.death import kill_self, write_exception
from runner.engines.emulator.faults.heat import heat_up
from runner.engines.emulator.faults.kind import FaultKind
from runner.engines.emulator.faults.ports import check_port
from runner.engines.emulator.http import make_app
from runner.engines.emulator.log import ServerLog
from runner.engines.emulator.server import CRASH_DELAY_S, EmulatedServer, Status
from runner.engines.emulator.server_gpus import ServerGpus
from runner.engines.emulator.serving import Demand
from runner.engines.emulator.setup import ServerSetup
from runner.pipeline import Pipeline

DRAIN_POLL_S = 5.0
RELEASE_S = 15.0  # SGLang's pipeline loop does not hear of a shutdown; its parent waits this long
INTERRUPT_S = 2.0
WARM_UP = Demand(prompt_tokens=4, output_tokens=8)


class ServerProcess:
    """Everything after the load phase, until the process ends."""

    def __init__(self, setup: ServerSetup, clock: Clock, log: ServerLog, gpus: ServerGpus) -> None:
        self._setup = setup
        self._clock = clock
        self._log = log
        self._gpus = gpus
        self._asked = asyncio.Event()
        self._signal = signal.SIGTERM

    async def run(self) -> int:
        """Serve until a signal ends it; returns the exit code."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        loop.add_signal_handler(signal.SIGTERM, self._on_signal, signal.SIGTERM)
        loop.add_signal_handler(signal.SIGINT, self._on_signal, signal.SIGINT)
        loop.add_signal_handler(signal.SIGQUIT, self._on_sigquit)
        setup, ready_s = self._setup, self._clock.now_s()
        pipeline = Pipeline(setup.profile, setup.shape, setup.random_seed, ready_s)
        server = EmulatedServer(setup, pipeline, self._clock, self._log, self._crash)
        server.batches.start(ready_s)
        runner = web.AppRunner(
            make_app(server), access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        if not await self._bind(runner):
            return 1
        heat = setup.faults.get(FaultKind.HEAT)
        tasks = (
            asyncio.create_task(self._gpus.publish(server.serving, self._clock, ready_s)),
            asyncio.create_task(heat_up(heat, server.serving, self._clock, self._gpus)),
            asyncio.create_task(self._warm_up(server)),
        )
        gc.collect()
        gc.freeze()  # what is there now stays; collections look at requests only
        await self._asked.wait()
        await self._drain(server)
        await self._end(runner, server, tasks)
        return 0

    async def _bind(self, runner: web.AppRunner) -> bool:
        host, port = str(self._setup.args["host"]), self._setup.whole("port")
        log = self._log
        log.write(f"INFO:     Started server process [{os.getpid()}]")
        log.write("INFO:     Waiting for application startup.")
        log.write("INFO:     Application startup complete.")
        try:
            taken = self._setup.faults.get(FaultKind.PORT_TAKEN)
            check_port(taken, self._setup.attempt, host, port)
            await web.TCPSite(runner, host, port).start()
        except OSError as err:
            log.write(f"ERROR:    {err}")
            await runner.cleanup()
            return False
        log.write(f"INFO:     Uvicorn running on http://{host}:{port} (Press CTRL+C to quit)")
        return True

    async def _warm_up(self, server: EmulatedServer) -> None:
        clock = self._clock
        if FaultKind.HANG_IN_WARM_UP in self._setup.faults:
            self._log.silence()
            return
        end_s = clock.now_s() + self._setup.phases.warmup_s
        if not self._setup.args["skip_server_warmup"]:
            await server.probe(WARM_UP)
            await asyncio.sleep(max(0.0, clock.wall_duration_s(end_s - clock.now_s())))
        if server.status is Status.STARTING:
            server.status = Status.UP
            self._log.write("The server is fired up and ready to roll!")

    def _on_signal(self, number: signal.Signals) -> None:
        self._signal = number
        self._asked.set()

    def _on_sigquit(self) -> None:
        self._log.write("Received sigquit from a child process. It usually means the child failed.")
        kill_self(self._log)

    async def _drain(self, server: EmulatedServer) -> None:
        """SIGTERM waits for every request, without limit; SIGINT does not."""
        clock, log = self._clock, self._log
        server.status = Status.STOPPING
        if self._signal is signal.SIGINT:
            await asyncio.sleep(clock.wall_duration_s(INTERRUPT_S))
            return
        log.write(
            "SIGTERM received. signum=None frame=None. Draining requests and shutting down..."
        )
        remaining: list[str] | None = None
        while remaining is None or remaining:
            await asyncio.sleep(clock.wall_duration_s(DRAIN_POLL_S))
            remaining = server.request_ids
            log.write(
                f"Gracefully exiting... Remaining number of requests {len(remaining)}. "
                f"Remaining requests remaining_rids={remaining}."
            )
        if self._setup.shape.pp_size > 1:
            await asyncio.sleep(clock.wall_duration_s(RELEASE_S))
            ranks = [f"scheduler{log.ranks.prefix(rank, 0)}" for rank in range(log.ranks.pp_size)]
            log.write(
                f"Schedulers still alive {RELEASE_S:.0f}s after ShutdownReq, "
                f"killing them before they released: {ranks}"
            )

    async def _end(
        self, runner: web.AppRunner, server: EmulatedServer, tasks: tuple[asyncio.Task[None], ...]
    ) -> None:
        log = self._log
        log.write("INFO:     Shutting down")
        server.serving.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await runner.cleanup()
        self._gpus.leave()
        log.write("INFO:     Application shutdown complete.")
        pid = os.getpid()
        log.write(f"INFO:     Finished server process [{pid}]")
        log.write(f"kill_process_tree called: parent_pid={pid}, include_parent=False, pid={pid}")

    def _crash(self, reason: str) -> None:
        log = self._log
        write_exception(log, reason)
        log.write("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        log.write(
            f"Sleeping {CRASH_DELAY_S:.0f} seconds before crash diagnostics to let GPU activity "
            "settle."
        )
        delay_s = self._clock.wall_duration_s(CRASH_DELAY_S)
        asyncio.get_running_loop().call_later(delay_s, kill_self, log)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A mistake of ours in a callback must not leave a server that lives and serves nobody."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if "handle" in context and isinstance(error, Exception):
            reason = "".join(traceback.format_exception_only(error)).strip()
            write_exception(self._log, reason)
            kill_self(self._log)
