"""Simulated servers: the pipeline model in virtual time, in this process.

Exact: what a phase of load gives depends on the settings and the plan alone, not on the launch it
runs on nor on what ran before. So every phase gets fresh pipelines, seeds of its own, and a place
of its own on the launch's clock, at which it starts however long the phases before it took.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from runner.engines.observation import decode_log_interval
from runner.engines.virtual_batches import VirtualBatches
from runner.engines.virtual_load import Engine, VirtualLoad
from runner.engines.virtual_power import PERIOD_S, MeteredGpus, VirtualMeter
from runner.errors import ConfigError, Infeasible
from runner.launch import CAP, MAX_RUNNING, as_int, live_cap
from runner.machine.front import Front
from runner.machine.hardware import GpuHardware
from runner.machine.profile import load_profile
from runner.machine.shape import highest_live_cap, memory_used_bytes
from runner.machine.start import start_phases
from runner.measure.evidence import near
from runner.measure.idle import IdleGpu
from runner.measure.power import GpuIdentity
from runner.measure.restarts import MOST_LOADS
from runner.measure.window import longest_load_s
from runner.pipeline import (
    Pipeline,
    Profile,
    ServerShape,
    refusal,
    resolve,
    shape_of,
)
from runner.settings import StudySettings
from runner.trial import (
    BatchSample,
    GreedyOutput,
    LaunchSpec,
    LoadPlan,
    LoadRun,
    Params,
    PowerSample,
)

LEAD_S = 2 * PERIOD_S  # idle time before and after a load, so that samples enclose it


class SimulatedServers:
    """The servers of one launch; implements trial.RunningServers.

    `make_pipeline` makes each server's pipeline, for those who want to watch them.
    """

    def __init__(
        self,
        settings: StudySettings,
        launch: LaunchSpec,
        make_pipeline: Callable[[Profile, ServerShape, int, float], Pipeline] = Pipeline,
    ) -> None:
        if settings.engine.profile is None:
            raise ConfigError("engine.profile: missing; the simulated engine needs a profile")
        self._profile = load_profile(settings.engine.profile)
        self._make_pipeline = make_pipeline
        self._args = launch.server_args
        self._shape = shape_of(launch.server_args)
        self._dp_size = as_int(launch.server_args.get("dp_size", 1))
        self._replicas = launch.replicas
        self._check(settings, launch)
        self.resolved = resolve(self._profile, self._shape)
        self._cap = self.resolved.pp_max_micro_batch_size
        self.phase_s: Mapping[str, float] = start_phases(self._profile, self._shape).by_name
        self._gpus = MeteredGpus(
            self._profile.gpu,
            tuple(gpu_uuid(gpu) for gpu in range(launch.replicas * launch.gpus_per_replica)),
            memory_used_bytes(self._profile, self._shape),
        )
        self._now_s = 0.0
        self._samples: tuple[PowerSample, ...] = ()
        self._batches: tuple[BatchSample, ...] = ()

    def now_s(self) -> float:
        """The launch's virtual clock."""
        return self._now_s

    def server_info(self) -> Mapping[str, object]:
        """What /server_info of a real server would say, as far as it is modelled."""
        return {
            "engine": "simulated",
            "profile": self._profile.name,
            "model": self._profile.model.name,
            **self._resolved_params(),
        }

    def set_live(self, live: Params) -> Params:
        """Set the cap, or go back to the launch's own when it is not given."""
        unknown = sorted(set(live) - {CAP, MAX_RUNNING})
        if unknown:
            raise Infeasible(f"{', '.join(unknown)} cannot be changed on running servers")
        cap = live_cap(live, self.resolved.pp_max_micro_batch_size)
        limit = highest_live_cap(self.resolved, self._shape)
        if CAP in live and not 1 <= cap <= limit:
            raise Infeasible(
                f"{CAP} {cap} is out of the valid range [1, {limit}] "
                "(max_running_requests // pp_size)"
            )
        self._cap = cap
        return self._resolved_params()

    def greedy_outputs(self) -> tuple[tuple[GreedyOutput, ...], ...]:
        """Simulated servers have no tokens to tell."""
        return ()

    def run_load(self, plan: LoadPlan) -> LoadRun:
        """Drive one phase of load, to its end, on fresh pipelines."""
        origin_s = place_on_clock(plan)
        engines = [self._engine(plan, place, origin_s) for place in range(self._engine_count)]
        # Counters never fall from one phase to the next: before it, the most is assumed.
        base_j = self._profile.gpu.power_limit_w * origin_s
        by_gpu = sorted(engines, key=lambda engine: engine.replica)
        meter = VirtualMeter(self._gpus, [e.pipeline for e in by_gpu], origin_s, base_j)
        has_cache = not self._args.get("disable_radix_cache", False)
        load = VirtualLoad(
            plan, engines, origin_s + LEAD_S, meter.advance, has_prefix_cache=has_cache
        )
        run = load.run()
        self._now_s = max(run.window_end_s, load.ended_s) + LEAD_S
        meter.advance(self._now_s)
        self._samples = tuple(meter.samples)
        told = [sample for engine in engines for sample in engine.batches.samples]
        self._batches = tuple(sorted(told, key=lambda sample: sample.time_s))
        return run

    def read_power(self, start_s: float, end_s: float) -> tuple[PowerSample, ...]:
        """Samples of the last load around a span of it, one beyond each border."""
        return tuple(
            sample
            for sample in self._samples
            if start_s - PERIOD_S <= sample.time_s <= end_s + PERIOD_S
        )

    def read_batches(self, start_s: float, end_s: float) -> tuple[BatchSample, ...]:
        """What the pipelines did during the last load around a span of it."""
        return near(self._batches, start_s, end_s)

    def check_alive(self) -> None:
        """Simulated servers do not die."""

    @property
    def _engine_count(self) -> int:
        return self._replicas * self._dp_size

    def _engine(self, plan: LoadPlan, place: int, origin_s: float) -> Engine:
        """Engine `place`; consecutive ones are on consecutive replicas."""
        seed = seed_of(plan, place)
        pipeline = self._make_pipeline(self._profile, self._shape, seed, origin_s)
        pipeline.set_cap(self._cap)
        dp_rank, replica = divmod(place, self._replicas)
        interval = decode_log_interval(self._args)
        batches = VirtualBatches(replica, dp_rank, interval, self.resolved.max_total_tokens)
        # Phases have servers of their own here: each meets its front anywhere between two stops.
        front = Front(self._profile.host, random.Random(seed).random())
        return Engine(pipeline, replica, batches, front)

    def _resolved_params(self) -> Params:
        shape, resolved = self._shape, self.resolved
        return {
            **self._args,
            "tp_size": shape.tp_size,
            "pp_size": shape.pp_size,
            "dp_size": self._dp_size,
            "ep_size": shape.ep_size,
            "pp_async_batch_depth": shape.pp_async_batch_depth,
            CAP: self._cap,
            "max_running_requests": resolved.max_running_requests,
            "max_total_tokens": resolved.max_total_tokens,
            "chunked_prefill_size": resolved.chunked_prefill_size,
            "mem_fraction_static": resolved.mem_fraction_static,
            "attention_backend": resolved.attention_backend,
            "cuda_graph": shape.cuda_graph,
            "cuda_graph_max_bs": resolved.cuda_graph_max_bs,
        }

    def _check(self, settings: StudySettings, launch: LaunchSpec) -> None:
        reason = refusal(self._profile, self._shape)
        if reason is not None:
            raise Infeasible(reason)
        wanted = launch.replicas * launch.gpus_per_replica
        found = self._profile.gpus * settings.hardware.nodes
        if wanted > found:
            raise Infeasible(
                f"{launch.replicas} servers need {wanted} GPUs, {self._profile.name} has {found}; "
                f"set hardware.gpus to {self._profile.gpus}"
            )


