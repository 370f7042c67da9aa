"""Train the demo's model from scratch, and measure it under vLLM.

A Llama of about a million parameters with a byte-level BPE tokenizer, trained on the closed tasks
of ``demo_data.py`` for a fixed number of steps on one thread, so that the same machine and
versions give the same weights: about four CPU-minutes. Afterwards it answers prompts it was never
trained on, greedily, under vLLM on CPU::

    python examples/demo-model/train.py                    # train, save, evaluate
    python examples/demo-model/train.py --skip-training    # evaluate what is saved

The exit status is 1 when a task stays below 99 % exact match.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

from demo_data import TASKS, Example, draw_example, draw_examples  # noqa: E402

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

DEFAULT_OUTPUT = Path(__file__).resolve().parent
TRAINING_SEED = 1
EVALUATION_SEED = 2
NUM_STEPS = 850
# Examples of each task in a step. Sums and copying are what takes long to learn. Every task has the
# same weight in the loss, or the few tokens of a sum would drown among those of the JSON answers.
STEP_SHARES = {"capital": 6, "sentiment": 6, "extract": 24, "add": 40}
WARMUP_STEPS = 20
VOCABULARY_SIZE = 768
MAX_POSITIONS = 512
MUON_LEARNING_RATE = 0.02
ADAM_LEARNING_RATE = 3e-3
IGNORED_LABEL = -100
REQUIRED_ACCURACY = 0.99

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def training_examples() -> Iterator[list[Example]]:
    """Yield the examples of one task of one step after another, without end and none held out."""
    rng = random.Random(TRAINING_SEED)
    while True:
        for task, share in STEP_SHARES.items():
            yield [draw_example(task, rng, held_out=False) for _ in range(share)]


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over the training prompts and answers; every digit is a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    examples = draw_examples(8000, seed=TRAINING_SEED, held_out=False)
    tokenizer.train_from_iterator(
        (f"system\nuser\n{example.prompt}\nassistant\n{example.answer}" for example in examples),
        trainer,
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build the untrained model, its weights fixed by the training seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(TRAINING_SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, example: Example) -> tuple[list[int], list[int]]:
    """Turn an example into token ids and labels; only the answer and its end are learned."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": example.prompt}], tokenize=False, add_generation_prompt=True
    )
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    answer_ids = tokenizer.encode(example.answer + TURN_END, add_special_tokens=False)
    return prompt_ids + answer_ids, [IGNORED_LABEL] * len(prompt_ids) + answer_ids


def training_batches(
    tokenizer: PreTrainedTokenizerFast,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (ids, labels) of one task after another without end, padded on the right."""
    import torch

    padding = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    for examples in training_examples():
        batch = [encode(tokenizer, example) for example in examples]
        width = max(len(ids) for ids, _ in batch)
        ids = [ids + [padding] * (width - len(ids)) for ids, _ in batch]
        labels = [labels + [IGNORED_LABEL] * (width - len(labels)) for _, labels in batch]
        yield torch.tensor(ids), torch.tensor(labels)


def _optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    import torch

    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    in_layers = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in in_layers]
    return [
        torch.optim.Muon(matrices, lr=MUON_LEARNING_RATE, weight_decay=0.1),
        torch.optim.AdamW(others, lr=ADAM_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(output: Path, *, num_steps: int) -> None:
    """Train on one thread and save a Hugging Face model folder (bf16) to ``output``."""
    import torch

    torch.set_num_threads(1)
    tokenizer = train_tokenizer()
    model = build_model(tokenizer)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters} parameters, {num_steps} steps", file=sys.stderr)
    optimizers = _optimizers(model)
    start = time.process_time()
    batches = training_batches(tokenizer)
    for step in range(num_steps):
        scale = min((step + 1) / WARMUP_STEPS, (num_steps - step) / num_steps)
        for optimizer, rate in zip(
            optimizers, (MUON_LEARNING_RATE, ADAM_LEARNING_RATE), strict=True
        ):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        losses = {}
        for task, (ids, labels) in zip(STEP_SHARES, batches, strict=False):
            # Right padding needs no mask: causal attention never looks to the right.
            loss = model(input_ids=ids, labels=labels).loss
            (loss / len(STEP_SHARES)).backward()
            losses[task] = round(loss.item(), 4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == num_steps - 1:
            seconds = time.process_time() - start
            print(f"step {step} cpu {seconds:.0f} s {losses}", file=sys.stderr)
    _save(model, tokenizer, output)


def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    import torch

    model.generation_config.do_sample = False
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)
    # Releases of transformers name the class of a bare tokenizer.json differently; the older name
    # is understood by all of them.
    config_path = output / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def evaluate(model_folder: Path, *, rows_per_task: int, seed: int) -> dict[str, float]:
    """Answer held-out prompts greedily under vLLM on CPU, in this process.

    Returns:
        Task to share of exact matches, 0 to 1. Mistakes are printed to stderr.
    """
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(model_folder),
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        enable_chunked_prefill=False,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
    )
    examples = list(draw_examples(rows_per_task * len(TASKS), seed=seed, held_out=True))
    outputs = engine.chat(
        [[{"role": "user", "content": example.prompt}] for example in examples],
        SamplingParams(temperature=0, max_tokens=64),
        use_tqdm=False,
    )
    right: Counter[str] = Counter()
    for example, output in zip(examples, outputs, strict=True):
        text = output.outputs[0].text
        if text == example.answer:
            right[example.task] += 1
        else:
            print(f"wrong: {example.prompt!r}: {text!r}, not {example.answer!r}", file=sys.stderr)
    return {task.name: right[task.name] / rows_per_task for task in TASKS}


def main(arguments: list[str] | None = None) -> int:
    """Train, save and evaluate; the last line of stdout is the accuracy by task as JSON."""
    parser = argparse.ArgumentParser(description="Train and evaluate the demo's model.")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="model folder")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--rows-per-task", type=int, default=1000, help="held-out rows to answer")
    parser.add_argument("--seed", type=int, default=EVALUATION_SEED, help="of the held-out rows")
    parser.add_argument("--skip-training", action="store_true", help="evaluate what is saved")
    options = parser.parse_args(arguments)
    if not options.skip_training:
        train(options.output, num_steps=options.steps)
        # vLLM reads its settings at import and wants a process of its own.
        command = [sys.executable, __file__, "--skip-training", "--output", str(options.output)]
        command += ["--rows-per-task", str(options.rows_per_task), "--seed", str(options.seed)]
        return subprocess.run(command, check=False).returncode
    accuracy = evaluate(options.output, rows_per_task=options.rows_per_task, seed=options.seed)
    print(json.dumps({"model": str(options.output), "accuracy": accuracy}))
    return 0 if min(accuracy.values()) > REQUIRED_ACCURACY else 1


if __name__ == "__main__":
    raise SystemExit(main())
