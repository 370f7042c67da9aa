"""A model's identity, sizes and lengths, read from its config and its list of files. No weights are downloaded."""

from __future__ import annotations

import hashlib
import importlib.util
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
from batchinfer.core.tasks import PairForm, is_pooling
from batchinfer.engines.bucket_models import (
    BucketModel,
    cache_folder,
    fetch,
    is_in_bucket,
    list_model,
    plain_path,
)
from batchinfer.engines.config import KV_CACHE_BYTES, EngineConfig
from batchinfer.engines.pooling_models import (
    check_task,
    keeps_no_cache,
    pair_form,
    with_overrides,
)
from batchinfer.engines.weights import (
    ANSWER_SUFFIXES,
    WEIGHT_SUFFIXES,
    check_shards,
    check_weights,
    hash_weights,
    weight_files,
)
from batchinfer.storage.hub import hub_errors
from batchinfer.storage.opening import check_url

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
# Name of the config file in Mistral's own format, which vLLM can read as well.
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
# Names of config entries that state the longest sequence. If a config has several of them, the smallest value counts.
LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
# Names of the config entry with the size of the vectors between layers.
HIDDEN_SIZES = ("hidden_size", "n_embd", "d_model")
# Name of a config entry that exists only for models with latent attention (DeepSeek).
LATENT_RANK = "kv_lora_rank"
# Methods of speculative decoding whose `model` is a checkpoint of its own. None: vLLM finds the method out.
DRAFTING_METHODS = (None, "draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash")
# Engine arguments that hold for a draft model as well.
SHARED_ARGUMENTS = ("load_format", "kv_cache_dtype")
DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4}


class ModelInfo(Record, frozen=True, kw_only=True):
    """A model's description. If the model's config lacks a value, the number is 0 or the text is empty."""

    name: str
    identity: str
    """Text that identifies the model in a run's fingerprint. For a model on the Hub it is the commit. For local files
    it is a hash of the small files and of samples of the weights. For a model in a bucket it is a hash of the names,
    sizes and etags of its files. If the tokenizer comes from a bucket, its files are part of the identity."""
    revision: str = ""
    """Commit of the model on the Hub; empty for a local model."""
    is_local: bool = False
    architecture: str = ""
    dtype: str = ""
    quantization: str = ""
    max_model_len: int = 0
    is_length_exact: bool = False
    """Whether vLLM refuses sequences longer than `max_model_len`. False if the config has other entries from
    which vLLM may derive a higher limit."""
    parameter_bytes: int = 0
    """Bytes of all weights in memory. This is an estimate: weights that vLLM quantizes while loading take less."""
    kv_bytes_per_token: int = 0
    """Bytes of KV cache per token. This is an estimate: models with attention windows or shared caches take less."""
    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    hidden_size: int = 0
    adapter_bytes_per_rank: int = 0
    """Bytes of a LoRA adapter of rank 1 that changes all layers. This is an estimate, for dense models."""
    vocab_size: int = 0
    pairs: PairForm = PairForm.APART
    """How the model reads a pair of texts (--task score)."""
    is_encoder: bool = False
    """Whether the model keeps no KV cache."""
    takes_images: bool = False
    draft_bytes: int = 0
    """Bytes of the weights of the draft model, where --speculative-config names one."""
    draft_kv_bytes_per_token: int = 0


def describe_model(config: EngineConfig) -> ModelInfo:
    """Describe a model in a local folder, in a bucket or on the Hub. Writes nothing but small files in local caches.

    Raises:
        ConfigError: the folder does not exist, or it lacks a config, a tokenizer or weights; the message names what.
        InputError: the Hub has no such model or revision, or there is no such bucket.
        AccessDenied: the Hub wants a token for this model, the user must accept its licence first, or a bucket refuses
            access.
        EngineLoadError: the Hub cannot be reached and the model is not in the cache.
        StorageError: a bucket cannot be read.
    """
    model = _with_draft(_describe(config), config)
    if not is_in_bucket(config.tokenizer):
        return model
    tokenizer = list_model(str(config.tokenizer), "--tokenizer")
    both = hashlib.sha256(f"{model.identity}\0{tokenizer.identity}".encode()).hexdigest()[:40]
    return msgspec.structs.replace(model, identity=both)


