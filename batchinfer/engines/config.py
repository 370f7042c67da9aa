"""The options that decide how an engine is loaded. Sampling parameters are not among them; each request has its own."""

from __future__ import annotations

import importlib.resources
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

from batchinfer.core.errors import ConfigError, near
from batchinfer.core.records import Record
from batchinfer.core.tasks import EMBED, GENERATE, TOKEN_EMBED, is_pooling

CONSTRAINTS = {"backend": "xgrammar", "disable_any_whitespace": True}
"""Our default of vLLM's `structured_outputs_config`.

vLLM's own default is the backend "auto": the first constrained request of an engine decides the backend for all later
ones, so answers would depend on the order of the rows. Without `disable_any_whitespace`, models may fill JSON with
white space up to `max_tokens`.
"""

NAMED_ARGUMENTS = {
    "kv_cache_dtype": "--kv-cache-dtype",
    "speculative_config": "--speculative-config",
}
"""Options that are another way to write ``--engine-arg NAME=VALUE``, by the name of the engine argument."""

KV_CACHE_BYTES = {
    "auto": None,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_inc": 1.0,
    "fp8_ds_mla": 1.0,
    "fp8_per_token_head": 1.0,
    "int8_per_token_head": 1.0,
    "int4_per_token_head": 0.5,
    "nvfp4": 0.5625,
    "nvfp4_4over6": 0.5625,
    "nvfp4_ds_mla": 0.5625,
    "turboquant_k8v4": 0.75,
    "turboquant_4bit_nc": 0.5,
    "turboquant_k3v4_nc": 0.4375,
    "turboquant_3bit_nc": 0.375,
    "ultraquant_4bit": 0.5,
}
"""Bytes of one number in the KV cache, by the names of vLLM's `kv_cache_dtype`. Scales are left out, except those of
nvfp4. None: as the model's config says."""


