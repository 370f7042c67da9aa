"""Write a parquet data set of the shape of LMSYS-Chat-1M: same columns and types, made-up text, any number of rows."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

CATEGORIES = (
    "harassment",
    "harassment/threatening",
    "hate",
    "hate/threatening",
    "self-harm",
    "self-harm/instructions",
    "self-harm/intent",
    "sexual",
    "sexual/minors",
    "violence",
    "violence/graphic",
)
MODELS = ("vicuna-13b", "koala-13b", "alpaca-13b", "llama-2-13b-chat", "wizardlm-13b", "gpt-4")
LANGUAGES = ("English",) * 14 + ("Portuguese", "Russian", "Chinese", "Spanish")
"""Nearly four of five conversations are English, and so in ASCII but for a few characters."""
MEAN_CHARS = 270
"""Mean characters of a user's turn."""
VOWELS, CONSONANTS = "aeiou", "bcdfghklmnprstvwz"
FOREIGN = ("данные", "модель", "ответ", "数据", "模型", "回答", "não", "você", "información")


def make_words(rng: random.Random, count: int = 4000) -> list[str]:
    """Return made-up words of two to eight letters."""
    return [
        "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(1, 4)))
        for _ in range(count)
    ]


def make_text(rng: random.Random, words: list[str], pool: str, mean_chars: int) -> str:
    """Return a slice of `pool`, its length long-tailed around `mean_chars`, led by words of its own."""
    length = min(20_000, int(rng.expovariate(1 / mean_chars)) + 8)
    start = rng.randrange(len(pool) - length)
    return f"{rng.choice(words)} {rng.choice(words)} {pool[start : start + length]}"


def make_pool(rng: random.Random, words: list[str], num_words: int) -> str:
    """Return running text with line breaks, quotes, code and tabs, as chats have them."""
    parts = []
    for _ in range(num_words):
        chance = rng.random()
        word = rng.choice(words)
        if chance < 0.01:
            word += "\n"
        elif chance < 0.015:
            word = f'"{word}"'
        elif chance < 0.0151:
            word += rng.choice(("\u2019s", "\u2019s", " \u2014", "\u2026", " \U0001f600"))
        elif chance < 0.017:
            word = f"\n```python\n\tprint('{word}')\n```\n"
        elif chance < 0.07:
            word += ","
        elif chance < 0.12:
            word += "."
        parts.append(word)
    return " ".join(parts)


def make_moderation(rng: random.Random) -> dict[str, Any]:
    """Return one message's moderation record: flags and scores by category."""
    scores = {name: rng.random() ** 6 * 10 ** -rng.randint(1, 7) for name in CATEGORIES}
    return {
        "categories": {name: score > 0.05 for name, score in scores.items()},
        "category_scores": scores,
        "flagged": max(scores.values()) > 0.05,
    }


def make_row(
    rng: random.Random,
    words: list[str],
    pools: tuple[str, str],
    row: int,
    mean_chars: int = MEAN_CHARS,
) -> dict[str, Any]:
    """Return one conversation of one to twelve turns, its text from the English pool or from the other.

    Means are those that LMSYS publishes: two turns, 70 tokens a prompt and 215 an answer, taken at four characters.
    An answer is as much longer than `mean_chars`, a user's turn, as there.
    """
    language = rng.choice(LANGUAGES)
    pool = pools[language != "English"]
    turns = min(12, 1 + int(rng.expovariate(0.7)))
    conversation = []
    for _ in range(turns):
        conversation.append({"content": make_text(rng, words, pool, mean_chars), "role": "user"})
        conversation.append(
            {"content": make_text(rng, words, pool, mean_chars * 85 // 27), "role": "assistant"}
        )
    return {
        "conversation_id": f"{rng.getrandbits(128):032x}",
        "model": rng.choice(MODELS),
        "conversation": conversation,
        "turn": turns,
        "language": language,
        "openai_moderation": [make_moderation(rng) for _ in conversation],
        "redacted": row % 7 == 0,
    }


def write_dataset(
    folder: Path, rows: int, *, files: int = 3, seed: int = 0, mean_chars: int = MEAN_CHARS
) -> list[Path]:
    """Write `rows` conversations as `files` parquet files (row groups of 1000, snappy) and return their paths.

    Deterministic by `seed`. Memory is that of one row group.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(seed)
    words = make_words(rng)
    pools = (make_pool(rng, words, 400_000), make_pool(rng, [*words, *FOREIGN * 800], 200_000))
    message = pa.struct([("content", pa.string()), ("role", pa.string())])
    moderation = pa.struct(
        [
            ("categories", pa.struct([(name, pa.bool_()) for name in CATEGORIES])),
            ("category_scores", pa.struct([(name, pa.float64()) for name in CATEGORIES])),
            ("flagged", pa.bool_()),
        ]
    )
    schema = pa.schema(
        [
            ("conversation_id", pa.string()),
            ("model", pa.string()),
            ("conversation", pa.list_(message)),
            ("turn", pa.int64()),
            ("language", pa.string()),
            ("openai_moderation", pa.list_(moderation)),
            ("redacted", pa.bool_()),
        ]
    )
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    row = 0
    for index in range(files):
        path = folder / f"train-{index:05d}-of-{files:05d}.parquet"
        end = rows * (index + 1) // files
        with pq.ParquetWriter(path, schema) as writer:
            while row < end:
                group = range(row, min(end, row + 1000))
                batch = [make_row(rng, words, pools, number, mean_chars) for number in group]
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
                row = group.stop
        paths.append(path)
    return paths


def main() -> None:
    """Write the data set that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=150_000)
    parser.add_argument("--files", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mean-chars", type=int, default=MEAN_CHARS)
    arguments = parser.parse_args()
    for path in write_dataset(
        arguments.folder,
        arguments.rows,
        files=arguments.files,
        seed=arguments.seed,
        mean_chars=arguments.mean_chars,
    ):
        print(path)


if __name__ == "__main__":
    main()