def _describe(config: EngineConfig) -> ModelInfo:
    check_url(config.model)
    if is_in_bucket(config.model):
        return describe_in_bucket(config, list_model(config.model, "--model"))
    path = plain_path(config.model)
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


def _with_draft(model: ModelInfo, config: EngineConfig) -> ModelInfo:
    """Return the model's description with the sizes of the draft model, if the run speculates with one."""
    speculation = config.speculation
    name = speculation.get("model")
    if not isinstance(name, str) or speculation.get("method") not in DRAFTING_METHODS:
        return model
    if name.strip("[]") == "ngram":
        return model
    arguments = config.engine_args
    draft = EngineConfig(
        model=name,
        revision=speculation.get("revision"),
        tokenizer=config.model,  # A draft model needs no tokenizer of its own.
        quantization=speculation.get("quantization"),
        dtype=config.dtype,
        engine_args={key: arguments[key] for key in SHARED_ARGUMENTS if key in arguments},
    )
    try:
        described = _describe(draft)
    except BatchinferError as error:
        message = error.message.replace("--model:", "--speculative-config: the draft model", 1)
        raise type(error)(message, hint=error.hint) from error
    return msgspec.structs.replace(
        model,
        draft_bytes=described.parameter_bytes,
        draft_kv_bytes_per_token=described.kv_bytes_per_token,
    )


def lacking_torchvision(config: EngineConfig) -> ConfigError | None:
    """Return the error for a model that takes images where torchvision is not installed; None for all others.

    Image processors of transformers need torchvision. vLLM only says that the model "failed to be inspected".
    """
    if importlib.util.find_spec("torchvision") is not None:
        return None
    try:
        takes_images = describe_model(config).takes_images
    except BatchinferError:
        return None
    if not takes_images:
        return None
    return ConfigError(
        f"--model: {Path(config.model).name} takes images, and the package torchvision is not installed",
        hint="pip install torchvision, in the version that fits the installed torch; for torch without CUDA "
        "from https://download.pytorch.org/whl/cpu (docs/images.md)",
    )


def looks_like_path(name: str) -> bool:
    """Whether a model's name can only be a path, since no name on the Hub looks like it.

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
    if is_checked(config):
        check_weights(subject, files, list(weights))
    return build_info(
        config,
        read_model_config(config, files.get(CONFIG_FILE)),
        sum(weights.values()),
        name=name or config.model,
        identity=hash_folder(files, list(weights)),
        is_local=True,
    )


def check_files(subject: str, names: list[str], config: EngineConfig) -> None:
    """Refuse a model without a config, a tokenizer or weights.

    Raises:
        ConfigError: one of the three is missing. The message names it, and the hint tells what may help.
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


def is_checked(config: EngineConfig) -> bool:
    """Whether vLLM loads the weights as they stand in the files. --engine-arg load_format may name another way."""
    return config.engine_args.get("load_format", "auto") in {"auto", "hf", "safetensors", "pt"}


def hash_folder(files: Mapping[str, Path], weights: list[str]) -> str:
    """Return a hash of those files in a folder that may change the model's answers.

    Small files are hashed whole, and weight files as in `hash_weights`.
    """
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        if name.endswith(ANSWER_SUFFIXES):
            digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    digest.update(hash_weights({name: files[name] for name in weights}).encode())
    return digest.hexdigest()[:40]


# --------------------------------------------------------------------------- a bucket


def describe_in_bucket(config: EngineConfig, model: BucketModel) -> ModelInfo:
    """Describe a model in a bucket. Its small files are fetched, its weights are only listed."""
    subject = f"--model: {config.model}"
    names = [info.key for info in (*model.small, *model.weights) if "/" not in info.key]
    check_files(subject, names, config)
    weights = {info.key: info.bytes for info in model.loaded_weights if "/" not in info.key}
    if is_checked(config):
        check_shards(subject, list(weights))
    folder = fetch(model, (), cache_folder(config))
    return build_info(
        config,
        read_model_config(config, folder / CONFIG_FILE if CONFIG_FILE in names else None),
        sum(weights.values()),
        name=config.model,
        identity=model.identity,
    )


# --------------------------------------------------------------------------- the Hub


