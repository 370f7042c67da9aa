"""The conversion `composer-to-hf`: a Composer checkpoint becomes a folder that transformers and vLLM load.

Composer's `HuggingFaceModel` puts the config and the tokenizer's files into the checkpoint beside the weights:
`state/integrations/huggingface/model/config/content` and `state/integrations/huggingface/tokenizer/NAME/content`. Names
of weights begin with "model.". This is the layout of Composer 0.33. Tokenizer files without an ending in their names,
as older versions write them, are read as well.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from batchinfer.convert.checkpoint import Inert, read_checkpoint
from batchinfer.convert.places import Conversion
from batchinfer.core.errors import InputError
from batchinfer.engines.models import CONFIG_FILE, TOKENIZER_FILES

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
SHARD_BYTES = 5_000_000_000
"""Most bytes of weights in one file. A single larger tensor gets a file of its own."""

_M_MMAP_THRESHOLD = -3
"""Number that stands for this setting in glibc's malloc.h."""
_PREFIX = "model."
_PEFT_PREFIX = "base_model.model."
_TOKENIZER_EXTRAS = (
    *("special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja"),
    *("chat_template.json", "generation_config.json"),
)
_MONOLITH_HINT = (
    "merge the shards first: python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER merged.pt; "
    "or let Composer save with state_dict_type: full"
)


class ComposerConfig(NamedTuple):
    """Options of a conversion. `dtype` is a key of `DTYPES`, or "" to keep each tensor's type."""

    source: str
    dtype: str = ""
    tokenizer: Path | None = None
    trust_remote_code: bool = False


def convert(config: ComposerConfig, work: Conversion) -> dict[str, Any]:
    """Write the result's files to `work.folder`, and return what the command reports about them.

    Raises:
        InputError: The checkpoint cannot be converted; the message says why.
    """
    path = work.fetch_file(config.source)
    _refuse_shards(config.source, path)
    state = _state(config.source, read_checkpoint(path, config.source))
    hugging_face = _hugging_face(config.source, state)
    tensors = _tensors(config.source, state)
    model, adapter = _without_adapter(tensors, hugging_face)
    work.need_space(
        sum(tensor.numel() * _target(tensor, config.dtype).itemsize for tensor in tensors.values())
    )
    writer = _WeightWriter(config.dtype)
    _write_tokenizer(config, hugging_face, work.folder)
    if adapter:
        folder = work.folder / "adapter" if model else work.folder
        folder.mkdir(exist_ok=True)
        _write_json(folder / ADAPTER_CONFIG, _adapter_config(hugging_face))
        writer.write(adapter, folder / ADAPTER_WEIGHTS)
    if model:
        _write_json(work.folder / CONFIG_FILE, _model_config(config, hugging_face))
        writer.write_shards(model, work.folder)
        _check_loads(config, model, work.folder)
    return {
        "tensors": len(tensors),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "adapter": bool(adapter),
    }


# --------------------------------------------------------------------------- the checkpoint


def _refuse_shards(source: str, path: Path) -> None:
    """Refuse a folder. A sharded checkpoint, which is such a folder, gets a hint of its own."""
    if not path.is_dir():
        return
    if (path / ".metadata").is_file() or any(path.glob("*.distcp")):
        raise InputError(f"{source}: is a sharded checkpoint", hint=_MONOLITH_HINT)
    raise InputError(
        f"{source}: is a folder, expected a checkpoint file",
        hint="name the file, such as ep0-ba2000-rank0.pt",
    )


def _state(source: str, content: Any) -> dict[str, Any]:
    state = content.get("state") if isinstance(content, dict) else None
    if isinstance(state, dict) and isinstance(state.get("model"), dict):
        return state
    if isinstance(content, dict) and "module" in content:
        found = "a DeepSpeed checkpoint"
    elif isinstance(content, dict) and "pytorch-lightning_version" in content:
        found = "a Lightning checkpoint"
    elif isinstance(content, dict) and content and all(map(_is_tensor, content.values())):
        found = "a bare state dict"
    else:
        found = "no Composer checkpoint"
    raise InputError(
        f"{source}: is {found}, expected state/model and state/integrations in it",
        hint="give a file that Composer's Trainer saved (save_weights_only=False)",
    )


