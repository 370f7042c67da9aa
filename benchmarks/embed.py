"""Measure `--task embed` against one `LLM.embed` of everything: engine steps, wall, and the worker's peak memory.

A BERT of random weights (11 million parameters) embeds texts of very uneven length. `sorted` is `LLM.embed` of the
texts sorted by length, which shows what sorting could save at most. The last line is one JSON object.

    python benchmarks/embed.py [--rows 2000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from harness import (
    Spread,
    alternate,
    as_line,
    entries,
    environment,
    print_table,
    run,
    spread,
    write_job,
)
from workload import engine_options

LONGEST = 512
MAX_NUM_SEQS = 64
ROWS_PER_CHUNK = 200
MANY = 4
"""Factor of the larger job, which shows whether memory grows with the rows."""
WAYS = ("all", "sorted", "batchinfer")
ARGUMENTS: dict[str, Any] = {
    "max_model_len": LONGEST,
    "max_num_seqs": MAX_NUM_SEQS,
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_batched_tokens": 8192,
}


class Measured(NamedTuple):
    """What one run gave."""

    steps: int
    wall_seconds: float
    tokens: int
    peak_bytes: int


def make_model(folder: Path) -> None:
    """Write the model and its tokenizer, whose tokens are letters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *map(chr, range(33, 127))]
    words += [f"##{word}" for word in words[4:]]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]"
    )  # fmt: skip
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
        max_position_embeddings=LONGEST,
    )
    BertModel(config).save_pretrained(folder)


def make_texts(rows: int) -> list[str]:
    """Return texts of lognormal length: half of them have fewer than 45 letters, the longest 480."""
    rng = random.Random(0)
    lengths = [min(480, max(3, int(rng.lognormvariate(3.8, 0.9)))) for _ in range(rows)]
    return ["".join(rng.choices("abcdefgh ", k=length)).strip() or "a" for length in lengths]


def embed_all(path: str, model: str, *, is_sorted: bool) -> dict[str, Any]:
    """Embed all texts with one call of `LLM.embed`, in this process."""
    import time

    from vllm import LLM
    from ways import count_steps

    texts = json.loads(Path(path).read_text())
    if is_sorted:
        texts.sort(key=len)
    llm = LLM(model=model, runner="pooling", kv_cache_memory_bytes=64 << 20, **ARGUMENTS)
    steps = count_steps(llm.llm_engine)
    begin = time.monotonic()
    outputs = llm.embed(texts, use_tqdm=False)
    wall = time.monotonic() - begin
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"steps": len(steps), "wall_seconds": wall, "tokens": tokens}


def measure_all(folder: Path, way: str) -> Measured:
    """Run `embed_all` in a process of its own."""
    env = environment(VLLM_ENABLE_V1_MULTIPROCESSING="0")
    done = run([sys.executable, __file__, "--way", way, "--folder", str(folder)], env=env)
    return Measured(**done.last_object, peak_bytes=done.usage.peak_bytes)


def measure_worker(folder: Path, job: str) -> Measured:
    """Run the worker over a job, with checkpoints and claims."""
    with tempfile.TemporaryDirectory(dir=folder) as output:
        command = [sys.executable, "-m", "batchinfer", "worker", "--job", str(folder / job)]
        command += ["--output", output, "--model", str(folder / "model"), "--task", "embed"]
        command += ["--prompt-column", "text", "--kv-cache-memory-bytes", str(64 << 20)]
        done = run([*command, *engine_options(ARGUMENTS)], env=environment())
    result = done.last_object
    return Measured(
        steps=result["engine_steps"],
        wall_seconds=result["generate_time_sec"],
        tokens=result["total_prompt_tokens"],
        peak_bytes=done.usage.peak_bytes,
    )


def main() -> None:
    """Measure, print a table and the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--way", choices=WAYS[:2], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.way:
        paths = f"{asked.folder}/texts.json", f"{asked.folder}/model"
        print(json.dumps(embed_all(*paths, is_sorted=asked.way == "sorted")))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        texts = make_texts(asked.rows)
        (folder / "texts.json").write_text(json.dumps(texts))
        for job, factor in (("job", 1), ("many", MANY)):
            write_job(
                str(folder / job),
                asked.rows * factor,
                lambda row: as_line({"text": texts[row % len(texts)]}, row),
                per_chunk=ROWS_PER_CHUNK,
            )
        runs = alternate(
            {
                "all": partial(measure_all, folder, "all"),
                "sorted": partial(measure_all, folder, "sorted"),
                "batchinfer": partial(measure_worker, folder, "job"),
            },
            asked.repeats,
        )
        many = measure_worker(folder, "many")
    figures: dict[str, dict[str, Spread]] = {
        way: {field: spread(getattr(each, field) for each in found) for field in Measured._fields}
        for way, found in runs.items()
    }
    print_table(
        ["way", "steps", "tokens a step", "wall, s", "peak, MiB"],
        [
            [
                way,
                f"{each['steps']:.0f}",
                f"{each['tokens'].median / each['steps'].median:.0f}",
                f"{each['wall_seconds']:.1f}",
                f"{each['peak_bytes'] / 2**20:.0f}",
            ]
            for way, each in figures.items()
        ],
    )
    print(
        f"batchinfer, {MANY} times the rows: {many.steps} steps, {many.peak_bytes / 2**20:.0f} MiB"
    )
    result = {way: entries(each, 3) for way, each in figures.items()}
    print(json.dumps({**result, "many": many._asdict()}))


if __name__ == "__main__":
    main()
