"""What the engine benchmarks share: a random model, requests of uneven length, runs of the worker."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import harness

MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 64
# Equal for every way. No chunked prefill: vLLM's CPU build cannot seed a prompt that is computed in two steps.
CPU_ENGINE = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": MAX_NUM_SEQS,
    "max_num_batched_tokens": 4096,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 512 << 20,
    "enable_chunked_prefill": False,
    "block_size": 32,
}
# Given are the values whose defaults differ between vLLM's offline use and serving, or depend on the GPUs.
GPU_ENGINE = {
    "max_model_len": 4096,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "tensor_parallel_size": 1,
    "load_format": "dummy",
}
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

Request = dict[str, Any]


def make_words(rng: random.Random, count: int = 2000) -> list[str]:
    """Return made-up words of two to eight letters."""
    return [
        "".join(
            rng.choice("bcdfghklmnprst") + rng.choice("aeiou") for _ in range(rng.randint(1, 4))
        )
        for _ in range(count)
    ]


def make_requests(count: int, *, seed: int = 0, longest: int = 256) -> list[Request]:
    """Return requests with prompts of 6 to 30 words, answers of very different lengths (lognormal) and a seed each.

    `ignore_eos` fixes the lengths: every way generates exactly the same number of tokens.
    """
    rng = random.Random(seed)
    words = make_words(rng)
    return [
        {
            "prompt": " ".join(rng.choices(words, k=rng.randint(6, 30))),
            "max_tokens": max(1, min(longest, round(rng.lognormvariate(2.77, 1.2)))),
            "temperature": 1.0,
            "seed": index,
            "ignore_eos": True,
        }
        for index in range(count)
    ]


def write_model(folder: Path, *, is_8b: bool = False) -> Path:
    """Write a Llama of 26 million random parameters, or the config alone of one of the shape of Llama 3.1 8B."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = 128_256 if is_8b else 1024
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(make_words(random.Random(0)))], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        chat_template=_TEMPLATE,
    )
    missing = vocabulary - len(fast)
    if missing:
        fast.add_tokens([f"<extra{index}>" for index in range(missing)])
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=4096 if is_8b else 512,
        intermediate_size=14_336 if is_8b else 1536,
        num_hidden_layers=32 if is_8b else 8,
        num_attention_heads=32 if is_8b else 8,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=not is_8b,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        torch_dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    fast.save_pretrained(folder)
    if is_8b:
        config.save_pretrained(folder)
    else:
        import torch

        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def write_job(url: str, requests: Sequence[Request], *, per_chunk: int) -> str:
    """Write a job of requests; returns its URL."""
    harness.write_job(
        url, len(requests), lambda row: harness.as_line(requests[row], row), per_chunk=per_chunk
    )
    return url


def engine_options(engine: Mapping[str, Any]) -> list[str]:
    """Return engine arguments as options of the worker, which hands on those of vLLM."""
    options: list[str] = []
    for name, value in engine.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{option}" if value else f"--no-{option}")
        else:
            options += [f"--{option}", str(value)]
    return options


def run_worker(
    job: str,
    output: str,
    model: Path,
    engine: Mapping[str, Any],
    *options: str,
    env: Mapping[str, str],
    program: Sequence[str] = ("-m", "batchinfer.worker"),
) -> tuple[dict[str, Any], harness.Ended]:
    """Run a worker over a whole job; return its result, and what its processes used from the first request on."""
    command = [sys.executable, *program, "--job", job, "--output", output]
    command += ["--model", str(model), "--log-format", "json", *engine_options(engine), *options]
    ended = harness.run(command, env=env, is_ready=lambda line: '"engine_ready"' in line)
    result = ended.last_object
    if result["status"] != "SUCCESS" or result["error_count"]:
        sys.exit(f"{output}: {result}")
    return result, ended
