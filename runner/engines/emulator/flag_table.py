"""SGLang 0.5.23's server flags that tuning studies use, with their defaults.

Names are SGLang's with underscores. Flags that the emulation has no use for are accepted and
shown in /server_info; flags that SGLang does not have are refused, as SGLang does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from runner.machine.graphs import GRAPH_BACKENDS

ArgValue: TypeAlias = bool | int | float | str | list[int] | None

VERSION = "0.5.23-emulated"

ALIASES: Mapping[str, tuple[str, ...]] = {
    "model_path": ("--model",),
    "tp_size": ("--tensor-parallel-size", "--tp"),
    "pp_size": ("--pipeline-parallel-size",),
    "dp_size": ("--data-parallel-size", "--dp"),
    "ep_size": ("--expert-parallel-size", "--ep"),
    "attn_cp_size": ("--attention-context-parallel-size",),
}

ATTENTION_BACKENDS = (
    *("triton", "torch_native", "flex_attention", "dsa", "nsa", "qsa", "dsv4", "compressed"),
    *("fa3", "fa4", "flashinfer", "llada2_cfg_flashinfer", "flashmla", "trtllm_mla"),
    *("cutedsl_mla", "tokenspeed_mla", "trtllm_mha", "hpc_ops", "minicpm_flashinfer"),
    *("aiter", "wave", "intel_amx", "ascend", "intel_xpu"),
)
LOAD_FORMATS = (
    *("auto", "pt", "safetensors", "npcache", "dummy", "sharded_state", "presharded", "gguf"),
    *("bitsandbytes", "layered", "flash_rl", "remote", "remote_instance", "fastsafetensors"),
    *("instanttensor", "runai_streamer", "private"),
)
MOE_RUNNER_BACKENDS = (
    *("auto", "deep_gemm", "triton", "triton_kernel", "flashinfer_trtllm"),
    *("flashinfer_trtllm_routed", "experimental_sgl_trtllm", "flashinfer_cutlass"),
    *("flashinfer_mxfp4", "flashinfer_cutedsl", "flashinfer_megamoe", "cutlass", "aiter"),
    *("marlin", "humming"),
)
MOE_A2A_BACKENDS = (
    *("none", "deepep", "deepep_v2", "mooncake", "nixl", "mori", "flashinfer", "megamoe"),
    *("flashinfer_megamoe", "pplx"),
)

CHOICES: Mapping[str, tuple[str | None, tuple[str, ...]]] = {
    "attention_backend": (None, ATTENTION_BACKENDS),
    "decode_attention_backend": (None, ATTENTION_BACKENDS),
    "prefill_attention_backend": (None, ATTENTION_BACKENDS),
    "cuda_graph_backend_decode": (None, GRAPH_BACKENDS),
    "cuda_graph_backend_prefill": (None, GRAPH_BACKENDS),
    "load_format": ("auto", LOAD_FORMATS),
    "moe_runner_backend": ("auto", MOE_RUNNER_BACKENDS),
    "moe_a2a_backend": ("none", MOE_A2A_BACKENDS),
    "sampling_backend": ("flashinfer", ("flashinfer", "pytorch", "ascend")),
    "grammar_backend": ("xgrammar", ("xgrammar", "outlines", "llguidance", "none")),
    "dtype": ("auto", ("auto", "half", "float16", "bfloat16", "float", "float32")),
    "kv_cache_dtype": ("auto", ("auto", "fp8_e5m2", "fp8_e4m3", "bf16", "bfloat16", "fp4_e2m1")),
    "tokenizer_mode": ("auto", ("auto", "slow")),
    "load_balance_method": (
        "round_robin",
        ("auto", "round_robin", "follow_bootstrap_room", "total_requests", "total_tokens"),
    ),
    "schedule_policy": (
        "fcfs",
        (
            *("lpm", "random", "fcfs", "dfs-weight", "lof", "priority", "routing-key", "hrrn"),
            "shortest-prefill-first",
        ),
    ),
    "startup_weight_load_mode": ("serial", ("serial", "overlap")),
    "weight_cache_mode": ("off", ("off", "daemon", "client")),
    "disaggregation_mode": ("null", ("null", "prefill", "decode")),
}

INTEGERS: Mapping[str, int | None] = {
    "tokenizer_worker_num": 1,
    "detokenizer_worker_num": 1,
    "context_length": None,
    "max_running_requests": None,
    "max_queued_requests": None,
    "max_total_tokens": None,
    "chunked_prefill_size": None,
    "prefill_decode_interval": 0,
    "max_prefill_tokens": 16384,
    "prefill_max_requests": None,
    "page_size": 1,
    "num_continuous_decode_steps": 1,
    "scheduler_recv_interval": 1,
    "nccl_port": None,
    "dist_timeout": None,
    "gated_launch_port": None,
    "nnodes": 1,
    "node_rank": 0,
    "tp_size": 1,
    "pp_size": 1,
    "pp_max_micro_batch_size": None,
    "pp_async_batch_depth": 0,
    "dp_size": 1,
    "attn_dp_size": 1,
    "attn_cp_size": 1,
    "moe_dp_size": 1,
    "dcp_size": 1,
    "ep_size": 1,
    "moe_dense_tp_size": None,
    "ep_num_redundant_experts": 0,
    "base_gpu_id": 0,
    "gpu_id_step": 1,
    "random_seed": None,
    "numa_node": None,
    "port": 30000,
    "engine_info_bootstrap_port": 6789,
    "stream_interval": 1,
    "log_requests_level": 2,
    "decode_log_interval": 40,
    "cuda_graph_max_bs_decode": None,
    "cuda_graph_max_bs_prefill": None,
    "cuda_graph_max_seq_len_prefill": None,
    "torch_compile_max_bs": 32,
    "triton_attention_num_kv_splits": 8,
    "cpu_offload_gb": 0,
    "hicache_size": 0,
    "speculative_num_steps": None,
    "speculative_eagle_topk": None,
    "speculative_num_draft_tokens": None,
}

REALS: Mapping[str, float | None] = {
    "mem_fraction_static": None,
    "schedule_conservativeness": 1.0,
    "swa_full_tokens_ratio": 0.8,
    "mamba_full_memory_ratio": 0.9,
    "watchdog_timeout": 300,
    "gc_warning_threshold_secs": 0.0,
    "soft_watchdog_timeout": None,
    "hicache_ratio": 2.0,
    "tbo_token_distribution_threshold": 0.48,
}

TEXTS: Mapping[str, str | None] = {
    "model_path": None,
    "tokenizer_path": None,
    "served_model_name": None,
    "revision": None,
    "quantization": None,
    "quantization_param_path": None,
    "model_loader_extra_config": "{}",
    "json_model_override_args": "{}",
    "model_impl": "auto",
    "device": None,
    "dist_init_addr": None,
    "host": "127.0.0.1",
    "api_key": None,
    "admin_api_key": None,
    "weight_version": "default",
    "chat_template": None,
    "completion_template": None,
    "reasoning_parser": None,
    "tool_call_parser": None,
    "log_level": "info",
    "log_level_http": None,
    "crash_dump_folder": None,
    "cuda_graph_config": None,
    "download_dir": None,
    "weight_cache_socket": None,
    "radix_eviction_policy": "lru",
    "speculative_algorithm": None,
    "speculative_draft_model_path": None,
    "deepep_mode": "auto",
    "fp8_gemm_runner_backend": "auto",
    "fp4_gemm_runner_backend": "auto",
    "mm_attention_backend": None,
}

LISTS = ("cuda_graph_bs_decode", "cuda_graph_bs_prefill")

SWITCHES = (
    *("skip_tokenizer_init", "trust_remote_code", "is_embedding", "enable_multimodal"),
    *("enable_dynamic_chunking", "enable_mixed_chunk", "enable_priority_scheduling"),
    *("disable_radix_cache", "disable_overlap_schedule", "disable_chunked_prefix_cache"),
    *("disable_hybrid_swa_memory", "enable_memory_saver", "sleep_on_idle", "use_ray"),
    *("enable_dp_attention", "enable_dp_lm_head", "enable_p2p_check", "skip_server_warmup"),
    *("enable_cache_report", "stream_response_default_include_usage"),
    *("incremental_streaming_output", "log_requests", "show_time_cost", "enable_metrics"),
    *("enable_mfu_metrics", "enable_metrics_for_all_schedulers", "enable_trace"),
    *("enable_request_time_stats_logging", "disable_flashinfer_autotune"),
    *("disable_cuda_graph", "disable_decode_cuda_graph", "disable_prefill_cuda_graph"),
    *("disable_cuda_graph_padding", "enable_profile_cuda_graph", "debug_cuda_graph"),
    *("enable_cudagraph_gc", "enable_nccl_nvls", "enable_symm_mem", "enable_torch_symm_mem"),
    *("disable_custom_all_reduce", "enable_mscclpp", "enable_flashinfer_allreduce_fusion"),
    *("pre_warm_nccl", "enable_torch_compile", "enable_eplb", "enable_two_batch_overlap"),
    *("enable_single_batch_overlap", "disable_shared_experts_fusion"),
    *("triton_attention_reduce_in_fp32", "enable_hierarchical_cache", "enable_lora"),
    *("weight_loader_disable_mmap", "weight_loader_prefetch_checkpoints"),
    *("enable_deterministic_inference", "enable_custom_logit_processor"),
    *("enable_return_hidden_states", "allow_auto_truncate", "delete_ckpt_after_loading"),
)

ALL_NAMES = (*CHOICES, *INTEGERS, *REALS, *TEXTS, *LISTS, *SWITCHES)