def describe_on_hub(config: EngineConfig) -> ModelInfo:
    """Describe a model on the Hub at the configured revision.

    If the Hub refuses access or cannot be reached, describe the model's copy in the Hub's local cache.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants

    subject = f"--model: {config.model}"
    if constants.HF_HUB_OFFLINE:
        return describe_in_cache(config, None)
    try:
        with hub_errors(subject + (f" at --revision {config.revision}" if config.revision else "")):
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
    if is_checked(config):
        check_shards(subject, list(weights))
    return build_info(
        config,
        read_model_config(config, path),
        sum(weights.values()),
        name=config.model,
        identity=info.sha or "",
        revision=info.sha or "",
    )


def describe_in_cache(config: EngineConfig, cause: BatchinferError | None) -> ModelInfo:
    """Describe the copy of a model in the Hub's local cache.

    Args:
        config: Configuration that names the model and its revision.
        cause: Error with which the request to the Hub failed; None if HF_HUB_OFFLINE forbids requests to the Hub.

    Raises:
        AccessDenied: the Hub refused access, and the cache has no copy.
        ConfigError: HF_HUB_OFFLINE is set, and the cache has no copy.
        EngineLoadError: the Hub did not answer, and the cache has no copy.
    """
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        folder = Path(
            hub.snapshot_download(config.model, revision=config.revision, local_files_only=True)
        )
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, OSError) as error:
        if isinstance(cause, AccessDenied):
            raise cause from error
        nowhere = "no folder on this machine and not in its cache"
        if cause is None:
            raise ConfigError(
                f"--model: {config.model} is {nowhere}, and the Hub is switched off by HF_HUB_OFFLINE",
                hint="check the spelling, or unset HF_HUB_OFFLINE",
            ) from error
        raise EngineLoadError(
            f"{cause.message}; and it is {nowhere}",
            hint="if it is a folder, check the spelling; if it is on the Hub, check the network",
        ) from error
    logger.info("%s: taken from the cache, commit %s", config.model, folder.name)
    info = describe_folder(config, folder, name=config.model)
    return msgspec.structs.replace(info, identity=folder.name, revision=folder.name, is_local=False)


# --------------------------------------------------------------------------- config.json


def read_model_config(config: EngineConfig, path: Path | None) -> dict[str, Any]:
    """Read config.json. In a multimodal model's config, entries of the part `text_config` replace outer entries.

    Raises:
        ConfigError: the file is no JSON object, or the folder of --hf-config-path has no config.json.
    """
    if config.hf_config_path and Path(config.hf_config_path).expanduser().is_dir():
        path = Path(config.hf_config_path).expanduser() / CONFIG_FILE
        if not path.is_file():
            raise ConfigError(f"--hf-config-path: {config.hf_config_path} holds no {CONFIG_FILE}")
    if path is None:
        return {}
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON ({error}), expected a model's config") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds no JSON object, expected a model's config")
    inner = values.get("text_config")
    return {**values, **inner} if isinstance(inner, dict) else values


def build_info(
    config: EngineConfig, values: Mapping[str, Any], weight_bytes: int, **identity: Any
) -> ModelInfo:
    """Build a model's description from the values of its config.json and the bytes of its weight files.

    `identity` holds the fields of `ModelInfo` that say which model it is.
    """
    task_values = with_overrides(config, values)
    check_task(config, task_values)
    is_encoder = is_pooling(config.task) and keeps_no_cache(task_values)
    stored = str(values.get("dtype") or values.get("torch_dtype") or "").removeprefix("torch.")
    # If the user's dtype is "auto", vLLM runs weights that are stored as float32 in 16 bits.
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
        # With latent attention, each GPU of a tensor-parallel group keeps the whole latent vector, as if it were one
        # key-value head.
        kv_heads = 1
    architectures = values.get("architectures") or [""]
    return ModelInfo(
        architecture=str(architectures[0]),
        dtype=dtype,
        quantization=quantization,
        max_model_len=longest_length(values),
        is_length_exact=not has_other_lengths(values) and not config.hf_config_path,
        parameter_bytes=parameter_bytes,
        kv_bytes_per_token=0
        if is_encoder
        else kv_bytes_per_token(config, values, heads, kv_heads, dtype),
        num_layers=number(values, "num_hidden_layers", "n_layer", "n_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        hidden_size=number(values, *HIDDEN_SIZES),
        adapter_bytes_per_rank=adapter_bytes_per_rank(values, heads, kv_heads, dtype),
        vocab_size=number(values, "vocab_size"),
        pairs=pair_form(task_values),
        is_encoder=is_encoder,
        takes_images=any(name.startswith(("vision_", "image_", "mm_")) for name in values),
        **identity,
    )


def number(values: Mapping[str, Any], *names: str) -> int:
    """Return the first of the named entries that is a positive integer, or 0 if none is."""
    for name in names:
        value = values.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def longest_length(values: Mapping[str, Any]) -> int:
    """Return the tokens of the longest sequence that a config allows, by vLLM's rules; 0 if the config states none.

    >>> longest_length({"max_position_embeddings": 8192, "seq_length": 2048})
    2048
    """
    stated = [number(values, name) for name in LENGTHS]
    return number(values, "model_max_length") or min(filter(None, stated), default=0)


def has_other_lengths(values: Mapping[str, Any]) -> bool:
    """Whether a nested part of the config has an entry from which vLLM may derive another longest sequence.

    Such an entry is a scaling factor of positions, or one of `LENGTHS`.
    """
    parts = [part for name, part in values.items() if name != "text_config"]
    return any(
        not part.keys().isdisjoint({"factor", *LENGTHS}) or has_other_lengths(part)
        for part in parts
        if isinstance(part, dict)
    )


def check_length(config: EngineConfig, model: ModelInfo) -> str:
    """Refuse a --max-model-len that vLLM would refuse later, when the engine loads.

    Returns:
        A warning if the model's config states a shorter length, but vLLM may still accept --max-model-len; else "".

    Raises:
        ConfigError: --max-model-len is more than the model's longest sequence, and no option overrides that.
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


