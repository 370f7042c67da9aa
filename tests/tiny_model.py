"""A Llama of a few thousand random parameters with a byte-level tokenizer, written in a second."""

from __future__ import annotations

import json
from pathlib import Path

DEMO_MODEL = Path(__file__).resolve().parent.parent / "examples" / "demo-model"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny_model(folder: Path, *, num_heads: int = 4, max_positions: int = 512) -> Path:
    """Write the model into `folder`. The bytes are the same every time."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0, **{letter: 1 + i for i, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        chat_template=TEMPLATE,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=32 * num_heads,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=32,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def write_model_stub(folder: Path, **config) -> Path:
    """Write a folder that looks like a model but has no real weights, for code that only reads config and sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "vocab_size": 32000,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors_of(1000))
    return folder


def safetensors_of(size: int) -> bytes:
    """Return a safetensors file of this many bytes, at least 108: one tensor of zeros."""
    length = size - 108
    tensors = {"w": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}
    return (100).to_bytes(8, "little") + json.dumps(tensors).ljust(100).encode() + bytes(length)
