"""The demo passes on a real server, its own checks find what they are there for, and it ends as it says."""

import importlib
import json
import re
from pathlib import Path

import pytest

from models import DEMO_MODEL

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("demo")


def without_numbers(text):
    """The lines of a text, with each number as 0."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [re.sub(r"\d+(\.\d+)?", "0", line) for line in lines if line]


@pytest.mark.vllm
def test_the_demo_kills_resumes_and_passes_and_prints_what_readme_shows(
    demo, demo_url, tmp_path, capfd
):
    options = ["--work-dir", str(tmp_path / "work"), "--rows", "600", "--num-chunks", "6"]
    model = ["--engine", "openai", "--base-url", demo_url, "--model", str(DEMO_MODEL)]
    assert demo.main([*options, *model, "--max-concurrency", "4"]) == 0
    out, err = capfd.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert (result["passed"], result["rows"]) == (True, 600)
    assert result["rows_resumed"] > 0
    printed = without_numbers((err + out).replace(f"{tmp_path}/work", "demo-run"))
    readme = (SCRIPTS.parent / "README.md").read_text()
    (shown,) = re.findall(r"^    demo: (?:.*\n)+?\n", readme, re.MULTILINE)
    for line in without_numbers(shown):
        assert line in printed
        printed = printed[printed.index(line) + 1 :]


def swap(answers):
    answers[12]["text"], answers[13]["text"] = answers[13]["text"], answers[12]["text"]


@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (swap, []),
        (lambda answers: answers.pop(3), ["row 3: is missing"]),
        (lambda answers: answers.append(answers[3]), ["row 3: is there twice"]),
        (lambda answers: answers.append(answers[3] | {"_row": 99}), ["row 99: is one too many"]),
        (lambda answers: answers[3].update(status=400), ["row 3: is {'_row': 3"]),
        (lambda answers: answers[3].update(_id="17x"), ["row 3: is {'_row': 3, '_id': '17x'"]),
    ],
)
def test_answers_that_are_lost_doubled_swapped_or_errors_fail_the_demo(demo, damage, messages):
    data = importlib.import_module("demo_data")
    examples = list(data.draw_examples(40, seed=data.DEFAULT_SEED, held_out=True))
    answers = [
        {"_row": row, "_id": str(row), "status": 200, "text": example.answer}
        for row, example in enumerate(examples)
    ]
    assert demo.check_answers(answers, examples).passed
    damage(answers)
    findings = demo.check_answers(answers, examples)
    assert len(findings.problems) == len(messages)
    assert all(map(str.startswith, findings.problems, messages))
    assert not findings.passed


def test_a_work_folder_of_somebody_else_is_left_alone(demo, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    assert demo.main(["--work-dir", str(tmp_path)]) == 2
    assert "pass another --work-dir" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
