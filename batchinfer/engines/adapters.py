"""LoRA adapters: where their files are, whether vLLM takes them for the run's model, and what they are made of.

An adapter is a folder in PEFT's format: adapter_config.json and adapter_model.safetensors (or .bin, .pt). Most reasons
for which vLLM would refuse an adapter are found here, before the model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from batchinfer.core.errors import BatchinferError, ConfigError, EngineLoadError
from batchinfer.core.records import Record
from batchinfer.engines.bucket_models import (
    cache_folder,
    fetch,
    is_in_bucket,
    list_model,
    plain_path,
)
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.models import ModelInfo, looks_like_path
from batchinfer.engines.weights import check_weights, read_header
from batchinfer.storage.hub import hub_errors

logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Names of weight files, in the order in which vLLM prefers them."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes as `max_lora_rank`."""
MOST_SLOTS = 8
"""Most adapters that a GPU holds at the same time by default. If a run has more, they take turns."""

_HINT = "vLLM takes plain LoRA adapters in PEFT's format"
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.\w+)*?(?:\.weight)?"
)
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_FROM_HIDDEN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Ends of names of layers whose input has the model's hidden size."""
_TO_HIDDEN = ("o_proj", "down_proj")
_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "use_dora": bool,
    "lora_bias": bool,
    "use_qalora": bool,
    "use_bdlora": bool,
    "alora_invocation_tokens": bool,
    "layer_replication": bool,
    "modules_to_save": bool,
    "bias": lambda value: value not in (None, "none"),
}
"""Fields of adapter_config.json, each with a test of its value. vLLM does not take an adapter if a test is true."""


class AdapterInfo(Record, frozen=True, kw_only=True):
    """A checked adapter. `folder` is on this machine."""

    name: str
    folder: str
    identity: str
    """Hash of the adapter's config and weights. Equal files have equal hashes, wherever they come from."""
    rank: int


def describe_adapters(config: EngineConfig) -> list[AdapterInfo]:
    """Describe the run's adapters, in the order of their names. Those on the Hub or in a bucket are fetched.

    Raises:
        ConfigError: an adapter is not there, is cut short, or vLLM does not take it; the message has its name.
        InputError: the Hub has no such repository.
        AccessDenied: the Hub or the store refuses access.
        EngineLoadError: the Hub cannot be reached.
        StorageError: the store failed after its retries.
    """
    cache = str(cache_folder(config))
    return [_describe(name, source, cache) for name, source in sorted(config.loras.items())]


def check_adapters(config: EngineConfig, model: ModelInfo | None) -> list[AdapterInfo]:
    """Refuse adapters whose sizes show that they were made for another model, and return the descriptions of all.

    Only safetensors files show sizes. Without a model, as in a rehearsal, only the adapters' own files are checked.

    Raises:
        ConfigError: an adapter does not fit; the message has its name, and says what differs.
        ConfigError, InputError, AccessDenied, EngineLoadError, StorageError: as in `describe_adapters`.
    """
    adapters = describe_adapters(config)
    if model is None:
        return adapters
    for adapter in adapters:
        path = Path(adapter.folder) / WEIGHT_FILES[0]
        if path.is_file():
            _check_shapes(adapter, _tensors(path), model)
        _compare_names(adapter, config.model)
    return adapters


def adapter_bytes(config: EngineConfig, model: ModelInfo) -> int:
    """Return about how many bytes of GPU memory the run's adapters take: each slot has room for the highest rank."""
    if not config.loras:
        return 0
    adapters = describe_adapters(config)
    slots = asked_slots(config) or slot_count(adapters, is_cpu=False)
    return slots * slot_rank(adapters) * model.adapter_bytes_per_rank


def asked_slots(config: EngineConfig) -> int | None:
    """Return the number of slots that --engine-arg max_loras asks for; None if it is not given.

    Raises:
        ConfigError: it is no whole number above 0.
    """
    slots = config.engine_args.get("max_loras")
    if slots is not None and (type(slots) is not int or slots < 1):
        raise ConfigError(f"--engine-arg max_loras: is {slots}, expected a whole number above 0")
    return slots


def slot_count(adapters: list[AdapterInfo], *, is_cpu: bool) -> int:
    """Return an engine's number of slots by default. A slot holds one adapter.

    On a CPU there is one more slot than adapters. vLLM's kernels for the CPU give rows without an adapter the adapter
    in the last slot, so this slot must stay empty.
    """
    return len(adapters) + 1 if is_cpu else min(len(adapters), MOST_SLOTS)


def slot_rank(adapters: list[AdapterInfo]) -> int:
    """Return the least value of `max_lora_rank` with which vLLM takes these adapters."""
    rank = max(adapter.rank for adapter in adapters)
    return next(each for each in RANKS if each >= rank)


# --------------------------------------------------------------------------- finding and reading


@lru_cache(maxsize=256)
def _describe(name: str, source: str, cache: str) -> AdapterInfo:
    """Describe one adapter. A process does this once for each, so that all its parts use the same version."""
    subject = f"--lora {name}"
    folder = _find(subject, source, Path(cache))
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    if CONFIG_FILE not in files:
        raise ConfigError(f"{subject}: {source} has no {CONFIG_FILE}", hint=_HINT)
    weights = next((each for each in WEIGHT_FILES if each in files), None)
    if weights is None:
        raise ConfigError(f"{subject}: {source} has no weights ({WEIGHT_FILES[0]})", hint=_HINT)
    rank = _read_rank(subject, files[CONFIG_FILE])
    check_weights(subject, files, [weights])
    digest = hashlib.sha256()
    for each in (CONFIG_FILE, weights):
        with files[each].open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return AdapterInfo(
        name=name, folder=str(folder.resolve()), identity=digest.hexdigest()[:40], rank=rank
    )


