"""LoRA adapters: where their files are, what they are made of, and whether their matrices fit the model.

An adapter is a folder in PEFT's format: adapter_config.json and adapter_model.safetensors (or .bin, .pt). Whether vLLM
takes its kind is for vLLM to say, when the server loads it. But vLLM copies matrices of other sizes than it expects as
far as they go, and then answers wrongly; so their shapes are compared here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from batchinfer.core.errors import ConfigError, EngineLoadError
from batchinfer.core.records import Record
from batchinfer.engines.buckets import cache_folder, fetch, is_in_bucket, list_model
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.models import looks_like_path, plain_path
from batchinfer.storage.hub import hub_errors

logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Names of weight files, in the order in which vLLM prefers them."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes as --max-lora-rank."""
MOST_SLOTS = 8
"""Most adapters that a GPU holds at the same time by default. If a run has more, they take turns."""
_MATRIX = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.\w+)*?(?:\.weight)?"
)


class AdapterInfo(Record, frozen=True, kw_only=True):
    """An adapter. `folder` is on this machine."""

    name: str
    folder: str
    identity: str
    """Hash of the adapter's config and weights. Equal files have equal hashes, wherever they come from."""
    rank: int


def describe_adapters(config: EngineConfig) -> list[AdapterInfo]:
    """Describe the run's adapters, in the order of their names. Those on the Hub or in a bucket are fetched.

    Raises:
        ConfigError: an adapter is not there, or its matrices contradict its config; the message has its name.
        InputError: the Hub has no such repository.
        AccessDenied: the Hub or the store refuses access.
        EngineLoadError: the Hub cannot be reached.
        StorageError: the store failed after its retries.
    """
    return [_describe(name, place) for name, place in sorted(config.loras.items())]


def _describe(name: str, place: str) -> AdapterInfo:
    subject = f"--lora {name}"
    folder = _find(subject, place)
    weights = next((each for each in WEIGHT_FILES if (folder / each).is_file()), None)
    try:
        if weights is None or not (folder / CONFIG_FILE).is_file():
            raise ValueError(f"{WEIGHT_FILES[0] if weights is None else CONFIG_FILE} is not there")
        values = json.loads((folder / CONFIG_FILE).read_bytes())
        ranks = {values.get("r"), *(values.get("rank_pattern") or {}).values()}
        if not all(type(rank) is int and 0 < rank <= RANKS[-1] for rank in ranks):
            raise ValueError(f"r is {values.get('r')}, expected 1 to {RANKS[-1]}")
        for layer, shapes in matrices_of(subject, folder).items():
            if not _is_pair(shapes, ranks):
                raise ValueError(f"r is {max(ranks)}, and the matrices of {layer} are {shapes}")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{subject}: {place} is no adapter, or is damaged: {error}",
            hint="vLLM takes plain LoRA adapters in PEFT's format",
        ) from error
    digest = hashlib.sha256()
    for each in (CONFIG_FILE, weights):
        with (folder / each).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    identity = digest.hexdigest()[:40]
    return AdapterInfo(name=name, folder=str(folder.resolve()), identity=identity, rank=max(ranks))


def _is_pair(shapes: Mapping[str, Sequence[int]], ranks: set[int]) -> bool:
    first, second = shapes.get("A", ()), shapes.get("B", ())
    return len(first) == len(second) == 2 and first[0] == second[1] and first[0] in ranks


def _find(subject: str, place: str) -> Path:
    """Return the local folder of an adapter. From the Hub or a bucket, it is fetched to a cache of this machine."""
    if is_in_bucket(place):
        return fetch(list_model(place, subject), cache_folder())
    path = plain_path(place)
    if path.is_dir():
        return path
    if looks_like_path(place) or "/" not in place:
        raise ConfigError(
            f"{subject}: {place} is no folder on this machine",
            hint=f"give a folder that holds {CONFIG_FILE}, its URL in a bucket, or a name on the Hub as in org/adapter",
        )
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        with hub_errors(f"{subject}: {place}"):
            return Path(hub.snapshot_download(place, allow_patterns=[CONFIG_FILE, *WEIGHT_FILES]))
    except errors.LocalEntryNotFoundError as error:
        raise EngineLoadError(
            f"{subject}: {place} is not in this machine's cache, and the Hub cannot be reached",
            hint="check the network, and HF_HUB_OFFLINE",
        ) from error


