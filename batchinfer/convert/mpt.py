"""The conversion `mpt-to-ft`: an MPT model in FasterTransformer's layout, divided over a number of GPUs.

A file ``model.NAME.bin`` holds one array, without a header, in little-endian order. Weight matrices of the
transformer's blocks are transposed. Arrays that FasterTransformer divides over GPUs have one file for each GPU,
``model.NAME.J.bin``. The layout is that of LLM Foundry's checkpoint_conversion_helpers.py (2024), except for one
mistake there: the bias of `ffn.up_proj` was written beside the folder.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from batchinfer.convert.checkpoint import read_checkpoint
from batchinfer.convert.places import Conversion
from batchinfer.core.errors import ConfigError, InputError
from batchinfer.engines.models import CONFIG_FILE, TOKENIZER_FILES

logger = logging.getLogger(__name__)

DTYPES = {"fp32": "float32", "fp16": "float16"}
"""Types that FasterTransformer reads, by their names in its config.ini."""

_LAYER = re.compile(r"transformer\.blocks\.(\d+)\.(.+)\.(weight|bias)")
_LAYER_NAMES = {
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "attn.Wqkv": "attention.query_key_value",
    "attn.out_proj": "attention.dense",
    "ffn.up_proj": "mlp.dense_h_to_4h",
    "ffn.down_proj": "mlp.dense_4h_to_h",
}
_OUTER_NAMES = {
    "transformer.wte.weight": "wte",
    "transformer.wpe.weight": "wpe",
    "transformer.norm_f.weight": "final_layernorm.weight",
    "transformer.norm_f.bias": "final_layernorm.bias",
    "lm_head.weight": "lm_head.weight",
}
_SPLIT_BY_COLUMNS = ("attn.Wqkv", "ffn.up_proj")
"""Layers of which each GPU has some columns, and the part of the bias that belongs to them."""
_SPLIT_BY_ROWS = ("attn.out_proj", "ffn.down_proj")
"""Layers of which each GPU has some rows, and the whole bias."""


class MptConfig(NamedTuple):
    """Options of a conversion. `dtype` is a key of `DTYPES`."""

    source: str
    gpus: int
    dtype: str = "fp32"
    force: bool = False


class MptShape(NamedTuple):
    """Sizes of an MPT model's weights, by its config.json."""

    width: int
    heads: int
    layers: int
    vocabulary: int
    expansion: int
    positions: int
    has_bias: bool
    has_own_head: bool
    """Whether the output layer has weights of its own instead of those of the input's embedding."""


def convert(config: MptConfig, work: Conversion) -> dict[str, Any]:
    """Write config.ini and the arrays to `work.folder`, and return what the command reports about them.

    Raises:
        InputError: There is no such model, it is no MPT, or its weights do not fit its config.
        ConfigError: FasterTransformer ignores a feature of the model, or its sizes cannot be divided by `gpus`.
    """
    folder = work.fetch_model(config.source)
    values = _read_config(config.source, folder)
    shape = _shape(config.source, values)
    _refuse_unsupported(config, values, shape)
    (work.folder / "config.ini").write_text(_ini(config, values, shape, folder), encoding="utf-8")
    names = set()
    for name, array in _arrays(config, folder):
        for file, part in ft_files(name, array, shape, config):
            part.tofile(work.folder / file)
        names.add(name)
    _refuse_gaps(config.source, names, shape)
    return {"tensors": len(names), "gpus": config.gpus}


# --------------------------------------------------------------------------- config