def _find(subject: str, source: str, cache: Path) -> Path:
    """Return the local folder of an adapter. From the Hub or a bucket, it is fetched to a cache of this machine."""
    if is_in_bucket(source):
        listed = list_model(source, subject)
        return fetch(listed, listed.loaded_weights, cache)
    path = plain_path(source)
    if path.is_dir():
        return path
    if looks_like_path(source) or "/" not in source:
        raise ConfigError(
            f"{subject}: {source} is no folder on this machine",
            hint=f"give a folder that holds {CONFIG_FILE}, its URL in a bucket, or a name on the Hub as in org/adapter",
        )
    import huggingface_hub as hub
    from huggingface_hub import errors

    patterns = [CONFIG_FILE, *WEIGHT_FILES]
    try:
        with hub_errors(f"{subject}: {source}"):
            return Path(hub.snapshot_download(source, allow_patterns=patterns))
    except errors.LocalEntryNotFoundError as error:
        raise EngineLoadError(
            f"{subject}: {source} is not in this machine's cache, and the Hub cannot be reached",
            hint="check the network, and HF_HUB_OFFLINE",
        ) from error


def _read_rank(subject: str, path: Path) -> int:
    """Return the largest rank of an adapter, after refusing a config that vLLM does not take."""
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{subject}: {path} is not JSON ({error})", hint=_HINT) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{subject}: {path} holds no JSON object", hint=_HINT)
    kind = values.get("peft_type", "LORA")
    if kind != "LORA":
        raise ConfigError(f"{subject}: is an adapter of the type {kind}, expected LORA", hint=_HINT)
    for field, is_set in _UNSUPPORTED.items():
        if is_set(values.get(field)):
            shown = json.dumps(values[field])[:100]
            raise ConfigError(
                f"{subject}: has {field} = {shown}, which vLLM does not support",
                hint="train a plain LoRA adapter, or merge this one into the model's weights",
            )
    pattern = values.get("rank_pattern") or {}
    ranks = [values.get("r"), *(pattern.values() if isinstance(pattern, dict) else [pattern])]
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise ConfigError(f"{subject}: has no rank (`r` of {CONFIG_FILE}) above 0", hint=_HINT)
    rank = max(ranks)
    if rank > RANKS[-1]:
        raise ConfigError(
            f"{subject}: has rank {rank}, and vLLM takes up to {RANKS[-1]}",
            hint="merge it into the model's weights, or train one of a lower rank",
        )
    return int(rank)


# --------------------------------------------------------------------------- fitting the model


def _tensors(path: Path) -> dict[str, dict[str, list[int]]]:
    """Return the shapes of an adapter's matrices A and B, by the name of the layer that they change."""
    found: dict[str, dict[str, list[int]]] = {}
    for name, shape in read_header(path).items():
        if match := _TENSOR.fullmatch(name):
            found.setdefault(match[1], {})[match[2]] = shape
    return found


def _check_shapes(
    adapter: AdapterInfo, layers: dict[str, dict[str, list[int]]], model: ModelInfo
) -> None:
    subject = f"--lora {adapter.name}"
    if not layers:
        raise ConfigError(f"{subject}: its weights file has no LoRA matrices", hint=_HINT)
    for name, shapes in layers.items():
        left, right = shapes.get("A"), shapes.get("B")
        if left is None or right is None:
            raise ConfigError(
                f"{subject}: the layer {name} lacks one of its two matrices", hint=_HINT
            )
        if len(left) != 2 or len(right) != 2:
            raise ConfigError(
                f"{subject}: its weights file is damaged: the layer {name} has matrices of the shapes "
                f"{left} and {right}",
                hint=_HINT,
            )
        size = None
        if name.endswith(_FROM_HIDDEN):
            size = left[-1]
        elif name.endswith(_TO_HIDDEN):
            size = right[0]
        problem = ""
        if model.hidden_size and size not in (None, model.hidden_size):
            problem = f"{name} is made for a hidden size of {size}, and the model's is {model.hidden_size}"
        layer = _LAYER.search(f".{name}")
        if model.num_layers and layer is not None and int(layer[1]) >= model.num_layers:
            problem = f"it changes layer {layer[1]}, and the model has {model.num_layers} layers"
        if problem:
            raise ConfigError(
                f"{subject}: was made for another model: {problem}",
                hint="see base_model_name_or_path in its adapter_config.json",
            )


def _compare_names(adapter: AdapterInfo, model: str) -> None:
    """Log a warning if an adapter's config names another model than the run's."""
    values = json.loads((Path(adapter.folder) / CONFIG_FILE).read_bytes())
    base = str(values.get("base_model_name_or_path") or "")
    if base and base.rstrip("/").rpartition("/")[2] != model.rstrip("/").rpartition("/")[2]:
        logger.warning(
            "--lora %s: was trained for %s, and the run's model is %s", adapter.name, base, model
        )


def refused_adapter(adapter: AdapterInfo, reason: str) -> BatchinferError:
    """Return the error for an adapter that vLLM itself refuses when it is loaded."""
    return ConfigError(f"--lora {adapter.name}: vLLM does not take it: {reason}", hint=_HINT)