def _hugging_face(source: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the checkpoint that `HuggingFaceModel` wrote."""
    integrations = state.get("integrations")
    found = integrations.get("huggingface") if isinstance(integrations, dict) else None
    try:
        if found and isinstance(found["model"]["config"]["content"], dict):
            return dict(found)
    except (KeyError, TypeError):
        pass
    raise InputError(
        f"{source}: holds no model config (state/integrations/huggingface)",
        hint="the model was not trained as a composer.models.HuggingFaceModel; convert it with its own code",
    )


def _tensors(source: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint's weights by their names, without the beginning "model." of each name."""
    weights = state["model"]
    shards = [
        name
        for name, value in weights.items()
        if isinstance(value, Inert) and "torch.distributed" in value.origin
    ]
    if shards:
        raise InputError(
            f"{source}: {shards[0]} is a part of a tensor ({type(weights[shards[0]]).__name__})",
            hint=_MONOLITH_HINT,
        )
    tensors = {
        name.removeprefix(_PREFIX): value for name, value in weights.items() if _is_tensor(value)
    }
    if not tensors:
        raise InputError(f"{source}: holds no weights", hint="give a checkpoint of the whole model")
    if len(tensors) < len(weights):
        logger.warning("%d entries of state/model are no tensors", len(weights) - len(tensors))
    return tensors


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _without_adapter(
    tensors: Mapping[str, Any], hugging_face: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide weights into those of the model and those of the PEFT adapter that was trained with it.

    Returns:
        Weights of the model, and weights of the adapter by PEFT's names. If all weights outside the adapter are biases,
        they count as the adapter's, and there are no weights of the model.
    """
    if "peft_config" not in hugging_face["model"]:
        return dict(tensors), {}
    model, adapter = {}, {}
    for name, tensor in tensors.items():
        if "lora_" in name or ".modules_to_save." in name:
            adapter[name.replace(".modules_to_save", "").replace(".default", "")] = tensor
        else:
            plain = name.removeprefix(_PEFT_PREFIX)
            model[plain.replace(".base_layer", "").replace(".original_module", "")] = tensor
    if all(name.endswith(".bias") for name in model):
        adapter.update({_PEFT_PREFIX + name: tensor for name, tensor in model.items()})
        model = {}
    return model, adapter


# --------------------------------------------------------------------------- config and tokenizer


def _model_config(config: ComposerConfig, hugging_face: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json."""
    from transformers import CONFIG_MAPPING

    values = dict(hugging_face["model"]["config"]["content"])
    values.pop("_name_or_path", None)
    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING and not (config.trust_remote_code and "auto_map" in values):
        raise InputError(
            f"{config.source}: its architecture {kind!r} is unknown to this transformers",
            hint="upgrade transformers"
            + (
                "; or trust the model's own code: --trust-remote-code"
                if "auto_map" in values
                else ""
            ),
        )
    if "auto_map" in values and not config.trust_remote_code:
        logger.warning("config.json: without the model's own code (auto_map)")
        del values["auto_map"]
    if config.dtype:
        values.pop("dtype", None)
        values["torch_dtype"] = DTYPES[config.dtype]
    return values


def _adapter_config(hugging_face: Mapping[str, Any]) -> dict[str, Any]:
    return {**hugging_face["model"]["peft_config"]["content"], "inference_mode": True}


def _write_tokenizer(config: ComposerConfig, hugging_face: Mapping[str, Any], folder: Path) -> None:
    """Write the tokenizer's files. Without --trust-remote-code, also load the tokenizer, to find a broken one now."""
    if config.tokenizer is not None:
        _copy_tokenizer(config.tokenizer, folder)
    else:
        files = hugging_face.get("tokenizer")
        if not isinstance(files, dict) or not files:
            raise InputError(
                f"{config.source}: holds no tokenizer",
                hint="name a folder that has it: --tokenizer FOLDER",
            )
        for name, file in files.items():
            _write_tokenizer_file(config, folder, name, file)
    if config.trust_remote_code:
        return  # the tokenizer may need its own code, which a conversion does not run
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise InputError(
            f"{config.source}: its tokenizer does not load ({type(error).__name__}: {str(error)[:200]})",
            hint="name a folder that has one: --tokenizer FOLDER; or trust its own code: --trust-remote-code",
        ) from error


def _write_tokenizer_file(
    config: ComposerConfig, folder: Path, name: str, file: Mapping[str, Any]
) -> None:
    ending, content = file["file_extension"], file["content"]
    name = name if name.endswith(ending) else name + ending
    if Path(name).name != name:
        raise InputError(
            f"{config.source}: the tokenizer's file {name!r} has a path, expected a plain name",
            hint="ask where the checkpoint comes from",
        )
    if ending == ".py" and not config.trust_remote_code:
        logger.warning("%s: is code and is left out; --trust-remote-code writes it", name)
        return
    if ending == ".json":
        if name == "tokenizer_config.json":
            content = {key: value for key, value in content.items() if key != "name_or_path"}
            if not config.trust_remote_code:
                content.pop("auto_map", None)
        _write_json(folder / name, content)
    elif isinstance(content, bytes):
        (folder / name).write_bytes(content)
    else:
        text = content if isinstance(content, str) else "\n".join(content)
        (folder / name).write_text(text, encoding="utf-8")


def _copy_tokenizer(source: Path, folder: Path) -> None:
    names = [name for name in (*TOKENIZER_FILES, *_TOKENIZER_EXTRAS) if (source / name).is_file()]
    if not set(names) & set(TOKENIZER_FILES):
        raise InputError(
            f"--tokenizer {source}: holds no tokenizer",
            hint="name a folder with tokenizer.json or tokenizer.model",
        )
    for name in names:
        shutil.copyfile(source / name, folder / name)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --------------------------------------------------------------------------- writing weights


class _WeightWriter:
    """Writes weights to safetensors files. It holds the converted weights of one file at a time in memory."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        _return_freed_blocks()

    def write(self, tensors: Mapping[str, Any], path: Path) -> None:
        """Write weights to one file."""
        from safetensors.torch import save_file

        converted = {name: self._convert(name, tensor) for name, tensor in tensors.items()}
        seen: set[int] = set()
        for name, tensor in converted.items():
            if (
                tensor.data_ptr() in seen
            ):  # tied weights: safetensors refuses tensors that share memory
                converted[name] = tensor.clone()
            seen.add(tensor.data_ptr())
        with _os_errors(path):
            save_file(converted, path, metadata={"format": "pt"})
        path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets only the owner read it

    def write_shards(self, tensors: Mapping[str, Any], folder: Path) -> None:
        """Write weights to one file, or to several with an index if they have more than SHARD_BYTES."""
        from huggingface_hub import split_torch_state_dict_into_shards

        planned = {name: self._as_planned(tensor) for name, tensor in tensors.items()}
        plan = split_torch_state_dict_into_shards(planned, max_shard_size=SHARD_BYTES)
        for name, keys in plan.filename_to_tensors.items():
            logger.info("writing %s", name)
            self.write({key: tensors[key] for key in keys}, folder / name)
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            _write_json(folder / "model.safetensors.index.json", index)

    def _as_planned(self, tensor: Any) -> Any:
        import torch

        return torch.empty(tensor.shape, dtype=_target(tensor, self._dtype), device="meta")

    def _convert(self, name: str, tensor: Any) -> Any:
        """Return the tensor in the type that it has in the result."""
        converted = tensor.detach().to(_target(tensor, self._dtype)).contiguous()
        if converted.dtype != tensor.dtype:
            lost = int((converted.isinf() & ~tensor.isinf()).sum())
            if lost:
                logger.warning("%s: %d values are too large for %s", name, lost, self._dtype)
            _drop_pages(tensor)
        return converted


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    """Raise the OSError whose number stands in the text of safetensors' error for a failed write."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _return_freed_blocks() -> None:
    """Let glibc give freed blocks of 1 MiB or more back to the system at once. Elsewhere, nothing is changed.

    Otherwise the blocks of temporary tensors stay between those of converted ones, up to a third of the model's size.
    """
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def _drop_pages(tensor: Any) -> None:
    """Let the kernel take back the memory of a tensor that is mapped from a file. A later use reads the file again.

    The tensor must not have been changed, since changes would be lost.
    """
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // page * page
    if end > start:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _target(tensor: Any, dtype: str) -> Any:
    """Return the type that a tensor has in the result. Only floating-point tensors change their type."""
    import torch

    return getattr(torch, DTYPES[dtype]) if dtype and tensor.is_floating_point() else tensor.dtype


# --------------------------------------------------------------------------- check of the result


def _check_loads(asked: ComposerConfig, tensors: Mapping[str, Any], folder: Path) -> None:
    """Compare the weights with those that transformers' class for the config wants. No weight is read.

    Nothing is compared with --trust-remote-code, nor if the class has other names for weights in files than in memory.

    Raises:
        InputError: A weight is missing or has another shape.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    if asked.trust_remote_code:
        return  # the class may be the model's own code, which a conversion does not run
    config = AutoConfig.from_pretrained(folder)
    if get_checkpoint_conversion_mapping(config.model_type):
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, wanted in model.state_dict().items():
        found = tensors.get(name, tensors.get(tied.get(name, name)))
        if found is None or found.shape != wanted.shape:
            shape = "is missing" if found is None else f"has the shape {tuple(found.shape)}"
            raise InputError(
                f"{asked.source}: the weight {name} {shape}, expected {tuple(wanted.shape)} by its config",
                hint="give a checkpoint of the whole model, from a run without surgery algorithms",
            )
