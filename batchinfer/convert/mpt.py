"""The conversion `mpt-to-ft`: an MPT model in FasterTransformer's layout, divided over a number of GPUs.

A file ``model.NAME.bin`` holds one array, without a header, in little-endian order. Weight matrices of the
transformer's blocks are transposed. Arrays that FasterTransformer divides over GPUs have one file for each GPU,
``model.NAME.J.bin``. The layout is that of LLM Foundry's checkpoint_conversion_helpers.py (2024), except for one
mistake there: the bias of `ffn.up_proj` was written beside the folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from batchinfer.cli.settings import common_options
from batchinfer.convert.checkpoint import read_checkpoint, refused
from batchinfer.convert.places import fetch_model, result_at

_Weight = tuple[str, str, tuple[int, ...], int | None]
_HINT = "fetch the model again, or see --help; vLLM runs models as they are, without a conversion"


@click.command("mpt-to-ft")
@click.argument("model")
@click.argument("dest")
@click.option("--gpus", type=click.IntRange(1), required=True, help="How many GPUs share it.")
@common_options
def mpt_to_ft(model: str, dest: str, gpus: int) -> dict[str, Any]:
    """Turn an MPT model into the layout of FasterTransformer, in DEST/<gpus>-gpu.

    MODEL is a folder or a name on the Hub. Only for programs that read this layout: vLLM runs MPT as it is.
    """
    import torch
    from safetensors.torch import load_file

    with (
        result_at(f"{dest.rstrip('/')}/{gpus}-gpu") as folder,
        refused(f"{model}: cannot be converted", _HINT),
    ):
        path = fetch_model(model)
        mpt = _config(path)
        inner = int(mpt.d_model * mpt.expansion_ratio)
        if mpt.d_model % mpt.n_heads or mpt.n_heads % gpus or inner % gpus:
            raise ValueError(f"--gpus {gpus} does not divide {mpt.n_heads} heads and {inner} rows")
        tensors: dict[str, Any] = {}
        for file in sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin")):
            tensors |= read_checkpoint(file) if file.suffix == ".bin" else load_file(file)
        for name, ft_name, shape, axis in _weights(mpt, inner, set(tensors)):
            if mpt.no_bias and name.endswith(".bias"):
                tensors.setdefault(name, torch.zeros(shape))
            if name not in tensors or tensors[name].shape != shape:
                raise ValueError(f"the weight {name} is missing, or its shape is not {shape}")
            whole = _turned(name, tensors.pop(name).float())
            for gpu, part in enumerate([whole] if axis is None else whole.chunk(gpus, axis)):
                end = ".bin" if axis is None else f".{gpu}.bin"
                part.contiguous().numpy().tofile(folder / f"model.{ft_name}{end}")
        if tensors:
            raise ValueError(f"the weight {min(tensors)} is none of an MPT")
        (folder / "config.ini").write_text(_ini(mpt, inner, gpus), encoding="utf-8")
    return {"status": "SUCCESS", "dest": dest, "gpus": gpus}


def _config(model: Path) -> Any:
    """Return an MPT's config, with the ids of special tokens from its tokenizer where it lacks them."""
    from transformers import AutoConfig, AutoTokenizer

    mpt = AutoConfig.from_pretrained(model, trust_remote_code=False)
    if mpt.model_type != "mpt" or mpt.attn_config.clip_qkv or mpt.attn_config.qk_ln:
        raise ValueError("it is no MPT, or uses clip_qkv or qk_ln, which FasterTransformer ignores")
    for name in ("bos_token_id", "eos_token_id"):
        if getattr(mpt, name) is None:
            tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
            setattr(mpt, name, getattr(tokenizer, name) or 0)
    return mpt


def _weights(mpt: Any, inner: int, there: set[str]) -> Iterator[_Weight]:
    """Yield name, FasterTransformer's name and shape of each weight, and the axis that GPUs share after transposition.

    Columns (-1) take their part of the bias with them.
    """
    width = mpt.d_model
    yield "transformer.wte.weight", "wte", (mpt.vocab_size, width), None
    if "transformer.wpe.weight" in there:
        yield "transformer.wpe.weight", "wpe", (mpt.max_seq_len, width), None
    if "lm_head.weight" in there or not mpt.tie_word_embeddings:
        yield "lm_head.weight", "lm_head.weight", (mpt.vocab_size, width), None
    block: list[_Weight] = [
        ("norm_1", "input_layernorm", (width,), None),
        ("norm_2", "post_attention_layernorm", (width,), None),
        ("attn.Wqkv", "attention.query_key_value", (3 * width, width), -1),
        ("attn.out_proj", "attention.dense", (width, width), 0),
        ("ffn.up_proj", "mlp.dense_h_to_4h", (inner, width), -1),
        ("ffn.down_proj", "mlp.dense_4h_to_h", (width, inner), 0),
    ]
    yield "transformer.norm_f.weight", "final_layernorm.weight", (width,), None
    yield "transformer.norm_f.bias", "final_layernorm.bias", (width,), None
    for layer in range(mpt.n_layers):
        for name, ft_name, shape, axis in block:
            stem, ft_stem = f"transformer.blocks.{layer}.{name}", f"layers.{layer}.{ft_name}"
            yield f"{stem}.weight", f"{ft_stem}.weight", shape, axis
            yield f"{stem}.bias", f"{ft_stem}.bias", shape[:1], axis or None


def _turned(name: str, tensor: Any) -> Any:
    """Return a block's weight with (in, out) in place of (out, in), and query, key and value apart."""
    if ".blocks." in name and tensor.dim() == 2:
        tensor = tensor.T
    return tensor.unflatten(-1, (3, -1)) if "Wqkv" in name else tensor


def _ini(mpt: Any, inner: int, gpus: int) -> str:
    """Return the content of config.ini."""
    entries = {
        "model_name": "mpt",
        "head_num": mpt.n_heads,
        "size_per_head": mpt.d_model // mpt.n_heads,
        "inter_size": inner,
        "max_pos_seq_len": mpt.max_seq_len,
        "num_layer": mpt.n_layers,
        "vocab_size": mpt.vocab_size,
        "start_id": mpt.bos_token_id,
        "end_id": mpt.eos_token_id,
        "weight_data_type": "fp32",
        "tensor_para_size": gpus,
        "layernorm_eps": mpt.layer_norm_epsilon,
    }
    if mpt.attn_config.alibi:
        entries |= {"has_positional_encoding": False, "use_attention_linear_bias": True}
    return "\n".join(["[gpt]", *(f"{key} = {value}" for key, value in entries.items())]) + "\n"
