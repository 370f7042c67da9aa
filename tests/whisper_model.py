"""A Whisper of a few thousand random parameters, whose tokenizer knows single letters, and a sound for it."""

from __future__ import annotations

import io
import math
import struct
import wave
from pathlib import Path


def write_whisper(folder: Path) -> Path:
    """Write the model into `folder`. The bytes are the same every time."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperTokenizerFast,
    )
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    special = [
        "<|endoftext|>",
        "<|startoftranscript|>",
        *(f"<|{code}|>" for code in LANGUAGES),
        *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"),
        *("<|nospeech|>", "<|notimestamps|>"),
    ]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    end = special[0]
    tokenizer = WhisperTokenizerFast(
        vocab={token: number for number, token in enumerate([*letters, *special])},
        merges=[],
        **dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), end),
        language="en",
        task="transcribe",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    end_id = tokenizer.convert_tokens_to_ids(end)
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=len(tokenizer) + -len(tokenizer) % 8,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=1500,
        max_target_positions=64,
        decoder_start_token_id=tokenizer.convert_tokens_to_ids("<|startoftranscript|>"),
        bos_token_id=end_id,
        eos_token_id=end_id,
        pad_token_id=end_id,
        init_std=0.5,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    WhisperForConditionalGeneration(config).to(torch.float32).save_pretrained(folder)
    return folder


def sound(hertz: float, *, seconds: float = 0.5) -> bytes:
    """Return a WAV file with a tone."""
    rate = 16000
    levels = (
        int(12000 * math.sin(2 * math.pi * hertz * at / rate)) for at in range(int(seconds * rate))
    )
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(b"".join(struct.pack("<h", level) for level in levels))
    return file.getvalue()
