"""The closed tasks of the demo: prompts whose one right answer can be computed.

Four tasks, each a few templates over word lists: capitals, sentiment of a review, extraction of an
order to JSON, addition of two numbers. Because :func:`expected_answer` reads the answer off the
prompt alone, a completion that landed on the wrong row shows up as a wrong answer, whatever the
row numbers say.

Every prompt belongs to one side of a split by its MD5: a tenth is *held out* and never trained
on. Capitals are the exception: they are facts to remember, so the set is closed and both sides
share it.

As a command it writes a data set shaped like LMSys-Chat-1M (parquet)::

    python scripts/demo_data.py --output ./demo-data --rows 3000
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow

DEFAULT_ROWS = 3000
DEFAULT_SEED = 20
NUM_FILES = 2
ROWS_PER_GROUP = 250
HELD_OUT_ONE_IN = 10

CAPITALS = {
    "Albania": "Tirana", "Algeria": "Algiers", "Argentina": "Buenos Aires", "Armenia": "Yerevan",
    "Australia": "Canberra", "Austria": "Vienna", "Bangladesh": "Dhaka", "Belgium": "Brussels",
    "Bolivia": "Sucre", "Brazil": "Brasilia", "Bulgaria": "Sofia", "Cambodia": "Phnom Penh",
    "Canada": "Ottawa", "Chile": "Santiago", "China": "Beijing", "Colombia": "Bogota",
    "Croatia": "Zagreb", "Cuba": "Havana", "Cyprus": "Nicosia", "Denmark": "Copenhagen",
    "Ecuador": "Quito", "Egypt": "Cairo", "Estonia": "Tallinn", "Ethiopia": "Addis Ababa",
    "Finland": "Helsinki", "France": "Paris", "Georgia": "Tbilisi", "Germany": "Berlin",
    "Ghana": "Accra", "Greece": "Athens", "Hungary": "Budapest", "Iceland": "Reykjavik",
    "India": "New Delhi", "Indonesia": "Jakarta", "Iran": "Tehran", "Iraq": "Baghdad",
    "Ireland": "Dublin", "Italy": "Rome", "Jamaica": "Kingston", "Japan": "Tokyo",
    "Jordan": "Amman", "Kenya": "Nairobi", "Latvia": "Riga", "Lebanon": "Beirut",
    "Lithuania": "Vilnius", "Mexico": "Mexico City", "Mongolia": "Ulaanbaatar",
    "Morocco": "Rabat", "Nepal": "Kathmandu", "Netherlands": "Amsterdam",
    "New Zealand": "Wellington", "Nigeria": "Abuja", "Norway": "Oslo", "Peru": "Lima",
    "Philippines": "Manila", "Poland": "Warsaw", "Portugal": "Lisbon", "Romania": "Bucharest",
    "Senegal": "Dakar", "Serbia": "Belgrade", "Spain": "Madrid", "Sweden": "Stockholm",
    "Thailand": "Bangkok", "Tunisia": "Tunis", "Turkey": "Ankara", "Uruguay": "Montevideo",
    "Vietnam": "Hanoi",
}  # fmt: skip

SUBJECTS = (
    "hotel", "film", "soup", "laptop", "concert", "book", "phone", "service", "museum", "coffee",
    "train ride", "camera", "garden", "lecture", "jacket", "dessert", "game", "apartment",
)  # fmt: skip
DEGREES = ("very", "really", "quite", "so", "truly", "simply")
GOOD = (
    "good", "wonderful", "excellent", "lovely", "great", "delightful", "superb", "pleasant",
    "brilliant", "charming", "perfect", "enjoyable",
)  # fmt: skip
BAD = (
    "bad", "awful", "terrible", "dreadful", "poor", "boring", "horrible", "disappointing",
    "ugly", "useless", "annoying", "unpleasant",
)  # fmt: skip
GOOD_ENDINGS = (
    "I would come back.", "I loved it.", "My friends agreed.", "Worth every cent.",
    "We will return soon.", "It made my day.",
)  # fmt: skip
BAD_ENDINGS = (
    "I want my money back.", "I hated it.", "Never again.", "What a waste of time.",
    "We left early.", "It ruined my day.",
)  # fmt: skip

# No name shares its first token with another. The vocabulary is so small that Rosa and Rossi would,
# and then the model goes on with the wrong one.
FIRST_NAMES = (
    "Ada", "Bruno", "Chloe", "David", "Elena", "Farid", "Greta", "Hugo", "Ivan", "Julia",
    "Karim", "Laura", "Marco", "Nadia", "Oscar", "Priya", "Ruth", "Samir", "Tara", "Yusuf",
)  # fmt: skip
LAST_NAMES = (
    "Almeida", "Brandt", "Costa", "Dubois", "Eriksen", "Fischer", "Garcia", "Haddad", "Ito",
    "Jansen", "Kowalska", "Lopez", "Moreau", "Novak", "Okafor", "Petrov", "Rossi", "Silva",
    "Tanaka", "Weber",
)  # fmt: skip
ITEMS = (
    "notebook", "lamp", "chair", "mug", "pencil", "backpack", "keyboard", "umbrella", "candle",
    "blanket", "bottle", "clock", "mirror", "basket", "scarf", "ticket",
)  # fmt: skip

# What the data set's own assistant said. Wrong on purpose: a pipeline that hands the recorded turn
# on instead of the model's completion scores zero.
RECORDED_REPLY = "I would have to look that up."
FOLLOW_UP = ("Thanks, that is all.", "You are welcome.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One prompt of the closed tasks with its only right answer."""

    task: str
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One closed task: how to draw a prompt, and how to read the answer off one.

    Attributes:
        name: Key in every report.
        draw: Makes a prompt from a random generator; same state, same prompt.
        pattern: Matches the whole of every prompt of this task and of no other.
        answer: The right answer for a match of ``pattern``.
        closed: True where the set is too small to hold anything out.
    """

    name: str
    draw: Callable[[random.Random], str]
    pattern: re.Pattern[str]
    answer: Callable[[re.Match[str]], str]
    closed: bool = False


def _draw_capital(rng: random.Random) -> str:
    return f"What is the capital of {rng.choice(list(CAPITALS))}?"


def _answer_capital(match: re.Match[str]) -> str:
    return CAPITALS[match["country"]]


def _draw_sentiment(rng: random.Random) -> str:
    words, endings = rng.choice(((GOOD, GOOD_ENDINGS), (BAD, BAD_ENDINGS)))
    subject, degree = rng.choice(SUBJECTS), rng.choice(DEGREES)
    return (
        "Is this review positive or negative? "
        f"The {subject} was {degree} {rng.choice(words)}. {rng.choice(endings)}"
    )


def _answer_sentiment(match: re.Match[str]) -> str:
    return "positive" if match["adjective"] in GOOD else "negative"


def _draw_extract(rng: random.Random) -> str:
    name = f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
    # One-digit quantities are the rarer and the harder ones, as in _draw_add.
    quantity = rng.randint(1, 9 if rng.random() < 0.4 else 40)
    return (
        f"Extract as JSON: Order {rng.randint(100, 999)}: "
        f"{name} wants {quantity} x {rng.choice(ITEMS)}."
    )


def _answer_extract(match: re.Match[str]) -> str:
    fields = {
        "name": match["name"],
        "item": match["item"],
        "quantity": int(match["quantity"]),
        "order": int(match["order"]),
    }
    return json.dumps(fields)


def _draw_add(rng: random.Random) -> str:
    # Small operands are a hundredth of all pairs; a model that sees them that seldom gets them
    # wrong, so a quarter of the draws is made of one-digit numbers.
    limit = 9 if rng.random() < 0.25 else 99
    return f"What is {rng.randint(0, limit)} plus {rng.randint(0, limit)}?"


def _answer_add(match: re.Match[str]) -> str:
    return str(int(match["a"]) + int(match["b"]))


TASKS = (
    Task(
        name="capital",
        draw=_draw_capital,
        pattern=re.compile(rf"What is the capital of (?P<country>{'|'.join(CAPITALS)})\?"),
        answer=_answer_capital,
        closed=True,
    ),
    Task(
        name="sentiment",
        draw=_draw_sentiment,
        pattern=re.compile(
            r"Is this review positive or negative\? "
            rf"The [a-z ]+ was [a-z]+ (?P<adjective>{'|'.join(GOOD + BAD)})\. .+"
        ),
        answer=_answer_sentiment,
    ),
    Task(
        name="extract",
        draw=_draw_extract,
        pattern=re.compile(
            r"Extract as JSON: Order (?P<order>\d+): "
            r"(?P<name>\w+ \w+) wants (?P<quantity>\d+) x (?P<item>\w+)\."
        ),
        answer=_answer_extract,
    ),
    Task(
        name="add",
        draw=_draw_add,
        pattern=re.compile(r"What is (?P<a>\d{1,2}) plus (?P<b>\d{1,2})\?"),
        answer=_answer_add,
    ),
)
_TASKS_BY_NAME = {task.name: task for task in TASKS}


def example_of(prompt: str) -> Example:
    """Recognise a prompt and work out its answer.

    Raises:
        ValueError: The prompt belongs to none of the closed tasks.
    """
    for task in TASKS:
        match = task.pattern.fullmatch(prompt)
        if match is not None:
            return Example(task=task.name, prompt=prompt, answer=task.answer(match))
    raise ValueError(f"prompt {prompt!r}: is none of the demo's tasks")


def expected_answer(prompt: str) -> str:
    """The one right answer to a prompt of the closed tasks.

    >>> expected_answer("What is 47 plus 38?")
    '85'

    Raises:
        ValueError: The prompt belongs to none of the closed tasks.
    """
    return example_of(prompt).answer


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is on the side of the split that training never sees."""
    digest = hashlib.md5(prompt.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def draw_example(task_name: str, rng: random.Random, *, held_out: bool) -> Example:
    """Draw one example of a task from one side of the split.

    Capitals come from the same closed set on both sides.
    """
    task = _TASKS_BY_NAME[task_name]
    prompt = task.draw(rng)
    while not task.closed and is_held_out(prompt) != held_out:
        prompt = task.draw(rng)
    return example_of(prompt)


def draw_examples(num_examples: int, *, seed: int, held_out: bool) -> Iterator[Example]:
    """Yield examples of all tasks in equal shares, in a random order fixed by the seed."""
    rng = random.Random(seed)
    names = [TASKS[index % len(TASKS)].name for index in range(num_examples)]
    rng.shuffle(names)
    for name in names:
        yield draw_example(name, rng, held_out=held_out)


def _conversation(prompt: str, rng: random.Random) -> list[dict[str, str]]:
    texts = [prompt, RECORDED_REPLY]
    # One conversation in five goes on, so that taking only the first turn makes a difference.
    if rng.random() < 0.2:
        texts.extend(FOLLOW_UP)
    roles = ("user", "assistant")
    return [{"content": text, "role": roles[i % 2]} for i, text in enumerate(texts)]


def _table(examples: list[Example], rng: random.Random) -> pyarrow.Table:
    import pyarrow as pa

    message = pa.struct([("content", pa.string()), ("role", pa.string())])
    schema = pa.schema(
        [
            ("conversation_id", pa.string()),
            ("model", pa.string()),
            ("conversation", pa.list_(message)),
            ("turn", pa.int64()),
            ("language", pa.string()),
            ("redacted", pa.bool_()),
        ]
    )
    rows = []
    for example in examples:
        conversation = _conversation(example.prompt, rng)
        rows.append(
            {
                "conversation_id": f"{rng.getrandbits(128):032x}",
                "model": rng.choice(("vicuna-13b", "koala-13b", "alpaca-13b")),
                "conversation": conversation,
                "turn": len(conversation) // 2,
                "language": "English",
                "redacted": False,
            }
        )
    return pa.Table.from_pylist(rows, schema=schema)


def write_dataset(
    folder: Path, *, num_rows: int = DEFAULT_ROWS, seed: int = DEFAULT_SEED
) -> list[Path]:
    """Write a data set shaped like LMSys-Chat-1M, of held-out prompts and capitals.

    The first user turn of every conversation is the prompt. Same rows and seed, same content.
    Files of the same name are overwritten.

    Args:
        folder: Made if it does not exist.
        num_rows: Conversations in all, at least one per file.
        seed: Of the prompts and of everything else in the rows.

    Returns:
        The files, in the order of their rows.

    Raises:
        ValueError: Fewer rows than files.
    """
    import pyarrow.parquet as pq

    if num_rows < NUM_FILES:
        raise ValueError(f"rows: is {num_rows}, expected at least {NUM_FILES}, one per file")
    examples = list(draw_examples(num_rows, seed=seed, held_out=True))
    rng = random.Random(seed + 1)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for index in range(NUM_FILES):
        first, last = num_rows * index // NUM_FILES, num_rows * (index + 1) // NUM_FILES
        path = folder / f"train-{index:05d}-of-{NUM_FILES:05d}.parquet"
        pq.write_table(_table(examples[first:last], rng), path, row_group_size=ROWS_PER_GROUP)
        paths.append(path)
    return paths


def main(arguments: list[str] | None = None) -> int:
    """Write the data set; the last line of stdout is one JSON object that says what was written."""
    parser = argparse.ArgumentParser(description="Write the demo's LMSys-shaped parquet data set.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--rows", type=int, default=DEFAULT_ROWS)
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    options = parser.parse_args(arguments)
    try:
        paths = write_dataset(options.output, num_rows=options.rows, seed=options.seed)
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps({"files": [str(path) for path in paths], "rows": options.rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