def adapter_bytes_per_rank(values: Mapping[str, Any], heads: int, kv_heads: int, dtype: str) -> int:
    """Return the bytes of a LoRA adapter of rank 1 that changes every linear layer: one number per input and output."""
    hidden = number(values, *HIDDEN_SIZES)
    inner = number(values, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    head_size = number(values, "head_dim") or (hidden // heads if heads else 0)
    attention = 2 * (hidden + heads * head_size) + 2 * (hidden + kv_heads * head_size)
    layers = number(values, "num_hidden_layers", "n_layer", "n_layers")
    return layers * (attention + 3 * (hidden + inner)) * DTYPE_BYTES.get(dtype, 2)


def kv_bytes_per_token(
    config: EngineConfig, values: Mapping[str, Any], heads: int, kv_heads: int, dtype: str
) -> int:
    """Return the bytes that one token takes in the KV cache, for all layers together.

    In each layer, a token takes a key and a value for each key-value head. In models with latent attention (DeepSeek),
    it takes one compressed vector and one rotary key per layer instead.
    """
    layers = number(values, "num_hidden_layers", "n_layer", "n_layers")
    cache = config.engine_args.get("kv_cache_dtype") or cache_dtype(values)
    element = KV_CACHE_BYTES.get(str(cache)) or DTYPE_BYTES.get(dtype, 2)
    latent = number(values, LATENT_RANK)
    if latent:
        return int(layers * (latent + number(values, "qk_rope_head_dim")) * element)
    hidden = number(values, *HIDDEN_SIZES)
    head_size = number(values, "head_dim") or (hidden // heads if heads else 0)
    return int(2 * layers * kv_heads * head_size * element)


def cache_dtype(values: Mapping[str, Any]) -> str:
    """Return the type of the KV cache that a quantized model's config states; "auto" if it states none.

    vLLM reads it in configs of the method modelopt. For other methods it takes 16 bits.
    """
    method = values.get("quantization_config")
    if not isinstance(method, dict) or not str(method.get("quant_method")).startswith("modelopt"):
        return "auto"
    inner = method.get("quantization")
    found = (inner if isinstance(inner, dict) else method).get("kv_cache_quant_algo")
    scheme = method.get("kv_cache_scheme")
    if isinstance(scheme, dict) and scheme.get("type") == "float":
        found = {8: "fp8", 4: "nvfp4"}.get(int(scheme.get("num_bits") or 0), found)
    name = str(found or "").lower()
    return name if name in {"fp8", "nvfp4"} else "auto"
