"""The demo model with quantized weights, packed by hand: what compressed-tensors, GPTQ and AWQ would have written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_model import DEMO_MODEL

GROUP = 64
"""Weights that share a scale, in the kinds of 4 bits."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write_quantized(kind: str, folder: Path) -> Path:
    """Write the demo model with the weights of its linear layers in one of the `KINDS`."""
    from safetensors.torch import load_file, save_file

    settings, convert = KINDS[kind]
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    tensors: dict[str, Any] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors |= convert(name.removesuffix("weight"), tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    return folder


def _compressed(layout: str, number: str) -> dict[str, Any]:
    common = {"num_bits": 8, "type": number, "symmetric": True}
    weights = {**common, "strategy": "channel", "dynamic": False}
    activations = {**common, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


def _to_8_bits(name: str, weight: Any, most: int, dtype: str) -> dict[str, Any]:
    import torch

    scale = (weight.float().abs().amax(1, keepdim=True) / most).clamp(min=1e-8)
    packed = weight.float() / scale
    if dtype == "int8":
        packed = packed.round().clamp(-most, most)
    return {
        f"{name}weight": packed.to(getattr(torch, dtype)),
        f"{name}weight_scale": scale.to(torch.bfloat16),
    }


def _to_4_bits(weight: Any) -> tuple[Any, Any, Any]:
    """Numbers from 0 to 15 as [inputs, outputs], and the scale and zero point of each group."""
    import torch

    turned = weight.float().T.contiguous()
    inputs, outputs = turned.shape
    groups = turned.view(inputs // GROUP, GROUP, outputs)
    scales = (groups.abs().amax(1) / 7).clamp(min=1e-6)
    numbers = ((groups / scales[:, None]).round() + 8).clamp(0, 15).view(inputs, outputs)
    zeros = torch.full_like(scales, 8).to(torch.int32)
    return numbers.to(torch.int32), scales.to(torch.float16), zeros


def _pack(numbers: Any, order: tuple[int, ...] = tuple(range(8))) -> Any:
    """Eight neighbours of a row in one int32."""
    import torch

    rows, columns = numbers.shape
    parts = numbers.reshape(rows, columns // 8, 8).to(torch.int64)
    packed = sum(parts[:, :, place] << (4 * index) for index, place in enumerate(order))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def _gptq(name: str, weight: Any) -> dict[str, Any]:
    import torch

    numbers, scales, zeros = _to_4_bits(weight)
    return {
        f"{name}qweight": _pack(numbers.T.contiguous()).T.contiguous(),
        f"{name}scales": scales,
        f"{name}qzeros": _pack(zeros - 1),
        f"{name}g_idx": (torch.arange(len(numbers)) // GROUP).to(torch.int32),
    }


def _awq(name: str, weight: Any) -> dict[str, Any]:
    numbers, scales, zeros = _to_4_bits(weight)
    return {
        f"{name}qweight": _pack(numbers, AWQ_ORDER),
        f"{name}scales": scales,
        f"{name}qzeros": _pack(zeros, AWQ_ORDER),
    }


_FOUR_BITS = {"bits": 4, "group_size": GROUP}
KINDS: dict[str, tuple[dict[str, Any], Callable[[str, Any], dict[str, Any]]]] = {
    "int8": (
        _compressed("int-quantized", "int"),
        lambda name, weight: _to_8_bits(name, weight, 127, "int8"),
    ),
    "fp8": (
        _compressed("float-quantized", "float"),
        lambda name, weight: _to_8_bits(name, weight, 448, "float8_e4m3fn"),
    ),
    "gptq": (
        {
            "quant_method": "gptq",
            **_FOUR_BITS,
            "desc_act": False,
            "sym": True,
            "lm_head": False,
            "checkpoint_format": "gptq",
        },
        _gptq,
    ),
    "awq": (
        {"quant_method": "awq", **_FOUR_BITS, "zero_point": True, "version": "gemm"},
        _awq,
    ),
}
"""quantization_config and conversion of a linear layer's weights, by a name of the kind."""
