"""Models for tests: the demo's, folders that only look like one, and random ones of a few thousand parameters.

What is written is the same every time, to the byte.
"""

import io
import json
import math
import os
import shutil
import string
import struct
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = ROOT / "examples" / "demo-model"
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def write_model_stub(folder: Path, **config) -> Path:
    """Write a folder that looks like a model but has no real weights, for code that only reads config and sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


# --------------------------------------------------------------------------- adapters of the demo's model


def write_adapter(
    folder: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    num_layers: int = 4,
    hidden: int = 128,
    **config: Any,
) -> Path:
    """Write a LoRA adapter into `folder`: what vLLM needs of PEFT's format. `config` is more of its config."""
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.default_rng(seed)
    tensors, targets = {}, ["q_proj", "v_proj"]
    for layer in range(num_layers):
        for target in targets:
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            for letter, shape in (("A", (rank, hidden)), ("B", (hidden, rank))):
                values = random.standard_normal(shape) * 0.3
                tensors[f"{name}.lora_{letter}.weight"] = values.astype("float32")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps({**values, **config}))
    return folder


# --------------------------------------------------------------------------- random models


def _write(folder: Path, model: str, config: Any, dtype: str = "float32") -> Path:
    """Write a model of transformers', random by seed 0."""
    import torch
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, model)(config)
    made.to(getattr(torch, dtype)).eval().save_pretrained(folder)
    return folder


def write_mistral(folder: Path) -> Path:
    """Write a Mistral with the tokenizer that mistral_common ships: it has no chat template at all."""
    import mistral_common
    from transformers import MistralConfig

    config = MistralConfig(
        **SMALL,
        vocab_size=131072,
        intermediate_size=128,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    _write(folder, "MistralForCausalLM", config, "bfloat16")
    tekken = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    shutil.copyfile(tekken, folder / "tekken.json")
    return folder


def write_bert(folder: Path, *, labels: list[str] | None = None) -> Path:
    """Write a BERT whose tokenizer knows single letters. With `labels` it is a classifier of these classes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, PreTrainedTokenizerFast

    signs = string.ascii_letters + string.digits + string.punctuation
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *signs, *(f"##{sign}" for sign in signs)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(word, vocabulary[word]) for word in ("[CLS]", "[SEP]")],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)
    config = BertConfig(
        **SMALL,
        vocab_size=len(words),
        intermediate_size=128,
        max_position_embeddings=128,
        initializer_range=0.3,
        **({"id2label": dict(enumerate(labels))} if labels else {}),
    )
    return _write(folder, "BertForSequenceClassification" if labels else "BertModel", config)


def write_whisper(folder: Path) -> Path:
    """Write a Whisper whose tokenizer knows single letters."""
    from tokenizers import pre_tokenizers
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperTokenizerFast
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
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    end_id = tokenizer.convert_tokens_to_ids(end)
    config = WhisperConfig(
        **dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end_id),
        vocab_size=len(tokenizer) + -len(tokenizer) % 8,
        encoder_layers=1,
        decoder_layers=1,
        max_target_positions=64,
        decoder_start_token_id=tokenizer.convert_tokens_to_ids("<|startoftranscript|>"),
        init_std=0.5,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return _write(folder, "WhisperForConditionalGeneration", config)


def sound(hertz: float) -> bytes:
    """Return a WAV file with a tone of half a second."""
    rate = 16000
    turn = 2 * math.pi * hertz / rate
    levels = [int(12000 * math.sin(turn * at)) for at in range(rate // 2)]
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, rate, len(levels), "NONE", ""))
        writer.writeframes(struct.pack(f"<{len(levels)}h", *levels))
    return file.getvalue()


# --------------------------------------------------------------------------- a model that sees

VERSION = "0.28.0"
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def torchvision_copy() -> Path:
    """Return a folder with a torchvision that vLLM's CPU build can import; the first call of a checkout downloads it.

    The wheel of torchvision on the package index is built for CUDA: with torch for the CPU, `import torchvision` fails,
    and so does `import vllm`. Two registrations of its compiled operators cause that, and image processors need
    neither. So the tests use a copy without them, in a folder of its own, which a server's PYTHONPATH names.
    """
    folder = ROOT / ".cache" / f"torchvision-{VERSION}"
    if folder.exists():
        return folder
    new = folder.with_name(f"{folder.name}.{os.getpid()}")
    requirement = f"torchvision=={VERSION}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(new)]
    subprocess.run([*command, requirement], check=True, timeout=300)
    path = new / "torchvision" / "_meta_registrations.py"
    text = path.read_text()
    for name in ("nms", "qnms"):
        line = f'@torch.library.register_fake("torchvision::{name}")'
        assert line in text, f"torchvision {VERSION} registers {name} in another way"
        text = text.replace(line, f"# {line}")
    path.write_text(text)
    try:
        new.rename(folder)
    except OSError:  # another process was faster
        assert folder.exists()
    return folder


def write_vision_model(folder: Path) -> Path:
    """Write a Qwen2-VL. It takes images of at most 112 x 112 pixels, and scales larger ones down."""
    from transformers import AutoTokenizer, Qwen2VLConfig

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    names = ("vision_start", "vision_end", "image", "video")
    ids = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    config = Qwen2VLConfig(
        text_config={
            **SMALL,
            "vocab_size": len(tokenizer) + 8,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [4, 6, 6],
                "rope_theta": 10000.0,
            },
            "bos_token_id": None,
            "eos_token_id": 2,
        },
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
        },
        **{f"{name}_token_id": number for name, number in zip(names, ids, strict=False)},
    )
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112},
        "min_pixels": 56 * 56,
        "max_pixels": 112 * 112,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    _write(folder, "Qwen2VLForConditionalGeneration", config, "bfloat16")
    generation = {"eos_token_id": 2, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
