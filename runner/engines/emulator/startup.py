"""The start of an emulated server up to the moment its port opens: SGLang's phases and lines.

Runs before there is an event loop. The first phase began with the process, so this process's own
imports are hidden in it.
"""

from __future__ import annotations

import os
import time

from runner.clock import Clock
from runner.engines.emulator.death import die_at_start, die_together
from runner.engines.emulator.faults.child import leave_child
from runner.engines.emulator.faults.draw import draw
from runner.engines.emulator.faults.kind import FaultKind
from runner.engines.emulator.faults.reasons import capture_reason, start_reason
from runner.engines.emulator.log import ServerLog
from runner.engines.emulator.server_gpus import ServerGpus
from runner.engines.emulator.setup import ServerSetup
from runner.engines.processes import this_process
from runner.machine.shape import memory_used_bytes, refusal, stage_weight_bytes

BYTES_PER_GIB = 1024**3


class Startup:
    """One start. `run` returns when the port may open, or does not return at all."""

    def __init__(self, setup: ServerSetup, clock: Clock, log: ServerLog, gpus: ServerGpus) -> None:
        self._setup = setup
        self._clock = clock
        self._log = log
        self._gpus = gpus
        self._due_s = process_started_s() * clock.scale
        profile = setup.profile
        self._total_bytes = profile.gpu.memory_bytes
        self._weight_bytes = int(stage_weight_bytes(profile, setup.shape))
        self._context_bytes = profile.memory.context_bytes
        self._graph_bytes = profile.memory.graph_size_bytes * len(setup.graph_sizes)
        self._used_bytes = memory_used_bytes(profile, setup.shape)

    def run(self) -> None:
        """Go through all phases, as fast as the clock does."""
        self._import()
        self._init()
        self._load_weights()
        self._allocate_kv_cache()
        self._capture_prefills()
        self._capture_decodes()
        self._finish()

    def _import(self) -> None:
        seconds = self._setup.phases.import_s
        self._wait(seconds / 2)
        if self._setup.shape.pp_size > 1:
            self._log.write("Pipeline parallelism is incompatible with overlap schedule.")
        self._log.write(f"server_args={dict(self._setup.args)}")
        if self._setup.faults.by_kind:
            self._log.write(f"Emulated faults: {self._setup.faults}")
        self._wait(seconds / 2)

    def _init(self) -> None:
        setup, log = self._setup, self._log
        log.write_ranks("Init parallel begin.")
        base, step = setup.whole("base_gpu_id"), setup.whole("gpu_id_step")
        ordinals = [base + rank * step for rank in range(setup.shape.gpus * setup.dp_size)]
        missing = self._gpus.missing(ordinals)
        if missing is not None:
            dp_rank, rank = divmod(missing, setup.shape.gpus)
            pp_rank, tp_rank = divmod(rank, setup.shape.tp_size)
            reason = (
                "torch.AcceleratorError: CUDA error: invalid device ordinal\n"
                "GPU device may be out of range, do you have enough GPUs?"
            )
            die_at_start(log.of(dp_rank), reason, pp_rank, tp_rank)
        self._take_gpus(ordinals)
        self._wait(setup.phases.init_s)
        log.write_ranks(f"Init parallel ends. elapsed={setup.phases.init_s:.2f} s")
        log.write_ranks(f"Memory baseline taken. mem usage={self._gib(self._context_bytes)} GB")
        self._break()

    def _take_gpus(self, ordinals: list[int]) -> None:
        """Appear on the GPUs, and leave there what faults want to outlive this process."""
        faults = self._setup.faults
        self._gpus.take(ordinals)
        held = faults.get(FaultKind.HOLD_MEMORY)
        if held is not None:
            self._gpus.keep_memory(self._clock.wall_duration_s(held.number))
        self._gpus.hold(self._context_bytes)
        child = faults.get(FaultKind.LEAVE_CHILD)
        if child is not None:
            process = leave_child(own_session=child.argument.text == "session")
            held_bytes = int(self._used_bytes) - self._context_bytes
            self._gpus.take_for(process, ordinals, held_bytes)

    def _break(self) -> None:
        """Die or hang, where a fault says so."""
        faults = self._setup.faults
        death = faults.get(FaultKind.DIE_AT_START)
        if death is not None:
            chance = draw(faults.seed, death.text)
            first = int(chance * self._setup.shape.pp_size)
            die_together(self._log, start_reason(death), first)
        if FaultKind.HANG_AT_START in faults:
            while True:
                time.sleep(3600)

    def _is_out_of_memory(self, phase: str) -> bool:
        fault = self._setup.faults.get(FaultKind.OUT_OF_MEMORY)
        if fault is None:
            return False
        # What captures no graphs can only run out of memory before.
        return phase == (fault.argument.text if self._setup.graph_sizes else "load")

    def _load_weights(self) -> None:
        seconds = self._setup.phases.load_weights_s
        self._log.write_ranks(
            f"Load weight begin. avail mem={self._available(self._context_bytes)}"
        )
        self._wait(seconds)
        message = refusal(self._setup.profile, self._setup.shape)
        if message is not None:
            die_at_start(self._log, self._refused(message))
        if self._is_out_of_memory("load"):
            die_at_start(
                self._log, self._out_of_memory(self._weight_bytes, self._weight_bytes // 8)
            )
        self._check_neighbours()
        held = self._context_bytes + self._weight_bytes
        self._gpus.hold(held)
        self._log.write_ranks(
            f"Load weight end. elapsed={seconds:.2f} s, type={self._setup.profile.model.name}, "
            f"avail mem={self._available(held)}, mem usage={self._gib(self._weight_bytes)} GB."
        )

    def _allocate_kv_cache(self) -> None:
        self._wait(self._setup.phases.kv_cache_s)
        held = self._used_bytes - self._graph_bytes
        half = self._gib((held - self._context_bytes - self._weight_bytes) / 2)
        self._gpus.hold(held)
        self._log.write_ranks(
            f"KV Cache is allocated. dtype: torch.bfloat16, #tokens: {self._setup.token_capacity}, "
            f"K size: {half} GB, V size: {half} GB"
        )
        self._log.write_ranks(f"Memory pool end. avail mem={self._available(held)}")

    def _capture_prefills(self) -> None:
        sizes, log = self._setup.prefill_graph_sizes, self._log
        if not sizes:
            log.write_stages(
                "Disable prefill CUDA graph because cuda_graph_config resolved "
                "prefill.backend='disabled' (e.g. via --cuda-graph-backend-prefill=disabled or "
                "auto-disable rules)."
            )
            return
        available = self._available(self._used_bytes - self._graph_bytes)
        log.write_ranks(
            f"Capture target prefill CUDA graph begin. backend={self._setup.prefill_backend}, "
            f"num_tokens={list(sizes)}, avail mem={available}"
        )
        seconds = self._setup.phases.prefill_graphs_s
        self._wait(seconds)
        log.write_ranks(
            f"Capture target prefill CUDA graph end. elapsed={seconds:.2f} s, mem usage=0.00 GB, "
            f"avail mem={available}."
        )

    def _capture_decodes(self) -> None:
        sizes, log = self._setup.graph_sizes, self._log
        seconds = self._setup.phases.decode_graphs_s
        if not sizes:
            log.write_stages("Disable decode CUDA graph because decode.backend='disabled'.")
            return
        held = self._used_bytes - self._graph_bytes
        log.write_ranks(
            "Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, "
            f"avail mem={self._available(held)}"
        )
        self._wait(seconds)
        if self._is_out_of_memory("capture"):
            wanted = self._graph_bytes // len(sizes)
            die_at_start(log, capture_reason(self._out_of_memory(wanted, wanted // 8)))
        self._gpus.hold(self._used_bytes)
        log.write_ranks(
            f"Capture target decode CUDA graph end. bs={list(sizes)}, elapsed={seconds:.2f} s, "
            f"mem usage={self._gib(self._graph_bytes)} GB, "
            f"avail mem={self._available(self._used_bytes)}."
        )

    def _finish(self) -> None:
        setup, phases = self._setup, self._setup.phases
        memory = "cpu" if setup.graph_label == "cpu" else "gpu"
        self._log.write_stages(
            f"max_total_num_tokens={setup.token_capacity}, "
            f"chunked_prefill_size={setup.args['chunked_prefill_size']}, "
            f"max_prefill_tokens={setup.args['max_prefill_tokens']}, "
            f"max_running_requests={setup.resolved.max_running_requests}, "
            f"context_len={setup.context_len}, "
            f"available_{memory}_mem={self._available(self._used_bytes)}"
        )
        spent_s = phases.total_s - phases.import_s - phases.warmup_s
        self._log.write(
            f"Engine startup timings (s): load_weight={phases.load_weights_s:.2f}, "
            f"kv_cache_allocation={phases.kv_cache_s:.2f}, scheduler_e2e={spent_s:.2f}, "
            f"cuda_graph={{prefill={phases.prefill_graphs_s:.2f}, "
            f"decode={phases.decode_graphs_s:.2f}}}, "
            f"tokenizer_e2e={phases.import_s + spent_s:.2f}"
        )

    def _check_neighbours(self) -> None:
        """Other processes may hold the memory that this server needs."""
        free_bytes = self._gpus.free_bytes
        if free_bytes is not None and free_bytes < self._used_bytes:
            die_at_start(self._log, self._out_of_memory(self._used_bytes, free_bytes))

    def _refused(self, message: str) -> str:
        setup = self._setup
        if not message.startswith("out of memory"):
            return f"ValueError: Not supported by this model on this machine: {message}"
        static_bytes = setup.resolved.mem_fraction_static * self._total_bytes
        if self._context_bytes + self._weight_bytes > self._total_bytes:
            free_bytes = self._total_bytes - self._context_bytes
            return self._out_of_memory(self._weight_bytes, free_bytes)
        if static_bytes <= self._weight_bytes:
            return (
                "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
                f"({message})"
            )
        free_bytes = self._total_bytes - self._context_bytes - self._weight_bytes
        return (
            f"{self._out_of_memory(self._used_bytes - self._weight_bytes, free_bytes)} ({message})"
        )

    def _out_of_memory(self, wanted_bytes: int, free_bytes: int) -> str:
        return (
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate "
            f"{wanted_bytes / BYTES_PER_GIB:.2f} GiB. GPU 0 has a total capacity of "
            f"{self._total_bytes / BYTES_PER_GIB:.2f} GiB of which "
            f"{max(0, free_bytes) / BYTES_PER_GIB:.2f} GiB is free."
        )

    def _available(self, held_bytes: float) -> str:
        return f"{self._gib(self._total_bytes - held_bytes)} GB"

    def _gib(self, count: float) -> str:
        return f"{count / BYTES_PER_GIB:.2f}"

    def _wait(self, seconds: float) -> None:
        self._due_s += seconds
        self._clock.sleep(self._due_s - self._clock.now_s())
        # Imports that take longer than their phase delay the others, they do not shorten them.
        self._due_s = max(self._due_s, self._clock.now_s())


def process_started_s() -> float:
    """The monotonic second at which this process began."""
    ticks = this_process().start_time
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_s
