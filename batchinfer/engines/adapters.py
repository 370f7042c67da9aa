"""LoRA adapters: where their files are, what they are made of, and whether their matrices fit the model.

An adapter is a folder in PEFT's format: adapter_config.json and adapter_model.safetensors (or .bin, .pt). Whether vLLM
takes its kind is for vLLM to say, when the server loads it. But vLLM copies matrices of other sizes than it expects as
far as they go, and then answers wrongly; so their shapes are compared here.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Record
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.engines.model_files import hash_files, hub_folder, local_copy

logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Names of weight files, in the order in which vLLM prefers them."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes as --max-lora-rank."""
MOST_SLOTS = 8
"""Most adapters that a GPU holds at the same time by default. If a run has more, they take turns."""
_MATRIX = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.\w+)*")
_FUSED = (".experts", ".experts.base_layer")
"""Ends of the names of layers whose experts are one tensor. Their matrices are as high as all experts' together."""


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
    files = (CONFIG_FILE, *WEIGHT_FILES)
    folder = local_copy(place) or hub_folder(f"{subject}: {place}", place, files)
    try:
        values = json.loads((folder / CONFIG_FILE).read_bytes())
        ranks = {values["r"], *(values.get("rank_pattern") or {}).values()}
        weights = [each for each in WEIGHT_FILES if (folder / each).is_file()] or WEIGHT_FILES
        identity = hash_files([folder / CONFIG_FILE, folder / weights[0]], is_sampled=False)
        if not 0 < max(ranks) <= RANKS[-1]:
            raise ValueError(f"r is {max(ranks)}, expected 1 to {RANKS[-1]}")
        for layer, pair in _matrices(folder).items():
            if len({pair["A"][0], pair["B"][1]}) > 1 or pair["A"][0] not in ranks:
                raise ValueError(f"r is {max(ranks)}, and the matrices of {layer} are {pair}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        hint = "vLLM takes plain LoRA adapters in PEFT's format"
        message = f"{subject}: {place} is no adapter, or is damaged: {error}"
        raise ConfigError(message, hint=hint) from error
    place = str(folder.resolve())
    return AdapterInfo(name=name, folder=place, identity=identity, rank=max(ranks))


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
        pairs = _matrices(Path(adapter.folder))
        known = {layer: layers.get(f"{layer}.weight") for layer in pairs}
        if not any(known.values()):
            continue
        for layer, shape in known.items():
            made_for = [pairs[layer]["B"][0], pairs[layer]["A"][1]]
            if shape not in (made_for, made_for[::-1]):
                has = f"has {shape}" if shape else "has no such layer"
                message = f"--lora {adapter.name}: was made for another model: {layer} is "
                hint = f"see base_model_name_or_path in its {CONFIG_FILE}"
                raise ConfigError(f"{message}{made_for} there, and {model} {has}", hint=hint)


def _layers(model: str, revision: str | None) -> dict[str, list[int]]:
    """Return the shapes of a model's tensors by their names; empty if no safetensors file shows them."""
    if Path(model).is_dir():
        paths = sorted(Path(model).glob("*.safetensors"))
        return {name: shape for path in paths for name, shape in _shapes(path).items()}
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        found = hub.get_safetensors_metadata(model, revision=revision)
    except (errors.HfHubHTTPError, errors.NotASafetensorsRepoError, OSError) as error:
        logger.info("%s: its layers cannot be compared with the adapters' (%s)", model, error)
        return {}
    files = found.files_metadata.values()
    return {name: tensor.shape for file in files for name, tensor in file.tensors.items()}


def _matrices(folder: Path) -> dict[str, dict[str, list[int]]]:
    """Return the shapes of an adapter's pairs of matrices, A and B, by layer; none if no file shows them."""
    found: dict[str, dict[str, list[int]]] = {}
    for name, shape in _shapes(folder / WEIGHT_FILES[0]).items():
        match = _MATRIX.fullmatch(name)
        if match and not match[1].endswith(_FUSED):
            found.setdefault(match[1], {})[match[2]] = shape
    return {layer: pair for layer, pair in found.items() if pair.keys() == {"A", "B"}}


def _shapes(path: Path) -> dict[str, list[int]]:
    """Return the shapes of a safetensors file's tensors; none if the file is damaged, which is for vLLM to refuse."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries: dict[str, Any] = json.loads(file.read(min(length, path.stat().st_size)))
    except (OSError, ValueError):
        return {}
    return {name: entry["shape"] for name, entry in entries.items() if "shape" in entry}


def write_options(
    adapters: Sequence[AdapterInfo], *, is_cpu: bool, asked_slots: int | None = None
) -> list[str]:
    """Return the options with which vLLM's server loads the adapters.

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
    slots = asked_slots or (len(adapters) + 1 if is_cpu else min(len(adapters), MOST_SLOTS))
    if is_cpu and slots <= len(adapters):
        why = "vLLM answers rows without an adapter by the adapter in the last slot"
        raise ConfigError(f"--max-loras: is {slots}, too few on a CPU: {why}", hint="leave it out")
    rank = next(each for each in RANKS if each >= max(one.rank for one in adapters))
    options = ["--enable-lora", "--max-lora-rank", str(rank)]
    options += ["--max-loras", str(slots), "--max-cpu-loras", str(max(slots, len(adapters) + 1))]
    listed = [json.dumps({"name": each.name, "path": each.folder}) for each in adapters]
    return [*options, "--lora-modules", *listed]
