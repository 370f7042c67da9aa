"""A Qwen2-VL of a few thousand random parameters, and a copy of torchvision that vLLM's CPU build can import.

The wheel of torchvision on the package index is built for CUDA: with torch for the CPU, `import torchvision` fails, and
so does `import vllm`. Two registrations of its compiled operators cause that, and the image processors need neither. So
the tests use a copy without them, in a folder of its own, which a server's PYTHONPATH names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tiny_model import DEMO_MODEL

ROOT = Path(__file__).resolve().parent.parent
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
    """Return the folder with the copy. The first call of a checkout downloads torchvision."""
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
    """Write the model into `folder`. It takes images of at most 112 x 112 pixels, and scales larger ones down."""
    import torch
    from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    start, end, image, video, _ = (tokenizer.convert_tokens_to_ids(name) for name in SPECIAL)
    torch.manual_seed(0)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer) + 8,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
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
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    Qwen2VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "do_resize": True,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112},
        "min_pixels": 56 * 56,
        "max_pixels": 112 * 112,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    generation = {"eos_token_id": 2, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
