"""The server parameters by name: which ones SGLang commonly has, and what each may be.

Names are SGLang's own with underscores, but for two neutral ones (cuda_graph, cuda_graph_max_bs)
whose flags differ by version. A name that is not listed here is passed through unchecked, unless
it is so close to a listed one that it must be a slip of the pen. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from runner.trial import ParamValue

SLIP = 0.85  # how alike (0..1) an unlisted name must be to a listed one to be taken for a slip


@dataclass(frozen=True, slots=True)
class ServerArg:
    """What one server parameter may be: a type, and for numbers a lowest and highest value."""

    kind: type[bool | int | float | str]
    low: float | None = None
    high: float | None = None
    is_open: bool = False  # the limits themselves are not allowed

    @property
    def allowed(self) -> str:
        """In words, e.g. `a whole number, 1 or more`."""
        if self.kind is bool:
            return "true or false"
        if self.kind is str:
            return "text"
        noun = "a whole number" if self.kind is int else "a number"
        if self.high is not None:
            return f"{noun} between {self.low:g} and {self.high:g}"
        if self.low is None:
            return noun
        return f"{noun} above {self.low:g}" if self.is_open else f"{noun}, {self.low:g} or more"

    def takes(self, value: ParamValue) -> bool:
        """Whether the value has the right type and lies within the limits."""
        if self.kind is bool or self.kind is str:
            return isinstance(value, self.kind)
        if isinstance(value, bool | str) or (self.kind is int and not isinstance(value, int)):
            return False
        above = self.low is None or value > self.low or (value == self.low and not self.is_open)
        below = self.high is None or value < self.high or (value == self.high and not self.is_open)
        return above and below


SIZE = ServerArg(int, 1)
COUNT = ServerArg(int, 0)
DEPTH = ServerArg(int, 0, 1024)  # SGLang has no limit; each is a slot of its own
WHOLE = ServerArg(int)
CHUNK = ServerArg(int, -1)  # -1 switches chunking off
SHARE = ServerArg(float, 0, 1, is_open=True)
POSITIVE = ServerArg(float, 0, is_open=True)
SWITCH = ServerArg(bool)
TEXT = ServerArg(str)

_BY_KIND: tuple[tuple[ServerArg, str], ...] = (
    # The first lines are the parameters that are searched most; this is also the order in which
    # a study lists its parameters.
    (SIZE, "tp_size pp_size dp_size ep_size"),
    (DEPTH, "pp_async_batch_depth"),
    (SIZE, "pp_max_micro_batch_size"),
    (SWITCH, "cuda_graph"),
    (SIZE, "cuda_graph_max_bs"),
    (TEXT, "attention_backend pp_layer_partition"),
    (SIZE, "max_running_requests"),
    (CHUNK, "chunked_prefill_size"),
    (SHARE, "mem_fraction_static"),
    (SIZE, "attn_dp_size moe_dp_size attn_cp_size dcp_size moe_dense_tp_size"),
    (SIZE, "max_total_tokens max_prefill_tokens prefill_max_requests page_size context_length"),
    (SIZE, "num_continuous_decode_steps scheduler_recv_interval stream_interval"),
    (SIZE, "decode_log_interval torch_compile_max_bs cuda_graph_max_bs_prefill"),
    (SIZE, "cuda_graph_max_seq_len_prefill speculative_num_steps speculative_eagle_topk"),
    (SIZE, "speculative_num_draft_tokens tokenizer_worker_num detokenizer_worker_num"),
    (COUNT, "max_queued_requests prefill_decode_interval random_seed numa_node"),
    (WHOLE, "cpu_offload_gb"),
    (POSITIVE, "schedule_conservativeness watchdog_timeout soft_watchdog_timeout dist_timeout"),
    (SHARE, "tbo_token_distribution_threshold"),
    (SWITCH, "enable_dynamic_chunking enable_dp_lm_head enable_mixed_chunk"),
    (SWITCH, "disable_radix_cache disable_overlap_schedule disable_cuda_graph_padding"),
    (SWITCH, "disable_prefill_cuda_graph enable_profile_cuda_graph"),
    (SWITCH, "debug_cuda_graph enable_torch_compile enable_torch_compile_debug_mode"),
    (SWITCH, "disable_custom_all_reduce enable_nccl_nvls enable_mscclpp enable_symm_mem"),
    (SWITCH, "enable_torch_symm_mem enable_p2p_check enable_two_batch_overlap"),
    (SWITCH, "enable_single_batch_overlap enable_eplb enable_hierarchical_cache"),
    (SWITCH, "enable_memory_saver enable_metrics enable_metrics_for_all_schedulers"),
    (SWITCH, "skip_tokenizer_init skip_server_warmup trust_remote_code sleep_on_idle"),
    (SWITCH, "incremental_streaming_output log_requests use_ray enable_priority_scheduling"),
    (SWITCH, "enable_flashinfer_allreduce_fusion disable_shared_experts_fusion"),
    (TEXT, "decode_attention_backend prefill_attention_backend mm_attention_backend"),
    (TEXT, "cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_config"),
    (TEXT, "moe_runner_backend moe_a2a_backend deepep_mode sampling_backend grammar_backend"),
    (TEXT, "kv_cache_dtype dtype quantization schedule_policy load_format load_balance_method"),
    (TEXT, "weight_cache_mode startup_weight_load_mode tokenizer_path tokenizer_mode"),
    (TEXT, "served_model_name crash_dump_folder log_level device reasoning_parser"),
    (TEXT, "tool_call_parser speculative_algorithm speculative_draft_model_path"),
)
KNOWN: Mapping[str, ServerArg] = {name: arg for arg, names in _BY_KIND for name in names.split()}

# Real flags whose names are close to a listed one; they pass through.
LOOKALIKES = frozenset(
    {
        "cuda_graph_bs",
        "cuda_graph_bs_prefill",
        "deepep_v2_mode",
        "dwdp_size",
        "enable_aiter_allreduce_fusion",
        "enable_fp32_lm_head",
        "enable_lean_attention",
        "enable_mfu_metrics",
        "enforce_disable_flashinfer_allreduce_fusion",
        "prefill_decode_interval_min_bs",
    }
)

ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("tp", "tensor_parallel_size"), "tp_size"),
    **dict.fromkeys(("pp", "pipeline_parallel_size"), "pp_size"),
    **dict.fromkeys(("dp", "data_parallel_size"), "dp_size"),
    **dict.fromkeys(("ep", "expert_parallel_size"), "ep_size"),
    **dict.fromkeys(("disable_cuda_graph", "disable_decode_cuda_graph"), "cuda_graph"),
    "cuda_graph_max_bs_decode": "cuda_graph_max_bs",
    **dict.fromkeys(("enable_dp_attention", "attention_data_parallel_size"), "attn_dp_size"),
}
OWNED = frozenset(
    {"host", "port", "nccl_port", "base_gpu_id", "gpu_id_step", "dist_init_addr", "nnodes"}
    | {"node_rank", "model_path", "model", "config"}
    # A study's servers answer this machine only, in plain HTTP and without a key.
    | {"api_key", "admin_api_key", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs"}
    | {"profile", "time_scale", "gpu_folder"}  # the emulated server's own
)


def name_mistake(name: str) -> str | None:
    """What is wrong with a server parameter's name, None if nothing is."""
    if name in ALIASES:
        return f"{name!r} is written {ALIASES[name]!r} here"
    if name in OWNED:
        instead = "give the model as engine.model" if "model" in name else "leave it out"
        return f"{name!r} is set by this program; {instead}"
    if name in KNOWN or name in LOOKALIKES:
        return None
    close = get_close_matches(name.lower().replace("-", "_"), KNOWN, n=1, cutoff=SLIP)
    return f"unknown server parameter {name!r}; did you mean {close[0]!r}?" if close else None


def value_mistake(name: str, value: ParamValue) -> str | None:
    """What a listed parameter may be, when the value is not that; None when it is fine."""
    arg = KNOWN.get(name)
    return None if arg is None or arg.takes(value) else arg.allowed


def settle(name: str, value: ParamValue) -> ParamValue:
    """The value in the parameter's own type: 1 is 1.0 where a real number is meant."""
    arg = KNOWN.get(name)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if arg is not None and arg.kind is float and is_whole else value


def rank(name: str) -> tuple[int, str]:
    """A sort key: listed parameters first, in the order of the list, then the others by name."""
    return (_RANKS.get(name, len(_RANKS)), name)


_RANKS = {name: position for position, name in enumerate(KNOWN)}