class EngineConfig(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The engine that a user asks for, with its options.

    A field that is None is left to the engine or the model. The `echo_*` fields only concern ``--engine echo``;
    `batchinfer.engines.echo` describes them.
    """

    engine: str = "vllm"
    task: str = GENERATE
    """One of `core.tasks.TASKS`."""
    pooling: str | None = None
    """How the vectors of the tokens become one: an entry of `core.tasks.POOLINGS`. None: as the model says."""
    dimensions: int | None = None
    """Numbers to keep of each embedding, for models that allow to cut them (Matryoshka)."""
    normalize: bool | None = None
    """Whether embeddings are scaled to length 1, and classes and scores are probabilities instead of raw numbers. None:
    as the model says, which is yes for most models; raw numbers for rewards."""
    model: str = ""
    tokenizer: str | None = None
    revision: str | None = None
    hf_config_path: str | None = None
    model_cache: str | None = None
    """Folder in which models from buckets are kept; None for the default of `bucket_models.cache_folder`."""
    dtype: str = "auto"
    quantization: str | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int = 1
    nnodes: int = 1
    """Number of machines ("nodes") that run the model together."""
    node_rank: int = 0
    """Number of this node. Node 0 is the worker, the others only compute."""
    master_addr: str = ""
    """Address of node 0."""
    master_port: int = 29501
    """Port of node 0 at which vLLM connects the nodes. `batchinfer.engines.nodes` uses the next port."""
    replicas: int | Literal["auto"] = "auto"
    """Number of engine processes. With "auto", each process gets the fewest GPUs that serve the model well, and there
    are as many processes as the GPUs suffice for."""
    gpus: list[str] | None = None
    """GPUs to use, as indices or UUIDs like those in CUDA_VISIBLE_DEVICES; None means all visible GPUs."""
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    cpu_offload_gb: float = 0.0
    enforce_eager: bool | None = None
    loras: dict[str, str] = {}
    """Folder or Hub name of each LoRA adapter, by the name by which rows ask for it."""
    limit_mm_per_prompt: dict[str, int] = {}
    """Largest number of images in a prompt, as the value of "image". Empty leaves it to the engine."""
    trust_remote_code: bool = False
    tool_call_parser: str = ""
    """Name of vLLM's parser that finds calls of tools in answers; empty for none."""
    reasoning_parser: str = ""
    """Name of vLLM's parser that takes reasoning out of answers; empty for none."""
    engine_args: dict[str, Any] = {}
    """Further arguments for vLLM's EngineArgs, by name. They replace our defaults. `check_config` refuses names
    of fields of this class."""
    seed: int = 0
    stall_seconds: float = 300.0
    """Seconds without a step or a token, while requests are in flight, after which the engine counts as hung. With
    ``--engine openai``: seconds that an outage of the endpoint may last."""
    load_timeout_seconds: float = 1800.0
    in_process: bool = False
    """Whether the echo engine runs inside the worker's process, whatever `replicas` says. Other engines ignore this."""

    base_url: str = ""
    """URL of the endpoint. This field and the four next ones only concern ``--engine openai``."""
    max_concurrency: int = 100
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    request_timeout_seconds: float = 600.0
    """Seconds that one attempt at a request may take."""

    echo_latency_seconds: float = 0.0
    echo_seed: int = 0
    echo_tokens: tuple[int, int] | None = None
    echo_load_seconds: float = 0.0
    echo_fail_marker: str | None = None
    echo_kill_marker: str | None = None
    echo_hang_marker: str | None = None

    @property
    def pooling_options(self) -> dict[str, Any]:
        """The options about vectors that were given, by field. They may change answers."""
        names = ("pooling", "dimensions", "normalize")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def max_images(self) -> int | None:
        """Largest number of images in a prompt; None leaves it to the engine."""
        return self.limit_mm_per_prompt.get("image")

    @property
    def constraint_backend(self) -> str:
        """Name of vLLM's backend that keeps answers to their constraints."""
        options = self.engine_args.get("structured_outputs_config", CONSTRAINTS)
        return str(options.get("backend", "auto")) if isinstance(options, dict) else "auto"

    @property
    def speculation(self) -> dict[str, Any]:
        """Value of vLLM's `speculative_config`; empty without speculative decoding."""
        value = self.engine_args.get("speculative_config")
        return value if isinstance(value, dict) else {}

    @property
    def answer_arguments(self) -> dict[str, Any]:
        """The `engine_args` that may change answers. They must be the same for all workers of a run."""
        return {
            name: value
            for name, value in self.engine_args.items()
            if value is not None and not any(fnmatchcase(name, each) for each in worker_args())
        }


@cache
def worker_args() -> tuple[str, ...]:
    """Return name patterns of engine arguments, from worker_args.txt.

    The workers of a run may give these arguments different values.
    """
    text = importlib.resources.files("batchinfer.engines").joinpath("worker_args.txt").read_text()
    return tuple(line for line in text.splitlines() if not line.startswith("#"))


def check_config(config: EngineConfig) -> None:
    """Refuse values that no engine could run, before anything is started. Pure.

    Raises:
        ConfigError: a number is out of its range, --hf-config-path is a URL, or an engine argument has an option of its
            own.
    """
    _check_arguments(config)
    _check_pooling(config)
    if config.hf_config_path and "://" in config.hf_config_path:
        raise ConfigError(
            f"--hf-config-path: {config.hf_config_path} is a URL, expected a folder or a name on the Hub",
            hint="put config.json into the model's folder in the bucket, or copy it to this machine",
        )
    _check_nodes(config)
    counts = {
        "--tensor-parallel-size": config.tensor_parallel_size,
        "--pipeline-parallel-size": config.pipeline_parallel_size,
        "--replicas": None if config.replicas == "auto" else config.replicas,
        "--max-model-len": config.max_model_len,
        "--max-num-seqs": config.max_num_seqs,
        "--max-num-batched-tokens": config.max_num_batched_tokens,
        "--max-concurrency": config.max_concurrency,
        "--requests-per-minute": config.requests_per_minute,
        "--tokens-per-minute": config.tokens_per_minute,
    }
    for option, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{option}: is {value}, expected at least 1")
    seconds = {
        "--request-timeout-seconds": config.request_timeout_seconds,
        "--stall-seconds": config.stall_seconds,
        "--load-timeout-seconds": config.load_timeout_seconds,
    }
    for option, limit in seconds.items():
        if limit <= 0:
            raise ConfigError(f"{option}: is {limit:g}, expected more than 0")
    for name, most in config.limit_mm_per_prompt.items():
        if name not in ("image", "video", "audio") or type(most) is not int or most < 0:
            raise ConfigError(
                f"--limit-mm-per-prompt {name}={most}: expected a number of images from 0",
                hint="as in --limit-mm-per-prompt image=4",
            )
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


def _check_pooling(config: EngineConfig) -> None:
    """Refuse options that mean nothing for the run's task."""
    of_texts = {
        "--tool-call-parser": config.tool_call_parser,
        "--reasoning-parser": config.reasoning_parser,
        "--speculative-config": config.engine_args.get("speculative_config"),
    }
    for option, value in of_texts.items():
        if value and is_pooling(config.task):
            raise ConfigError(
                f"{option} with --task {config.task}: means nothing for this task",
                hint="leave it out",
            )
    given = {
        "--pooling": config.pooling,
        "--dimensions": config.dimensions,
        "--normalize": config.normalize,
    }
    for option, value in given.items():
        if value is None:
            continue
        if not is_pooling(config.task):
            raise ConfigError(
                f"{option} with --task {config.task}: is about vectors, and this task makes texts",
                hint="add --task embed, or another task of docs/embeddings.md",
            )
        if option == "--dimensions" and config.task not in (EMBED, TOKEN_EMBED):
            raise ConfigError(
                f"{option} with --task {config.task}: only embeddings can be cut",
                hint="leave it out",
            )


def _check_nodes(config: EngineConfig) -> None:
    """Refuse options of several nodes that contradict each other."""
    if not 0 <= config.node_rank < config.nnodes:
        raise ConfigError(
            f"--node-rank: is {config.node_rank}, expected 0 to {config.nnodes - 1}, below --nnodes"
        )
    if config.nnodes == 1:
        return
    if not config.master_addr:
        raise ConfigError(
            f"--nnodes {config.nnodes} without --master-addr: expected the address of node 0",
            hint="give it, and the same --master-port, to every node",
        )
    if config.replicas not in {1, "auto"}:
        raise ConfigError("--replicas with --nnodes: several nodes run one replica together")
    size = (config.tensor_parallel_size or config.nnodes) * config.pipeline_parallel_size
    if size % config.nnodes:
        raise ConfigError(
            f"--tensor-parallel-size x --pipeline-parallel-size: is {size}, expected a multiple of --nnodes "
            f"{config.nnodes}",
            hint="every node has the same number of GPUs",
        )


def _check_arguments(config: EngineConfig) -> None:
    """Refuse an engine argument that has an option of its own.

    run.json records only the option, and the choice of GPUs reads only the option.
    """
    cache = config.engine_args.get("kv_cache_dtype")
    if (
        cache is not None
        and cache not in KV_CACHE_BYTES
        and (meant := near(str(cache), KV_CACHE_BYTES))
    ):
        raise ConfigError(f"--kv-cache-dtype {cache}: is not one of vLLM's types{meant}")
    draft = config.speculation.get("model")
    if isinstance(draft, str) and "://" in draft:
        raise ConfigError(
            f"--speculative-config: the model {draft} is a URL, expected a folder or a name on the Hub",
            hint="copy the draft model to this machine",
        )
    for name in config.engine_args:
        hint = f"use --{name.replace('_', '-')} instead"
        if name == "seed":
            hint = "use --seed, from which every row gets its own"
        elif name == "tokenizer_revision":
            hint = "--revision is the tokenizer's too; --tokenizer takes a folder with the files of another one"
        elif name == "runner":
            hint = "--task decides it"
        elif name not in EngineConfig.__struct_fields__:
            continue
        raise ConfigError(f"--engine-arg {name}: has an option of its own", hint=hint)