def _read_config(source: str, folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(
            f"{source}: holds no {CONFIG_FILE}", hint="give a folder of a model"
        ) from None
    except ValueError as error:
        raise InputError(f"{path}: is not JSON ({error})", hint="fetch the model again") from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind != "mpt":
        raise InputError(
            f"{source}: is a model of type {kind!r}, expected 'mpt'",
            hint="other models need no conversion: vLLM runs them as they are",
        )
    return dict(values)


def _shape(source: str, values: dict[str, Any]) -> MptShape:
    try:
        width, expansion = int(values["d_model"]), float(values.get("expansion_ratio", 4))
        return MptShape(
            width=width,
            heads=int(values["n_heads"]),
            layers=int(values["n_layers"]),
            vocabulary=int(values["vocab_size"]),
            expansion=int(width * expansion),
            positions=int(values["max_seq_len"]),
            has_bias=not values.get("no_bias", True),
            has_own_head=not values.get("tie_word_embeddings", True),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{source}: its config.json lacks a size ({error})", hint="fetch the model again"
        ) from error


def _refuse_unsupported(config: MptConfig, values: dict[str, Any], shape: MptShape) -> None:
    attention = values.get("attn_config") or {}
    for feature in ("clip_qkv", "qk_ln"):
        if attention.get(feature) and not config.force:
            raise ConfigError(
                f"{config.source}: uses {feature}, which FasterTransformer ignores, so answers would differ",
                hint="--force converts it all the same; vLLM runs the model as it is",
            )
    for size, what in ((shape.heads, "heads"), (shape.expansion, "rows of the feed-forward layer")):
        if size % config.gpus:
            raise ConfigError(
                f"--gpus {config.gpus}: does not divide the model's {size} {what}",
                hint="use a number that does",
            )


def _ini(config: MptConfig, values: dict[str, Any], shape: MptShape, folder: Path) -> str:
    """Return the content of config.ini."""
    entries = {
        "model_name": values.get("_name_or_path") or "mpt",
        "head_num": shape.heads,
        "size_per_head": shape.width // shape.heads,
        "inter_size": shape.expansion,
        "max_pos_seq_len": shape.positions,
        "num_layer": shape.layers,
        "vocab_size": shape.vocabulary,
        "start_id": _token_id("bos_token_id", values, folder),
        "end_id": _token_id("eos_token_id", values, folder),
        "weight_data_type": config.dtype,
        "tensor_para_size": config.gpus,
        "layernorm_eps": values.get("layer_norm_epsilon", 1e-5),
    }
    if (values.get("attn_config") or {}).get("alibi", True):
        entries |= {"has_positional_encoding": False, "use_attention_linear_bias": True}
    return "\n".join(["[gpt]", *(f"{key} = {value}" for key, value in entries.items())]) + "\n"


def _token_id(name: str, values: dict[str, Any], folder: Path) -> int:
    """Return the id of a special token from the config, else from the tokenizer, else 0."""
    from transformers import AutoTokenizer

    found = values.get(name)
    if found is None and any((folder / file).is_file() for file in TOKENIZER_FILES):
        found = getattr(AutoTokenizer.from_pretrained(folder), name)
    if found is None:
        logger.warning("%s: neither config.json nor the tokenizer has it; 0 is written", name)
        return 0
    return int(found)


# --------------------------------------------------------------------------- arrays


def _arrays(config: MptConfig, folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and values of each of the model's weights, in the result's type."""
    import torch
    from safetensors import safe_open

    target = getattr(torch, DTYPES[config.dtype])
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                yield name, file.get_tensor(name).to(target).numpy()
    if any(folder.glob("*.safetensors")):
        return
    for path in sorted(folder.glob("pytorch_model*.bin")):
        for name, tensor in read_checkpoint(path, str(path)).items():
            yield name, tensor.to(target).numpy()


def ft_files(
    name: str, array: np.ndarray, shape: MptShape, config: MptConfig
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the array of each of FasterTransformer's files for one weight of the model.

    FasterTransformer wants a bias for each weight of a block and of the last norm. If the model has no biases, zeros
    are yielded for them.

    Raises:
        InputError: The weight's shape is wrong, or FasterTransformer has no such weight and `force` is not set.
    """
    if name in _OUTER_NAMES:
        if name != "lm_head.weight" or shape.has_own_head:
            yield f"model.{_OUTER_NAMES[name]}.bin", array
        if name == "transformer.norm_f.weight" and not shape.has_bias:
            yield "model.final_layernorm.bias.bin", np.zeros_like(array)
        return
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        if config.force:
            return
        raise InputError(
            f"{config.source}: the weight {name} is none of FasterTransformer's",
            hint="--force leaves it out; vLLM runs the model as it is",
        )
    layer, kind, part = match.groups()
    wanted = _wanted(kind, part, shape)
    if array.shape != wanted:
        raise InputError(
            f"{config.source}: the weight {name} has the shape {array.shape}, expected {wanted}",
            hint="fetch the model again",
        )
    stem = f"model.layers.{layer}.{_LAYER_NAMES[kind]}"
    for end, piece in _pieces(kind, part, array, shape, config.gpus):
        yield f"{stem}.{end}.bin", piece


def _wanted(kind: str, part: str, shape: MptShape) -> tuple[int, ...]:
    """Return the shape that a block's weight or bias must have in the model."""
    rows, *columns = {
        "attn.Wqkv": (3 * shape.width, shape.width),
        "attn.out_proj": (shape.width, shape.width),
        "ffn.up_proj": (shape.expansion, shape.width),
        "ffn.down_proj": (shape.width, shape.expansion),
    }.get(kind, (shape.width,))
    return (rows, *columns) if part == "weight" else (rows,)


def _pieces(
    kind: str, part: str, array: np.ndarray, shape: MptShape, gpus: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the pieces of a block's weight or bias in FasterTransformer's layout, each after the end of its name."""
    adds_zeros = part == "weight" and not shape.has_bias
    turned = (
        array.T
    )  # a linear layer's weight is (out, in) in torch and (in, out) in FasterTransformer
    if kind in _SPLIT_BY_COLUMNS:
        if kind == "attn.Wqkv":
            turned = turned.reshape(*turned.shape[:-1], 3, shape.width)
        for gpu, piece in enumerate(np.split(turned, gpus, axis=-1)):
            yield f"{part}.{gpu}", piece
            if adds_zeros:
                yield f"bias.{gpu}", np.zeros(piece.shape[1:], piece.dtype)
        return
    if kind in _SPLIT_BY_ROWS and part == "weight":
        for gpu, piece in enumerate(np.split(turned, gpus, axis=0)):
            yield f"{part}.{gpu}", piece
    else:
        yield part, turned
    if adds_zeros:
        yield "bias", np.zeros(shape.width, array.dtype)


def _refuse_gaps(source: str, names: set[str], shape: MptShape) -> None:
    parts = ("weight", "bias") if shape.has_bias else ("weight",)
    layers = (
        f"transformer.blocks.{layer}.{kind}.{part}"
        for layer in range(shape.layers)
        for kind in _LAYER_NAMES
        for part in parts
    )
    outer = ("transformer.wte.weight", "transformer.norm_f.weight")
    missing = [name for name in (*outer, *layers) if name not in names]
    if missing:
        raise InputError(
            f"{source}: {len(missing)} weights are missing, the first is {missing[0]}",
            hint="fetch the model again",
        )