def gpu_uuid(index: int) -> str:
    """The name of a simulated GPU."""
    return f"GPU-sim-{index}"


def simulated_gpus(settings: StudySettings) -> tuple[GpuIdentity, ...]:
    """The study's GPUs, as the profile has them."""
    gpu = _gpu_of(settings)
    return tuple(
        GpuIdentity(index, gpu_uuid(index), gpu.name, gpu.memory_bytes, gpu.power_limit_w)
        for index in range(settings.hardware.gpus)
    )


def simulated_idle(settings: StudySettings, gpus: tuple[GpuIdentity, ...]) -> tuple[IdleGpu, ...]:
    """These GPUs before anything runs on them, as the profile has them."""
    idle_w = _gpu_of(settings).idle_w
    return tuple(
        IdleGpu(
            index=gpu.index,
            uuid=gpu.uuid,
            name=gpu.name,
            power_w=idle_w,
            power_limit_w=gpu.power_limit_w,
            memory_bytes=gpu.memory_total_bytes,
        )
        for gpu in gpus
    )


def _gpu_of(settings: StudySettings) -> GpuHardware:
    if settings.engine.profile is None:
        raise ConfigError("engine.profile: missing; the simulated engine needs a profile")
    return load_profile(settings.engine.profile).gpu


def seed_of(plan: LoadPlan, place: int) -> int:
    """The noise of one engine in one phase, the same on every launch."""
    digest = hashlib.sha256(f"{plan.seed}/{plan.phase}/{place}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def place_on_clock(plan: LoadPlan) -> float:
    """When a phase starts: the warm-up at 0, the restarts of the rungs (`rung-1-0`) after it."""
    match = re.search(r"(\d+)-(\d+)$", plan.phase)
    if match is None or plan.is_warmup:
        return 0.0
    place = int(match[1]) * MOST_LOADS + int(match[2])
    warmup = replace(plan, is_warmup=True)
    return float(round(longest_load_s(warmup) + place * longest_load_s(plan)))