def matrices_of(subject: str, folder: Path) -> dict[str, dict[str, list[int]]]:
    """Return the shapes of an adapter's matrices A and B by the layer that they change; empty if no file shows them."""
    found: dict[str, dict[str, list[int]]] = {}
    if (folder / WEIGHT_FILES[0]).is_file():
        for name, shape in read_shapes(subject, folder / WEIGHT_FILES[0]).items():
            if match := _MATRIX.fullmatch(name):
                found.setdefault(match[1], {})[match[2]] = shape
    return found


def check_fit(adapters: Sequence[AdapterInfo], model: str, revision: str | None = None) -> None:
    """Refuse adapters whose matrices have other widths than the model's layers. Reads headers of safetensors files.

    Does nothing where the model's weights cannot be looked into, or its layers have other names (quantized models).

    Args:
        adapters: The run's adapters.
        model: Folder of the model, or its name on the Hub.
        revision: Its commit on the Hub.

    Raises:
        ConfigError: an adapter was made for another model; the message has its name.
    """
    layers = _layers(model, revision) if adapters else {}
    for adapter in adapters:
        pairs = matrices_of(f"--lora {adapter.name}", Path(adapter.folder))
        known = {layer: layers.get(f"{layer}.weight") for layer in pairs}
        if not any(known.values()):
            continue
        for layer, shape in known.items():
            made_for = [pairs[layer]["B"][0], pairs[layer]["A"][1]]
            if shape not in (made_for, made_for[::-1]):
                has = f"has {shape}" if shape else "has no such layer"
                raise ConfigError(
                    f"--lora {adapter.name}: was made for another model: {layer} is {made_for} there, "
                    f"and {model} {has}",
                    hint=f"see base_model_name_or_path in its {CONFIG_FILE}",
                )


def _layers(model: str, revision: str | None) -> dict[str, list[int]]:
    """Return the shapes of a model's tensors by their names; empty if no safetensors file shows them."""
    folder = Path(model)
    if folder.is_dir():
        paths = sorted(folder.glob("*.safetensors"))
        return {name: x for path in paths for name, x in read_shapes("--model", path).items()}
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        found = hub.get_safetensors_metadata(model, revision=revision)
    except (errors.HfHubHTTPError, errors.NotASafetensorsRepoError, OSError) as error:
        logger.info("%s: its layers cannot be compared with the adapters' (%s)", model, error)
        return {}
    files = found.files_metadata.values()
    return {name: tensor.shape for file in files for name, tensor in file.tensors.items()}


def read_shapes(subject: str, path: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor of a safetensors file, from its header.

    Raises:
        ConfigError: the file is damaged or cut short.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries: dict[str, Any] = msgspec.json.decode(
                file.read(min(length, path.stat().st_size))
            )
        tensors = {name: entry for name, entry in entries.items() if name != "__metadata__"}
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        if path.stat().st_size != end:
            raise ValueError(f"it has {path.stat().st_size} bytes, and its header says {end}")
        return {name: entry["shape"] for name, entry in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{subject}: the weights file {path} is damaged or cut short ({error})",
            hint="download it again; `hf download NAME` goes on with files that are cut short",
        ) from error


def write_options(
    adapters: Sequence[AdapterInfo], *, is_cpu: bool, asked_slots: Any = None
) -> list[str]:
    """Return the options with which vLLM's server has room for the adapters.

    On a CPU there is one more slot than adapters. vLLM's kernels for the CPU give rows without an adapter the adapter
    in the last slot, so this slot must stay empty.

    Args:
        adapters: The run's adapters.
        is_cpu: Whether vLLM runs on the CPU.
        asked_slots: Value of --max-loras, if it is given.

    Raises:
        ConfigError: --max-loras leaves no slot empty on a CPU.
    """
    if not adapters:
        return []
    if is_cpu and isinstance(asked_slots, int) and asked_slots <= len(adapters):
        raise ConfigError(
            f"--max-loras: is {asked_slots}, expected more than the {len(adapters)} adapters: on a CPU, vLLM answers "
            "rows without an adapter by the adapter in the last slot",
            hint="leave it out",
        )
    rank = next(each for each in RANKS if each >= max(one.rank for one in adapters))
    slots = len(adapters) + 1 if is_cpu else min(len(adapters), MOST_SLOTS)
    options = ["--enable-lora", "--max-lora-rank", str(rank)]
    if asked_slots is None:
        options += ["--max-loras", str(slots), "--max-cpu-loras", str(len(adapters) + 1)]
    return options


def write_modules(adapters: Sequence[AdapterInfo]) -> list[str]:
    """Return the option with the names and folders of the adapters."""
    listed = [json.dumps({"name": each.name, "path": each.folder}) for each in adapters]
    return ["--lora-modules", *listed] if listed else []
