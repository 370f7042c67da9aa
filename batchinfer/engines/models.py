"""What a model is, from its config and file list alone: identity, size, lengths. No weights are downloaded."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from batchinfer.core.errors import (
    AccessDenied,
    BatchinferError,
    ConfigError,
    EngineLoadError,
    StorageError,
)
from batchinfer.core.records import Record
from batchinfer.engines.config import EngineConfig
from batchinfer.storage.hub import hub_errors

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
# Mistral's own format, which vLLM reads as well.
MISTRAL_CONFIG_FILE = "params.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "spiece.model",
    "tiktoken.model",
)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
# Of a weight file, so much at both ends tells it from another of equal size.
SAMPLE_BYTES = 1 << 20
# Where a config states the longest length; of several, vLLM takes the smallest.
LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
# Entry of a config whose model has latent attention (DeepSeek).
LATENT_RANK = "kv_lora_rank"
DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4}


class ModelInfo(Record, frozen=True, kw_only=True):
    """A model. Numbers are 0 and texts empty where the config does not say.

    `identity` is what a run's fingerprint takes: the commit on the Hub, or a hash of a local folder's config,
    tokenizer, generation config, weight index, and samples of its weight files. `parameter_bytes` and
    `kv_bytes_per_token` are estimates: quantization while loading, windows and shared caches need less.
    """

    name: str
    identity: str
    revision: str = ""
    is_local: bool = False
    architecture: str = ""
    dtype: str = ""
    quantization: str = ""
    max_model_len: int = 0
    is_length_exact: bool = False
    """Whether vLLM takes nothing longer than `max_model_len`. False where the config leaves it open."""
    parameter_bytes: int = 0
    kv_bytes_per_token: int = 0
    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    vocab_size: int = 0


def describe_model(config: EngineConfig) -> ModelInfo:
    """Look a model up, in a local folder or on the Hub. Read-only but for the Hub's cache (small files).

    Raises:
        ConfigError: there is no such model or revision, or a file that every engine needs is missing; the
            message names it.
        AccessDenied: the model needs a licence to be accepted or a token.
        EngineLoadError: the Hub cannot be reached and the model is not in the cache.
    """
    path = Path(config.model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelInfo(
            name=config.model,
            identity=hash_weights({path.name: path}),
            is_local=True,
            parameter_bytes=path.stat().st_size,
        )
    if path.is_dir():
        return describe_folder(config, path)
    if looks_like_path(config.model):
        raise ConfigError(
            f"--model: {config.model} is no folder on this machine",
            hint="give a folder that holds config.json, or a name on the Hub as in Qwen/Qwen3-0.6B",
        )
    return describe_on_hub(config)


def looks_like_path(name: str) -> bool:
    """Whether a name can only be meant as a path.

    >>> looks_like_path("Qwen/Qwen3-0.6B"), looks_like_path("./model"), looks_like_path("a/b/c")
    (False, True, True)
    """
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


# --------------------------------------------------------------------------- a local folder


def describe_folder(config: EngineConfig, folder: Path, name: str | None = None) -> ModelInfo:
    """Describe a model in a folder; see `describe_model`."""
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    subject = f"--model: {name or config.model}"
    check_files(subject, list(files), config)
    weights = weight_files({file: path.stat().st_size for file, path in files.items()})
    return build_info(
        config,
        read_model_config(config, files.get(CONFIG_FILE)),
        sum(weights.values()),
        name=name or config.model,
        identity=hash_folder(files, list(weights)),
        is_local=True,
    )


def check_files(subject: str, names: list[str], config: EngineConfig) -> None:
    """Refuse a model without a config, a tokenizer or weights, naming what is missing and the way out.

    Raises:
        ConfigError: one is missing.
    """
    there = set(names)
    if not config.hf_config_path and not there & {CONFIG_FILE, MISTRAL_CONFIG_FILE}:
        raise ConfigError(
            f"{subject} has no {CONFIG_FILE}, which describes the model's shape",
            hint="--hf-config-path FOLDER takes it from another folder or Hub name",
        )
    if not config.tokenizer and not there.intersection(TOKENIZER_FILES):
        raise ConfigError(
            f"{subject} has no tokenizer (none of {', '.join(TOKENIZER_FILES[:4])})",
            hint="--tokenizer FOLDER_OR_NAME takes it from another model",
        )
    has_weights = any(name.endswith(WEIGHT_SUFFIXES) for name in names)
    if not has_weights and "load_format" not in config.engine_args:
        raise ConfigError(
            f"{subject} has no weights (*.safetensors or *.bin)",
            hint="is the download complete? --engine-arg load_format=dummy measures speed without weights",
        )


def weight_files(sizes: Mapping[str, int]) -> dict[str, int]:
    """The files that vLLM would load, with their bytes: safetensors before .bin, no second copy."""
    for suffix in (".safetensors", ".bin", ".pt", ".gguf"):
        chosen = {name: size for name, size in sizes.items() if name.endswith(suffix)}
        # Mistral's repositories hold the same weights twice.
        without_copy = {name: size for name, size in chosen.items() if "consolidated" not in name}
        if chosen:
            return without_copy or chosen
    return {}


def hash_folder(files: Mapping[str, Path], weights: list[str]) -> str:
    """A hash that changes with anything in a folder that decides the answers."""
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        if name.endswith((".json", ".jinja", ".model", ".txt", ".py", ".tiktoken")):
            digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    digest.update(hash_weights({name: files[name] for name in weights}).encode())
    return digest.hexdigest()[:40]


def hash_weights(files: Mapping[str, Path]) -> str:
    """A hash over the size and both ends of each weight file: terabytes are not read at every start."""
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        size = path.stat().st_size
        digest.update(f"{name}\0{size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, size - SAMPLE_BYTES))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:40]


# --------------------------------------------------------------------------- the Hub


def describe_on_hub(config: EngineConfig) -> ModelInfo:
    """Describe a model on the Hub at its revision, or as it lies in the cache when the Hub is out of reach."""
    import huggingface_hub as hub
    from huggingface_hub import constants

    subject = f"--model: {config.model}"
    if constants.HF_HUB_OFFLINE:
        return describe_in_cache(config, None)
    try:
        with hub_errors(subject):
            info = hub.HfApi().model_info(
                config.model, revision=config.revision, files_metadata=True, timeout=30.0
            )
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
            names = [name for name in sizes if "/" not in name]
            check_files(subject, names, config)
            path = None
            if CONFIG_FILE in names:
                path = Path(hub.hf_hub_download(config.model, CONFIG_FILE, revision=info.sha))
    except (AccessDenied, StorageError) as error:
        return describe_in_cache(config, error)
    weights = weight_files({name: sizes[name] for name in names})
    return build_info(
        config,
        read_model_config(config, path),
        sum(weights.values()),
        name=config.model,
        identity=info.sha or "",
        revision=info.sha or "",
    )


def describe_in_cache(config: EngineConfig, cause: BatchinferError | None) -> ModelInfo:
    """Describe a model as an earlier download left it. `cause` is why the Hub was not asked or did not tell."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        folder = Path(
            hub.snapshot_download(config.model, revision=config.revision, local_files_only=True)
        )
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, OSError) as error:
        if isinstance(cause, AccessDenied):
            raise cause from error
        subject = f"--model: {config.model} is not in this machine's cache and the Hub"
        if cause is None:
            raise ConfigError(
                f"{subject} is switched off by HF_HUB_OFFLINE", hint="unset HF_HUB_OFFLINE"
            ) from error
        raise EngineLoadError(
            f"{subject} cannot be reached: {cause.message}",
            hint="check the network; a model that is in the cache needs none",
        ) from error
    logger.info("%s: taken from the cache, commit %s", config.model, folder.name)
    info = describe_folder(config, folder, name=config.model)
    return msgspec.structs.replace(info, identity=folder.name, revision=folder.name, is_local=False)


