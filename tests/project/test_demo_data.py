"""The demo's closed tasks: every prompt has one answer, and held out means never trained on."""

from __future__ import annotations

import importlib
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
        (
            "Is this review positive or negative? The soup was very awful. Never again.",
            "negative",
        ),
        (
            "Extract as JSON: Order 381: Ivan Kowalska wants 20 x mug.",
            '{"name": "Ivan Kowalska", "item": "mug", "quantity": 20, "order": 381}',
        ),
    ],
)
def test_the_answer_is_read_off_the_prompt(demo_data, prompt, answer):
    assert demo_data.expected_answer(prompt) == answer


@pytest.mark.parametrize("prompt", ["", "What is the capital of Mars?", "What is 100 plus 1?"])
def test_a_prompt_of_no_task_is_refused(demo_data, prompt):
    with pytest.raises(ValueError, match="none of the demo's tasks"):
        demo_data.expected_answer(prompt)


def test_what_the_training_script_draws_is_never_held_out(demo_data, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS.parent / "examples" / "demo-model")
    training = importlib.import_module("train")
    batches = list(islice(training.training_examples(), 100))
    assert {batch[0].task for batch in batches} == {task.name for task in demo_data.TASKS}
    for example in (example for batch in batches for example in batch):
        assert example.task == "capital" or not demo_data.is_held_out(example.prompt)
    held_out = demo_data.draw_examples(400, seed=5, held_out=True)
    assert all(demo_data.is_held_out(each.prompt) for each in held_out if each.task != "capital")


def test_the_data_set_has_the_shape_of_lmsys_and_the_prompts_in_order(demo_data, tmp_path):
    import pyarrow.parquet as pq

    assert demo_data.main(["--output", str(tmp_path), "--rows", "1201", "--seed", "8"]) == 0
    files = [pq.ParquetFile(path) for path in sorted(tmp_path.rglob("*.parquet"))]
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
    examples = list(demo_data.draw_examples(1201, seed=8, held_out=True))
    assert [row["conversation"][0]["content"] for row in rows] == [each.prompt for each in examples]
    assert {row["turn"] for row in rows} == {1, 2}
    # What was recorded is never the right answer.
    assert not {each.answer for each in examples} & {demo_data.RECORDED_REPLY, *demo_data.FOLLOW_UP}
