"""Measure the peak memory of `batchinfer convert composer-to-hf` against the sizes of the model before and after.

    python benchmarks/convert.py [--gigabytes N] [--folder DIR]

The checkpoint is one as Composer saves it: weights in bfloat16, an optimizer's state beside them, and all else that
training leaves. The memory is the process's largest resident set, which counts Python, torch and those mapped pages of
the checkpoint that are in memory. The last line is one JSON object. A conversion that takes more than 1.3 times the
weights before and after together ends it with status 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import harness
from harness import print_table

BAR = 1.3
WAYS = {"as it is": (), "to float32": ("--dtype", "fp32"), "to float16": ("--dtype", "fp16")}


def main() -> None:
    """Make a checkpoint where there is none, convert it, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the weights")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep the checkpoint there")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make_checkpoint(options.make, options.gigabytes)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = folder / "ep0-ba2000-rank0.pt"
        if not checkpoint.exists():
            # A process of its own: the memory of a measured process is at least what its parent held.
            make = ("--make", str(checkpoint), "--gigabytes", str(options.gigabytes))
            harness.run([sys.executable, __file__, *make])
        ways = {
            name: partial(measure, checkpoint, flags, options.gigabytes)
            for name, flags in WAYS.items()
        }
        tries = harness.alternate(ways, options.repeat)
    figures = {name: max(done, key=lambda one: one["share"]) for name, done in tries.items()}
    titles = ("", "result", "peak memory", "times", "seconds")
    rows = (
        (name, f"{one['bytes'] / 1e9:.2f} GB", f"{one['peak_bytes'] / 1e9:.2f} GB",
         f"{one['share']:.2f}", f"{one['seconds']:.0f}")
        for name, one in figures.items()
    )  # fmt: skip
    print_table(titles, rows)
    worst = max(one["share"] for one in figures.values())
    print(json.dumps({"bar": BAR, "worst": round(worst, 3), **figures}))
    sys.exit(worst > BAR)


def measure(checkpoint: Path, flags: tuple[str, ...], gigabytes: float) -> dict[str, float]:
    """Convert the checkpoint, and return the size of the result and what the process used."""
    dest = checkpoint.parent / "hf"
    command = ["convert", "composer-to-hf", str(checkpoint), str(dest), *flags]
    done = harness.run([sys.executable, "-m", "batchinfer", *command, "--log-level", "warning"])
    size = sum(path.stat().st_size for path in dest.iterdir())
    shutil.rmtree(dest)
    return {
        "bytes": size,
        "peak_bytes": done.usage.peak_bytes,
        "share": round(done.usage.peak_bytes / (gigabytes * 1e9 + size), 3),
        "seconds": round(done.usage.wall_seconds, 1),
    }


def make_checkpoint(path: Path, gigabytes: float) -> None:
    """Write a checkpoint of a Llama with about `gigabytes` of weights."""
    sys.path.append(str(harness.ROOT / "tests"))
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from composer_file import composer_content
    from models import DEMO_MODEL

    model = Path(shutil.copytree(DEMO_MODEL, path.parent / "tiny"))
    config = AutoConfig.from_pretrained(model)
    config.hidden_size, config.intermediate_size = 2048, 5632
    config.num_attention_heads = config.num_key_value_heads = 16
    config.head_dim = 128
    layer_bytes = 2 * (4 * 2048 * 2048 + 3 * 2048 * 5632)
    config.num_hidden_layers = max(1, round(gigabytes * 1e9 / layer_bytes))
    config.save_pretrained(model)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    weights = {
        name: torch.randn(tensor.shape, dtype=torch.bfloat16)
        for name, tensor in shapes.items()
        if name != "lm_head.weight"  # the config ties it to the embeddings
    }
    save_file(weights, model / "model.safetensors")
    torch.save(composer_content(model), path)


if __name__ == "__main__":
    main()