# --------------------------------------------------------------------------- config.json


def read_model_config(config: EngineConfig, path: Path | None) -> dict[str, Any]:
    """config.json as an object; of a multimodal model, its text part over the rest.

    Raises:
        ConfigError: the file is not JSON, or --hf-config-path has none.
    """
    if config.hf_config_path and Path(config.hf_config_path).expanduser().is_dir():
        path = Path(config.hf_config_path).expanduser() / CONFIG_FILE
        if not path.is_file():
            raise ConfigError(f"--hf-config-path: {config.hf_config_path} holds no {CONFIG_FILE}")
    if path is None:
        return {}
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error}), expected a model's config") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds no JSON object, expected a model's config")
    inner = values.get("text_config")
    return {**values, **inner} if isinstance(inner, dict) else values


def build_info(
    config: EngineConfig, values: Mapping[str, Any], weight_bytes: int, **identity: Any
) -> ModelInfo:
    """Put a description together from config.json and the weights' size on disk."""
    stored = str(values.get("dtype") or values.get("torch_dtype") or "").removeprefix("torch.")
    # vLLM's "auto" runs a float32 checkpoint in 16 bits.
    automatic = "bfloat16" if stored in {"float32", "float"} else stored
    dtype = config.dtype if config.dtype != "auto" else automatic
    method = values.get("quantization_config") or {}
    quantization = config.quantization or str(method.get("quant_method") or "")
    parameter_bytes = weight_bytes
    if not quantization and stored in DTYPE_BYTES and dtype in DTYPE_BYTES:
        parameter_bytes = weight_bytes * DTYPE_BYTES[dtype] // DTYPE_BYTES[stored]
    heads = number(values, "num_attention_heads", "n_head", "n_heads")
    kv_heads = number(values, "num_key_value_heads", "multi_query_group_num") or heads
    if number(values, LATENT_RANK):
        kv_heads = 1  # as vLLM counts them: every rank of a tensor-parallel group keeps the whole latent vector
    architectures = values.get("architectures") or [""]
    return ModelInfo(
        architecture=str(architectures[0]),
        dtype=dtype,
        quantization=quantization,
        max_model_len=longest_length(values),
        is_length_exact=not has_other_lengths(values) and not config.hf_config_path,
        parameter_bytes=parameter_bytes,
        kv_bytes_per_token=kv_bytes_per_token(config, values, heads, kv_heads, dtype),
        num_layers=number(values, "num_hidden_layers", "n_layer", "n_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=number(values, "vocab_size"),
        **identity,
    )


def number(values: Mapping[str, Any], *names: str) -> int:
    """The first of these entries that is a positive integer, else 0."""
    for name in names:
        value = values.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def longest_length(values: Mapping[str, Any]) -> int:
    """The longest sequence that a config allows, as vLLM reads it.

    >>> longest_length({"max_position_embeddings": 8192, "seq_length": 2048})
    2048
    """
    stated = [number(values, name) for name in LENGTHS]
    return number(values, "model_max_length") or min(filter(None, stated), default=0)


def has_other_lengths(values: Mapping[str, Any]) -> bool:
    """Whether a part of the config scales positions or states a length of its own, so that vLLM may derive another."""
    parts = [part for name, part in values.items() if name != "text_config"]
    return any(
        not part.keys().isdisjoint({"factor", *LENGTHS}) or has_other_lengths(part)
        for part in parts
        if isinstance(part, dict)
    )


def check_length(config: EngineConfig, model: ModelInfo) -> str:
    """Refuse a --max-model-len that the model surely does not take, before anything is loaded.

    Returns:
        A warning where the length is beyond the stated one and only vLLM can tell; else an empty text.

    Raises:
        ConfigError: --max-model-len is more than the model's own.
    """
    most, wanted = model.max_model_len, config.max_model_len or 0
    if not 0 < most < wanted:
        return ""
    is_overridden = bool(os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN")) or not {
        "hf_overrides",
        "config_format",
    }.isdisjoint(config.engine_args)
    if not model.is_length_exact or is_overridden:
        return f"--max-model-len {wanted}: the model's config states {most}; vLLM may refuse more"
    raise ConfigError(
        f"--max-model-len {wanted}: the model takes {most}",
        hint=f"use --max-model-len {most}, or leave it out",
    )


def kv_bytes_per_token(
    config: EngineConfig, values: Mapping[str, Any], heads: int, kv_heads: int, dtype: str
) -> int:
    """What one token takes in the KV cache over all layers: keys and values of every key-value head.

    Models with latent attention (DeepSeek) keep one compressed vector and one rotary key per layer.
    """
    layers = number(values, "num_hidden_layers", "n_layer", "n_layers")
    element = DTYPE_BYTES.get(dtype, 2)
    if str(config.engine_args.get("kv_cache_dtype", "")).startswith("fp8"):
        element = 1
    latent = number(values, LATENT_RANK)
    if latent:
        return layers * (latent + number(values, "qk_rope_head_dim")) * element
    hidden = number(values, "hidden_size", "n_embd", "d_model")
    head_size = number(values, "head_dim") or (hidden // heads if heads else 0)
    return 2 * layers * kv_heads * head_size * element
