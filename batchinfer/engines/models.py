"""A model's identity, length and rough size, read from its config and its list of files. No weights are downloaded.

What a server can load is for the server to say. This module answers what must be known before: which model is it (for
the run's fingerprint), how long may a sequence be, and about how much memory does it take (for the number of GPUs).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchinfer.core.errors import BatchinferError, ConfigError, EngineLoadError
from batchinfer.core.records import Record
from batchinfer.engines import Stop
from batchinfer.engines.buckets import (
    ANSWER_SUFFIXES,
    WEIGHT_SUFFIXES,
    ModelFiles,
    fetch,
    is_in_bucket,
    list_model,
    weight_files,
)
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.storage.hub import hub_errors
from batchinfer.storage.opening import local_path

CONFIG_FILE = "config.json"
# Small files that are read of a model on the Hub; params.json is its config in Mistral's own format.
_SMALL_FILES = ("*config.json", "chat_template*", "params.json")
_SAMPLE_BYTES = 1 << 20
# Names of config entries that state the longest sequence. If a config has several of them, the smallest value counts.
_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
_BYTES_OF_A_NUMBER = 2


class ModelInfo(Record, frozen=True, kw_only=True):
    """A model's description. If the model's config lacks a value, the number is 0 or the text is empty."""

    name: str
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
        name=config.model,
        identity=files.identity,
        revision=files.revision,
        max_model_len=longest_length(values),
        parameter_bytes=sum(files.sizes[each] for each in weight_files(files.sizes)),
        kv_bytes_per_token=layers * cached * _BYTES_OF_A_NUMBER,
        num_heads=heads,
        num_kv_heads=kv_heads,
        is_multimodal=any(
            each.startswith(("vision_", "image_", "mm_", "audio_")) for each in values
        ),
    )


def model_files(name: str, revision: str | None = None) -> ModelFiles:
    """List a model's files; see `describe_model` for the errors."""
    if is_in_bucket(name):
        return list_model(name)
    path = local_path(name)
    if path.is_file():  # weights in GGUF's format
        return ModelFiles(hash_files([path]), "", {path.name: path.stat().st_size}, lambda _: b"")
    if path.is_dir():
        return _files_in(path)
    subject = f"--model: {name}" + (f" at --revision {revision}" if revision else "")
    return _files_on_hub(name, hub_folder(subject, name, _SMALL_FILES, revision))


def end_mark(config: EngineConfig) -> str:
    """Return the text of the model's end-of-sequence token; "" if its files do not say it, or cannot be read."""
    name = str(config.server_options.get("tokenizer") or config.model)
    try:
        text = model_files(name, config.revision).read("tokenizer_config.json")
        found = json.loads(text)["eos_token"]
    except (BatchinferError, OSError, LookupError, TypeError, ValueError):
        return ""
    return str(found.get("content", "") if isinstance(found, dict) else found or "")


def local_copy(name: str, stop: Stop | None = None) -> Path | None:
    """Return the place of a model or an adapter on this machine, fetched from its bucket; None for a name on the Hub.

    Raises:
        BatchinferError: as `buckets.fetch`.
    """
    if is_in_bucket(name):
        return fetch(name, stop)
    path = local_path(name)
    return path if path.exists() else None


def _files_in(folder: Path) -> ModelFiles:
    paths = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    weights = weight_files(paths)
    hashed = [path for name, path in paths.items() if name.endswith(ANSWER_SUFFIXES)]
    identity = hash_files([*hashed, *(paths[name] for name in weights)])
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    return ModelFiles(identity, "", sizes, lambda name: paths[name].read_bytes())


def hash_files(paths: list[Path]) -> str:
    """Return a hash of names, sizes and content. Of weights only both ends are read, since they are large."""
    digest = hashlib.sha256()
    for path in paths:
        num_bytes = path.stat().st_size
        digest.update(f"{path.name}\0{num_bytes}\n".encode())
        with path.open("rb") as file:
            if path.suffix in WEIGHT_SUFFIXES:
                digest.update(file.read(_SAMPLE_BYTES))
                file.seek(max(0, num_bytes - _SAMPLE_BYTES))
            digest.update(file.read())
    return digest.hexdigest()[:40]


def hub_folder(
    subject: str, name: str, patterns: Sequence[str], revision: str | None = None
) -> Path:
    """Fetch files from the Hub to its cache. If it cannot be reached, the cache's own copy is taken.

    Returns:
        The folder with the files, whose name is the commit.

    Raises:
        ConfigError: the name can only be a path, and there is nothing.
        InputError, AccessDenied: the Hub has no such repository, or refuses access.
        EngineLoadError: the Hub cannot be reached, and the cache has no copy.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise ConfigError(
            f"{subject} is no folder on this machine",
            hint="give a folder, its URL in a bucket, or a name on the Hub as in Qwen/Qwen3-0.6B",
        )
    with hub_errors(subject):
        try:
            return Path(hub.snapshot_download(name, revision=revision, allow_patterns=[*patterns]))
        except errors.LocalEntryNotFoundError as error:
            raise (ConfigError if constants.HF_HUB_OFFLINE else EngineLoadError)(
                f"{subject} is no folder on this machine and not in its cache, and the Hub is not reached",
                hint="check the spelling, the network, and HF_HUB_OFFLINE",
            ) from error


def _files_on_hub(name: str, folder: Path) -> ModelFiles:
    """Return the files of a model on the Hub whose small ones are in a folder."""
    import huggingface_hub as hub

    commit, local = folder.name, _files_in(folder)
    sizes = local.sizes
    with contextlib.suppress(BatchinferError), hub_errors(name):
        info = hub.HfApi().model_info(name, revision=commit, files_metadata=True, timeout=30.0)
        found = {file.rfilename: file.size or 0 for file in info.siblings or []}
        sizes = {key: each for key, each in found.items() if "/" not in key}
    return ModelFiles(commit, commit, sizes, local.read)


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
        raise ConfigError(
            f"--model: {name} has no {CONFIG_FILE} that describes the model's shape ({error!r})",
            hint="is this the model's folder, and is it there whole?",
        ) from error


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
