"""The conversion `composer-to-hf`: a Composer checkpoint becomes a folder that transformers and vLLM load.

Composer's `HuggingFaceModel` puts the config and the tokenizer's files into the checkpoint beside the weights:
`state/integrations/huggingface/model/config/content` and `state/integrations/huggingface/tokenizer/NAME/content`. Names
of weights begin with "model.". This is the layout of Composer 0.33. Tokenizer files without an ending in their names,
as older versions write them, are read as well.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import click

from batchinfer.cli.settings import common_options
from batchinfer.convert.checkpoint import read_checkpoint, refused
from batchinfer.convert.places import fetch_file, result_at

logger = logging.getLogger(__name__)

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_TOKENIZER_FILE = re.compile(
    r"(?!(adapter_)?config\.json|.*index\.json)\w[\w.-]{0,99}\.(json|txt|model|jinja|bpe|spm|vocab|tiktoken|py)"
)
"""Names of files that a tokenizer may have. Others could replace a file of the model, or name a path."""
_HUGE_COUNT = re.compile(r'"(\w*(?:labels|layers?|experts|_dim))": -?\d{7,}')
"""A number in config.json to which transformers would count for hours."""
_PARAMETER_COST = 1000
_HINT = (
    "give a whole checkpoint of a HuggingFaceModel that Composer's Trainer saved; merge a sharded one first: "
    "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER merged.pt"
)
_MODEL_HINT = (
    "give a checkpoint of the whole model, from a run without surgery algorithms; upgrade transformers; or, if it has "
    "code of its own, trust it: --trust-remote-code"
)


@click.command("composer-to-hf")
@click.argument("source")
@click.argument("dest")
@click.option("--dtype", type=click.Choice(list(_DTYPES)), help="New type of the weights.")
@click.option("--trust-remote-code", is_flag=True, help="Write the checkpoint's .py files.")
@common_options
def composer_to_hf(
    source: str, dest: str, dtype: str | None, trust_remote_code: bool
) -> dict[str, Any]:
    """Turn a Composer checkpoint (ep0-ba2000-rank0.pt) into a folder that transformers and vLLM load.

    SOURCE is a path or a URL. No code in the checkpoint is run. Optimizer, metrics and the like are left out.
    """
    with result_at(dest) as folder:
        with refused(f"{source}: cannot be read", _HINT):
            content = read_checkpoint(fetch_file(source, folder.parent))
            tensors = _tensors(_part(content, "state", "model"))
            found = _part(content, "state", "integrations", "huggingface")
            values = _part(found, "model", "config", "content")
            dropped = ("_name_or_path",) if trust_remote_code else ("_name_or_path", "auto_map")
            config = {name: value for name, value in values.items() if name not in dropped}
            if dtype:
                config |= {"dtype": _DTYPES[dtype], "torch_dtype": _DTYPES[dtype]}
            _write(folder / "config.json", config)
            if huge := _HUGE_COUNT.search((folder / "config.json").read_text("utf-8")):
                raise ValueError(f"its config says {huge[0]}")
        with refused(f"{source}: its tokenizer does not load", _MODEL_HINT):
            _write_tokenizer(folder, _part(found.get("tokenizer") or {}), trust_remote_code)
        with refused(f"{source}: its config and weights make no model", _MODEL_HINT):
            tied = [] if "auto_map" in config else _check_model(folder, tensors)
        with refused(f"{source}: its weights cannot be written", "see to the disk, or use --dtype"):
            _write_weights(folder, tensors, dtype, tied)
    return {"status": "SUCCESS", "dest": dest, "tensors": len(tensors)}


def _part(content: Any, *path: str) -> dict[str, Any]:
    """Return the dictionary at a path of the checkpoint."""
    for name in path:
        content = content.get(name) if isinstance(content, dict) else None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"it holds no dictionary {'/'.join(path)}")
    return content


def _tensors(weights: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint's weights by their names, without the beginning "model." of each name."""
    import torch

    kinds = (torch.Tensor, torch.nn.Parameter)
    for name, value in weights.items():
        if type(value) not in kinds or value.nbytes > value.untyped_storage().nbytes():
            raise ValueError(f"{name} is no whole tensor ({type(value).__name__})")
    return {name.removeprefix("model."): value.detach() for name, value in weights.items()}


def _write_tokenizer(folder: Path, files: dict[str, Any], trusts_code: bool) -> None:
    """Write the tokenizer's files. Without its own code, also load the tokenizer, to find a broken one now."""
    for name in files:
        file = _part(files, name)
        content, ending = file.get("content"), str(file.get("file_extension", ""))
        full = name if name.endswith(ending) else name + ending
        if not _TOKENIZER_FILE.fullmatch(full):
            raise ValueError(f"{full!r} is no name of a tokenizer's file")
        if full.endswith(".py") and not trusts_code:
            logger.warning("%s: is code and is left out; --trust-remote-code writes it", full)
            continue
        if full.endswith(".json") and isinstance(content, dict) and not trusts_code:
            content = {key: value for key, value in content.items() if key != "auto_map"}
        _write(folder / full, content)
    if not files:
        logger.warning("the checkpoint holds no tokenizer; copy its files to DEST")
    elif not trusts_code:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _write(path: Path, content: Any) -> None:
    if path.suffix == ".json":
        content = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    elif isinstance(content, list):
        content = "\n".join(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _check_model(folder: Path, tensors: dict[str, Any]) -> list[str]:
    """Load the weights into transformers' class for the folder's config, as a user would. They stay on the disk.

    Returns:
        Names of weights that the class takes from another weight.

    Raises:
        ValueError: A weight is missing, has another shape, or is none of this model's. transformers raises more.
    """
    import torch
    from torch.nn.modules.module import register_module_parameter_registration_hook
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, logging

    left = 5 * sum(tensor.numel() + _PARAMETER_COST for tensor in tensors.values())

    def count(_module: Any, _name: str, parameter: Any) -> None:
        nonlocal left
        left -= parameter.numel() + _PARAMETER_COST
        if left < 0:
            raise ValueError("its config describes far more weights than there are")

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    kept = (tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    counting = register_module_parameter_registration_hook(count)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"{type(config).__name__} is of no causal language model")
        model, found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            dtype=next(kept, torch.float32),  # with another type, loading would copy
            attn_implementation="eager",  # a config may name code on the Hub
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    finally:
        counting.remove()
    wrong = [f"{kind}: {name}" for kind, names in sorted(found.items()) for name in sorted(names)]
    if wrong:
        raise ValueError(f"{len(wrong)} weights do not fit its config ({', '.join(wrong[:3])})")
    return list(model.all_tied_weights_keys)


def _write_weights(
    folder: Path, tensors: dict[str, Any], dtype: str | None, tied: list[str]
) -> None:
    """Write weights. Only those of a floating-point type change their type."""
    import torch
    from huggingface_hub import save_torch_state_dict

    for name, tensor in tensors.items():
        if dtype and tensor.is_floating_point():
            tensors[name] = tensor.to(getattr(torch, _DTYPES[dtype]))
            lost = int((tensors[name].isinf() & ~tensor.isinf()).sum())
            if lost:
                logger.warning("%s: %d values are too large for %s", name, lost, dtype)
    discarded = {"shared_tensors_to_discard": tied} if tied else {}
    save_torch_state_dict(tensors, folder, **discarded)
    for path in folder.glob("*.safetensors"):
        path.chmod(folder.stat().st_mode & 0o666)  # safetensors lets only the owner read it
