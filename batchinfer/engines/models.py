"""A model's identity, length and rough size, read from its config and its list of files. No weights are downloaded.

What a server can load is for the server to say. This module answers what must be known before: which model is it (for
the run's fingerprint), how long may a sequence be, and about how much memory does it take (for the number of GPUs).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from batchinfer.core.errors import BatchinferError, ConfigError
from batchinfer.core.records import Record
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.engines.model_files import ModelFiles, model_files, weight_files

CONFIG_FILE = "config.json"
# Names of config entries that state the longest sequence. If a config has several of them, the smallest value counts.
_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
_BYTES_OF_A_NUMBER = 2
_MEDIA = ("vision_", "image_", "mm_", "audio_")
"""Beginnings of entries that only models have which take images or sounds."""


class ModelInfo(Record, frozen=True, kw_only=True):
    """A model's description. If the model's config lacks a value, the number is 0 or the text is empty."""

    identity: str
    """Text that identifies the model in a run's fingerprint. For a model on the Hub it is the commit. For local files
    it is a hash of the small files and of samples of the weights. For a model in a bucket it is a hash of the names,
    sizes and etags of its files."""
    revision: str = ""
    """Commit of the model on the Hub; empty for any other model."""
    max_model_len: int = 0
    parameter_bytes: int = 0
    """Bytes of all weights in memory. This is an estimate: weights that vLLM quantizes while loading take less."""
    kv_bytes_per_token: int = 0
    """Bytes of KV cache per token. This is an estimate: models with attention windows or shared caches take less."""
    num_heads: int = 0
    num_kv_heads: int = 0
    is_multimodal: bool = False


def describe_model(config: EngineConfig) -> ModelInfo:
    """Describe a model in a local folder, in a bucket or on the Hub. Writes nothing but small files in local caches.

    Raises:
        ConfigError: the folder does not exist, or holds no model.
        InputError: the Hub has no such model or revision, or there is no such bucket.
        AccessDenied: the Hub wants a token for this model, the user must accept its licence first, or a bucket refuses
            access.
        EngineLoadError: the Hub cannot be reached and the model is not in the cache.
        StorageError: a bucket cannot be read.
    """
    files = model_files(config.model, config.revision)
    values = _read_config(config.model, files)
    heads = _number(values, "num_attention_heads", "n_head", "n_heads")
    kv_heads = _number(values, "num_key_value_heads", "multi_query_group_num") or heads
    hidden = _number(values, "hidden_size", "n_embd", "d_model")
    cached = 2 * kv_heads * (_number(values, "head_dim") or (hidden // heads if heads else 0))
    if latent := _number(values, "kv_lora_rank"):
        # Models with latent attention (DeepSeek) keep one compressed vector and one rotary key, on every GPU.
        cached, kv_heads = latent + _number(values, "qk_rope_head_dim"), 1
    layers = _number(values, "num_hidden_layers", "n_layer", "n_layers")
    return ModelInfo(
        identity=files.identity,
        revision=files.revision,
        max_model_len=longest_length(values),
        parameter_bytes=sum(files.sizes[each] for each in weight_files(files.sizes)),
        kv_bytes_per_token=layers * cached * _BYTES_OF_A_NUMBER,
        num_heads=heads,
        num_kv_heads=kv_heads,
        is_multimodal=any(each.startswith(_MEDIA) for each in values),
    )


def end_mark(config: EngineConfig) -> str:
    """Return the text of the model's end-of-sequence token; "" if its files do not say it, or cannot be read."""
    try:
        found = tokenizer_config(model_files(*config.tokenizer)).get("eos_token")
    except BatchinferError:
        return ""
    return str(found.get("content", "") if isinstance(found, dict) else found or "")


def tokenizer_config(files: ModelFiles) -> dict[str, Any]:
    """Return what tokenizer_config.json says; nothing if it is not there or damaged, which the server tells better."""
    name = "tokenizer_config.json"
    try:
        found = json.loads(files.read(name)) if name in files.sizes else {}
    except (OSError, LookupError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# --------------------------------------------------------------------------- config.json


def _read_config(name: str, files: ModelFiles) -> dict[str, Any]:
    """Read config.json. In a multimodal model's config, entries of the part `text_config` replace outer entries."""
    others = {"params.json"} | {each for each in files.sizes if each.endswith(".gguf")}
    if CONFIG_FILE not in files.sizes and others & files.sizes.keys():
        return {}
    try:
        values = json.loads(files.read(CONFIG_FILE))
        return {**values, **(values.get("text_config") or {})}
    except (LookupError, OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        message = f"--model: {name} has no {CONFIG_FILE} that describes its shape ({error!r})"
        hint = "is this the model's folder, and is it there whole?"
        raise ConfigError(message, hint=hint) from error


def _number(values: Mapping[str, Any], *names: str) -> int:
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
    stated = [_number(values, name) for name in _LENGTHS]
    return _number(values, "model_max_length") or min(filter(None, stated), default=0)
