"""Everything that decides how an engine is loaded. Sampling is not here: it belongs to each request."""

from __future__ import annotations

from typing import Any, Literal

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Record

WORKER_ARGS = frozenset(
    """
    aggregate_engine_logging async_scheduling attention_backend attention_config block_size collect_detailed_traces
    compilation_config custom_histogram_buckets decode_context_parallel_size device_ids disable_cascade_attn
    disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_stats
    disable_nccl_for_dp_synchronization distributed_executor_backend distributed_timeout_seconds download_dir
    ec_transfer_config enable_batch_sharded_sampling enable_chunked_prefill enable_cumem_allocator enable_dbo
    enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel enable_fault_tolerance
    enable_flashinfer_autotune enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_mfu_metrics
    enable_prefix_caching enable_shm_tensor_arena enable_sleep_mode eplb_config expert_placement_strategy
    fail_on_environ_validation fault_tolerance_config fully_sharded_loras gdn_prefill_backend hf_token ir_op_priority
    kda_decode_backend kda_prefill_backend kernel_config kv_cache_memory_bytes kv_events_config kv_transfer_config
    linear_backend log_config_file log_level logging_config long_prefill_token_threshold mamba_backend master_addr
    master_port max_cpu_loras max_cudagraph_capture_size max_long_partial_prefills max_loras max_num_active_seqs
    max_num_partial_prefills max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens
    max_parallel_loading_workers mm_encoder_attn_backend model_loader_extra_config moe_backend nnodes node_rank
    num_gpu_blocks_override num_lookahead_slots optimization_level otlp_traces_endpoint performance_mode
    preemption_mode prefill_context_parallel_size prefill_schedule_interval prefix_cache_retention_interval
    prefix_caching_hash_algo profiler_config pt_load_map_location ray_workers_use_nsight renderer_num_workers
    scheduler_reserve_full_isl scheduling_policy served_model_name show_hidden_metrics_for_version shutdown_timeout
    skip_mm_profiling sparse_indexer_topk_backend specialize_active_lora stream_interval swap_space ubatch_size
    use_tqdm_on_load watermark weight_transfer_config
    """.split()  # noqa: SIM905 - a hundred names, read as a text
)
"""Engine arguments of vLLM that suit a machine (memory, batching, kernels, parallelism, logs) or may hold a secret:
workers of one run may differ in them. Every other one is of the run, those of future versions too."""
_WORKER_PREFIXES = (
    "all2all_", "cp_", "cpu_", "cudagraph_", "data_parallel_", "dbo_", "dcp_", "dp_", "elastic_ep_", "jit_monitor_",
    "kv_cache_metrics", "kv_offloading_", "numa_", "offload_", "safetensors_",
)  # fmt: skip


class EngineConfig(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One engine, as a user asks for it. None means: the adapter chooses, and says what it chose in EngineInfo.

    The `echo_*` options only concern ``--engine echo`` and are described in `batchinfer.engines.echo`.
    """

    engine: str = "vllm"
    model: str = ""
    tokenizer: str | None = None
    revision: str | None = None
    hf_config_path: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int = 1
    replicas: int | Literal["auto"] = "auto"
    """"auto": as many as the GPUs hold of the smallest tensor-parallel size that serves the model well."""
    gpus: list[str] | None = None
    """Indices or UUIDs, as in CUDA_VISIBLE_DEVICES; None means all that are visible."""
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    cpu_offload_gb: float = 0.0
    enforce_eager: bool | None = None
    trust_remote_code: bool = False
    engine_args: dict[str, Any] = {}
    """Passed to vLLM's EngineArgs by name, over our defaults; none that has an option above."""
    seed: int = 0
    stall_seconds: float = 300.0
    """Without a step or a token for so long, with requests in flight, the engine counts as hung."""
    load_timeout_seconds: float = 1800.0
    in_process: bool = False
    """echo only: run it inside the worker even where a process of its own was asked for."""

    echo_latency_seconds: float = 0.0
    echo_seed: int = 0
    echo_tokens: tuple[int, int] | None = None
    echo_load_seconds: float = 0.0
    echo_fail_marker: str | None = None
    echo_kill_marker: str | None = None
    echo_hang_marker: str | None = None

    @property
    def answer_arguments(self) -> dict[str, Any]:
        """Those of `engine_args` that may decide answers: the workers of a run must agree on them."""
        return {
            name: value
            for name, value in self.engine_args.items()
            if value is not None
            and name not in WORKER_ARGS
            and not name.startswith(_WORKER_PREFIXES)
        }


def check_config(config: EngineConfig) -> None:
    """Refuse what no engine could run, before anything is started. Pure.

    Raises:
        ConfigError: a count or size is not positive, or an engine argument has an option of its own.
    """
    _check_arguments(config)
    counts = {
        "--tensor-parallel-size": config.tensor_parallel_size,
        "--pipeline-parallel-size": config.pipeline_parallel_size,
        "--replicas": None if config.replicas == "auto" else config.replicas,
        "--max-model-len": config.max_model_len,
        "--max-num-seqs": config.max_num_seqs,
        "--max-num-batched-tokens": config.max_num_batched_tokens,
    }
    for option, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{option}: is {value}, expected at least 1")
    seconds = {
        "--stall-seconds": config.stall_seconds,
        "--load-timeout-seconds": config.load_timeout_seconds,
    }
    for option, limit in seconds.items():
        if limit <= 0:
            raise ConfigError(f"{option}: is {limit:g}, expected more than 0")
    share = config.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization: is {share:g}, expected a share above 0 and up to 1"
        )
    if config.cpu_offload_gb < 0:
        raise ConfigError(f"--cpu-offload-gb: is {config.cpu_offload_gb:g}, expected 0 or more")
    if config.echo_latency_seconds < 0:
        raise ConfigError(f"echo latency: is {config.echo_latency_seconds:g}, expected 0 or more")
    if config.echo_tokens and not 1 <= config.echo_tokens[0] <= config.echo_tokens[1]:
        raise ConfigError(
            f"echo token counts: are {config.echo_tokens}, expected (least, most) with least >= 1"
        )


def _check_arguments(config: EngineConfig) -> None:
    """What has an option comes by it only: the run's configuration and the choice of GPUs go by the option."""
    for name in config.engine_args:
        hint = f"use --{name.replace('_', '-')} instead"
        if name == "seed":
            hint = "use --seed, from which every row gets its own"
        elif name == "tokenizer_revision":
            hint = "--revision is the tokenizer's too; --tokenizer takes a folder with the files of another one"
        elif name not in EngineConfig.__struct_fields__:
            continue
        raise ConfigError(f"--engine-arg {name}: has an option of its own", hint=hint)
