"""Tiny random pooling models with a tokenizer of single letters, written in a second by transformers."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any


def write_bert(folder: Path, *, labels: list[str] | None = None, **config: Any) -> Path:
    """Write a BERT into `folder`. With `labels` it is a classifier of these classes. The bytes are always the same."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    folder.mkdir(parents=True)
    num_words = _write_tokenizer(folder)
    names = {} if labels is None else {"id2label": dict(enumerate(labels))}
    values = BertConfig(
        vocab_size=num_words,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=128,
        initializer_range=0.3,
        **{**names, **config},
    )
    torch.manual_seed(0)
    model = BertModel(values) if labels is None else BertForSequenceClassification(values)
    model.to(torch.float32).eval().save_pretrained(folder)
    return folder


def _write_tokenizer(folder: Path) -> int:
    """Write a tokenizer that frames texts and pairs as BERT's does. Returns the size of its vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    signs = string.ascii_letters + string.digits + string.punctuation
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *signs, *(f"##{sign}" for sign in signs)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)
    return len(words)
