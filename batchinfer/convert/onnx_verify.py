"""A script that compares an ONNX model with the one before. It runs in the exporter's environment, without batchinfer.

Its arguments are the two models' folders and the number of rows to compare. It prints one line, and ends with status 1
if the answers differ.
"""

import sys

import torch
from optimum.onnxruntime import ORTModelForCausalLM
from transformers import AutoModelForCausalLM

_TOKENS = 16


def main(source: str, dest: str, rows: str) -> None:
    """Compare logits for random tokens, and the tokens that the two models generate greedily after these."""
    before = AutoModelForCausalLM.from_pretrained(source, torch_dtype=torch.float32)
    after = ORTModelForCausalLM.from_pretrained(dest)
    torch.manual_seed(0)
    tokens = torch.randint(before.config.vocab_size, (int(rows), _TOKENS))
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        logits = before(tokens, attention_mask=mask).logits
        difference = float((logits - after(tokens, attention_mask=mask).logits).abs().max())
        options = {"max_new_tokens": _TOKENS, "do_sample": False, "attention_mask": mask}
        equal = torch.equal(before.generate(tokens, **options), after.generate(tokens, **options))
    found = f"largest difference of a logit: {difference:.2e}; greedy tokens equal: {equal}"
    if not (equal and difference <= 1e-2):  # as in LLM Foundry's script
        sys.exit(found)
    sys.stdout.write(found + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
