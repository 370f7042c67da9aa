"""A checkpoint as Composer 0.33 saves it, with values of each kind that a training run leaves in it.

Layout after composer/core/state.py (`State.state_dict`), composer/models/huggingface.py (`get_metadata`, `state_dict`)
and composer/utils/checkpoint.py of that version. Written without Composer, so classes of torchmetrics are stand-ins of
the same names.
"""

import datetime
import functools
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file


def tokenizer_file(path: Path) -> dict[str, Any]:
    """As `HuggingFaceModel.get_metadata` reads what `save_pretrained` wrote."""
    content = path.read_text()
    is_json = path.suffix == ".json"
    return {"file_extension": path.suffix, "content": json.loads(content) if is_json else content}


def composer_content(model: Path) -> dict:
    """Everything that the file holds; `model` is a folder of transformers'."""
    weights = load_file(model / "model.safetensors")
    named = {f"model.{name}": tensor for name, tensor in weights.items()}
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    tokenizer = {name: tokenizer_file(model / name) for name in names if (model / name).exists()}
    config = {
        "file_extension": ".json",
        "content": json.loads((model / "config.json").read_text()) | {"_name_or_path": "org/base"},
        "class": "transformers.models.llama.modeling_llama.LlamaForCausalLM",
    }
    metric = _pretend_class("torchmetrics.text.perplexity", "Perplexity")()
    metric.total, metric.compute = torch.tensor(3.0), functools.partial(_identity, 2)
    return {
        "state": {
            "model": named,
            "optimizers": {"DecoupledAdamW": {"param_groups": [{"betas": (0.9, 0.95)}]}},
            "callbacks": {"SpeedMonitor": {"total_eval_wct": 0.0}},
            "timestamp": {
                "total_wct": datetime.timedelta(seconds=1234),
                "saved_at": datetime.datetime(2024, 5, 1, tzinfo=datetime.UTC),
            },
            "train_metrics": {"Loss": np.float64(2.5), "Perplexity": metric},
            "integrations": {"huggingface": {"model": {"config": config}, "tokenizer": tokenizer}},
        },
    }


def _identity(value: int) -> int:
    return value


def _pretend_class(module: str, name: str) -> type:
    """A class that pickle finds when it saves. Modules are pretended, too, up to the top one."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        full = ".".join(parts[:end])
        sys.modules.setdefault(full, types.ModuleType(full))
    made = type(name, (), {"__module__": module})
    setattr(sys.modules[module], name, made)
    return made
