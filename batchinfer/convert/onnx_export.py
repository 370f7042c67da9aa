"""A script that turns a model into ONNX. It runs in the exporter's environment and must not import batchinfer.

Its argument is a JSON object: source and dest (folders), result (path of the JSON file to write), verify, batch_size,
max_seq_len and opset (null: the exporter's default).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOLERANCE = 1e-2
"""Largest difference of a logit at which the models count as equal, as in LLM Foundry's script."""
_TOKENS = 16


def main() -> None:
    """Export the model, compare it if asked to, and write the result file."""
    asked = json.loads(sys.argv[1])
    found = export(asked)
    if asked["verify"]:
        found |= compare(asked["source"], asked["dest"], asked["batch_size"] or 1)
    Path(asked["result"]).write_text(json.dumps(found), encoding="utf-8")


def export(asked: dict[str, Any]) -> dict[str, Any]:
    """Write the ONNX model, which has a cache of keys and values. Returns the version of its operators."""
    import onnx
    from optimum.exporters.onnx import main_export

    shapes = {"batch_size": asked["batch_size"], "sequence_length": asked["max_seq_len"]}
    main_export(
        asked["source"],
        asked["dest"],
        task="text-generation-with-past",
        opset=asked["opset"],
        dtype="fp32",
        do_validation=False,
        **{name: value for name, value in shapes.items() if value is not None},
    )
    model = onnx.load(str(Path(asked["dest"]) / "model.onnx"), load_external_data=False)
    return {"opset": model.opset_import[0].version}


def compare(source: str, dest: str, batch_size: int) -> dict[str, Any]:
    """Compare the two models' logits for random tokens, and the tokens that they generate greedily after these."""
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(source, torch_dtype=torch.float32)
    after = ORTModelForCausalLM.from_pretrained(dest)
    torch.manual_seed(0)
    tokens = torch.randint(before.config.vocab_size, (batch_size, _TOKENS))
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        logits = before(tokens, attention_mask=mask).logits
        difference = (logits - after(tokens, attention_mask=mask).logits).abs().max()
        options = {"max_new_tokens": _TOKENS, "do_sample": False, "attention_mask": mask}
        equal = torch.equal(before.generate(tokens, **options), after.generate(tokens, **options))
    return {
        "largest_difference": float(difference),
        "tokens_equal": equal,
        "tolerance": TOLERANCE,
    }


if __name__ == "__main__":
    main()
