"""LoRA adapters for the demo model in PEFT's format, written in a moment: random matrices, the same every time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HIDDEN, INNER, NUM_LAYERS = 128, 384, 4
_SIZES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (HIDDEN, HIDDEN)),
    **dict.fromkeys(("gate_proj", "up_proj"), (INNER, HIDDEN)),
    "down_proj": (HIDDEN, INNER),
}


def write_adapter(
    folder: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    num_layers: int = NUM_LAYERS,
    hidden: int = HIDDEN,
    **config: Any,
) -> Path:
    """Write adapter_config.json and adapter_model.safetensors into `folder`. `config` replaces fields of the first."""
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(num_layers):
        for target in targets:
            rows, columns = ((hidden if size == HIDDEN else size) for size in _SIZES[target])
            part = "mlp" if INNER in _SIZES[target] else "self_attn"
            name = f"base_model.model.model.layers.{layer}.{part}.{target}"
            for letter, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                values = random.standard_normal(shape) * 0.3
                tensors[f"{name}.lora_{letter}.weight"] = values.astype("float32")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "demo-model",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "init_lora_weights": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps({**values, **config}))
    return folder
