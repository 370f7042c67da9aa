"""A Mistral of random weights with the tokenizer that mistral_common ships: it has no chat template at all."""

from __future__ import annotations

import shutil
from pathlib import Path


def write_mistral(folder: Path) -> Path:
    """Write the model into `folder`, for vLLM's tokenizer mode "mistral". The bytes are the same every time."""
    import mistral_common
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=131072,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    MistralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tekken = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    shutil.copyfile(tekken, folder / "tekken.json")
    return folder
