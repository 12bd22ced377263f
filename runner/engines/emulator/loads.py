"""How busy the server is: the JSON of /v1/loads, and the same as Prometheus text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime

from runner.engines.emulator.flag_table import VERSION
from runner.engines.emulator.info import memory_gb
from runner.engines.emulator.server import EmulatedServer

# What `include` calls a section, and what the answer calls it; None: not on this server.
SECTIONS = {
    "memory": "memory",
    "disagg": "disaggregation",
    "queues": "queues",
    "spec": None,
    "lora": None,
}
PREFIXES = {"disaggregation": "disagg"}


def loads(
    servers: Sequence[EmulatedServer], include: AbstractSet[str], dp_rank: int | None = None
) -> dict[str, object]:
    """The sections asked for, of every replica or of one."""
    server = servers[0]
    asked = [one for one in servers if dp_rank in {None, one.dp_rank}]
    return {
        "timestamp": datetime.fromtimestamp(server.date(), UTC).isoformat(),
        "version": VERSION,
        "accelerator": server.setup.profile.gpu.name,
        "num_accelerators": server.setup.shape.gpus,
        "loads": [_load(one, include) for one in asked],
    }


def loads_text(answer: Mapping[str, object]) -> str:
    """The numbers of `loads` as Prometheus gauges."""
    lines: list[str] = []
    found = answer["loads"]
    for load in found if isinstance(found, list) else ():
        rank = load["dp_rank"]
        for name, value in load.items():
            numbers = {name: value}
            if isinstance(value, dict):
                prefix = PREFIXES.get(name, name)
                numbers = {f"{prefix}_{key}": number for key, number in value.items()}
            for key, number in numbers.items():
                if isinstance(number, int | float) and key != "dp_rank":
                    lines += (
                        f"# TYPE sglang_{key} gauge",
                        f'sglang_{key}{{dp_rank="{rank}"}} {number}',
                    )
    return "\n".join(lines) + "\n"


def _load(server: EmulatedServer, include: AbstractSet[str]) -> dict[str, object]:
    load, sections = _core(server), _sections(server)
    for asked, name in SECTIONS.items():
        if name is not None and ("all" in include or asked in include):
            load[name] = sections[name]
    return load


def _core(server: EmulatedServer) -> dict[str, object]:
    """As in SGLang, `num_running_reqs` is that of one micro-batch."""
    setup, batches = server.setup, server.batches
    waiting = server.serving.pipeline.queued
    used = 0 if server.serving.is_idle else batches.tokens_used
    return {
        "timestamp": server.date(),
        "dp_rank": server.dp_rank,
        "num_running_reqs": server.running,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": batches.pending_tokens if waiting else 0,
        "num_used_tokens": used,
        "num_total_tokens": used,
        "num_active_tokens": used,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": setup.token_capacity,
        "max_running_requests": setup.resolved.max_running_requests,
        "token_usage": used / setup.token_capacity,
        "gen_throughput": batches.gen_throughput,
        "cache_hit_rate": server.cache_hit_rate,
        "utilization": 0.0,
        "total_prefill_uncached_tokens": server.stats.realtime_tokens["prefill_compute"],
    }


def _sections(server: EmulatedServer) -> dict[str, dict[str, object]]:
    memory, waiting = memory_gb(server.setup), server.serving.pipeline.queued
    queues = ("prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer")
    return {
        "memory": {
            "weight_gb": memory["weight"],
            "kv_cache_gb": memory["kvcache"],
            "graph_gb": memory["graph"],
            "token_capacity": server.setup.token_capacity,
        },
        "disaggregation": {
            "mode": "null",
            **{f"{queue}_queue_reqs": 0 for queue in (*queues, "decode_retracted")},
            "kv_transfer_speed_gb_s": 0.0,
            "kv_transfer_latency_ms": 0.0,
        },
        "queues": {
            "waiting": waiting,
            "grammar": 0,
            "paused": 0,
            "retracted": 0,
            "prealloc_ready": 0,
        },
    }
