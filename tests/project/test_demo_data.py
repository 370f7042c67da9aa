"""The demo's closed tasks: every prompt has one answer, and held out means never trained on."""

from __future__ import annotations

import importlib
import json
import random
import sys
from itertools import islice
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def demo_data():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("demo_data")
    sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("What is the capital of Peru?", "Lima"),
        ("What is 99 plus 8?", "107"),
        ("What is 0 plus 0?", "0"),
        (
            "Is this review positive or negative? The soup was very awful. Never again.",
            "negative",
        ),
        (
            "Is this review positive or negative? The train ride was so lovely. I loved it.",
            "positive",
        ),
        (
            "Extract as JSON: Order 381: Ivan Kowalska wants 20 x mug.",
            '{"name": "Ivan Kowalska", "item": "mug", "quantity": 20, "order": 381}',
        ),
    ],
)
def test_the_answer_is_read_off_the_prompt(demo_data, prompt, answer):
    assert demo_data.expected_answer(prompt) == answer


@pytest.mark.parametrize(
    "prompt",
    ["", "What is the capital of Mars?", "What is 100 plus 1?", "What is 1 plus 1? ", "hello"],
)
def test_a_prompt_of_no_task_is_refused(demo_data, prompt):
    with pytest.raises(ValueError, match="none of the demo's tasks"):
        demo_data.expected_answer(prompt)


def test_a_prompt_belongs_to_the_task_that_drew_it_and_to_no_other(demo_data):
    rng = random.Random(3)
    for task in demo_data.TASKS:
        for _ in range(200):
            prompt = task.draw(rng)
            matching = [t.name for t in demo_data.TASKS if t.pattern.fullmatch(prompt)]
            assert matching == [task.name]


def test_the_words_of_a_review_agree_with_its_ending(demo_data):
    for example in demo_data.draw_examples(400, seed=4, held_out=False):
        if example.task == "sentiment":
            endings = (
                demo_data.GOOD_ENDINGS if example.answer == "positive" else demo_data.BAD_ENDINGS
            )
            assert example.prompt.endswith(endings)


def test_a_tenth_of_all_sums_is_held_out(demo_data):
    prompts = [f"What is {a} plus {b}?" for a in range(100) for b in range(100)]
    assert 900 <= sum(map(demo_data.is_held_out, prompts)) <= 1100


def test_training_and_held_out_prompts_share_nothing_but_capitals(demo_data):
    held_out = list(demo_data.draw_examples(800, seed=5, held_out=True))
    trained = list(demo_data.draw_examples(800, seed=5, held_out=False))
    assert all(demo_data.is_held_out(e.prompt) for e in held_out if e.task != "capital")
    assert not any(demo_data.is_held_out(e.prompt) for e in trained if e.task != "capital")


def test_what_the_training_script_draws_is_never_held_out(demo_data, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS.parent / "examples" / "demo-model")
    training = importlib.import_module("train")
    batches = list(islice(training.training_examples(), 100))
    assert {batch[0].task for batch in batches} == {task.name for task in demo_data.TASKS}
    for example in (example for batch in batches for example in batch):
        assert example.task == "capital" or not demo_data.is_held_out(example.prompt)


def test_the_same_seed_draws_the_same_examples_in_equal_shares(demo_data):
    first = list(demo_data.draw_examples(400, seed=6, held_out=True))
    assert first == list(demo_data.draw_examples(400, seed=6, held_out=True))
    assert first != list(demo_data.draw_examples(400, seed=7, held_out=True))
    tasks = [example.task for example in first]
    assert {task: tasks.count(task) for task in set(tasks)} == {
        "capital": 100,
        "sentiment": 100,
        "extract": 100,
        "add": 100,
    }


def test_the_data_set_has_the_shape_of_lmsys_and_the_prompts_in_order(demo_data, tmp_path):
    import pyarrow.parquet as pq

    paths = demo_data.write_dataset(tmp_path / "data", num_rows=1201, seed=8)
    files = [pq.ParquetFile(path) for path in paths]
    assert [file.metadata.num_rows for file in files] == [600, 601]
    assert all(file.num_row_groups > 1 for file in files)
    assert [f"{field.name}: {field.type}" for field in files[0].schema_arrow] == [
        "conversation_id: string",
        "model: string",
        "conversation: list<element: struct<content: string, role: string>>",
        "turn: int64",
        "language: string",
        "redacted: bool",
    ]
    rows = [row for file in files for row in file.read().to_pylist()]
    prompts = [example.prompt for example in demo_data.draw_examples(1201, seed=8, held_out=True)]
    assert [row["conversation"][0]["content"] for row in rows] == prompts
    assert {row["turn"] for row in rows} == {1, 2}
    for row in rows:
        roles = [message["role"] for message in row["conversation"]]
        assert roles == ["user", "assistant"] * row["turn"]
    assert len({row["conversation_id"] for row in rows}) == len(rows)


def test_the_recorded_reply_is_never_the_right_answer(demo_data):
    for example in demo_data.draw_examples(400, seed=9, held_out=True):
        assert example.answer not in (demo_data.RECORDED_REPLY, *demo_data.FOLLOW_UP)


def test_the_command_says_what_it_wrote(demo_data, tmp_path, capsys):
    assert demo_data.main(["--output", str(tmp_path), "--rows", "10"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["rows"] == 10
    assert [Path(path).exists() for path in result["files"]] == [True, True]


def test_a_data_set_with_fewer_rows_than_files_is_refused(demo_data, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        demo_data.main(["--output", str(tmp_path), "--rows", "1"])
    assert "expected at least 2" in capsys.readouterr().err
