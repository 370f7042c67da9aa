"""The demo's own checks find what they are there for, and it ends as it says."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_model import DEMO_MODEL

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
README = SCRIPTS.parent / "README.md"
NUM_ROWS = 40


@pytest.fixture(scope="module", autouse=True)
def scripts_on_path():
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.fixture
def demo():
    return importlib.import_module("demo")


@pytest.fixture
def examples():
    data = importlib.import_module("demo_data")
    return list(data.draw_examples(NUM_ROWS, seed=data.DEFAULT_SEED, held_out=True))


@pytest.fixture
def answers(examples):
    """Rows as `batchinfer collect` writes them, all right."""
    return [
        {"_row": row, "_id": str(row), "status": 200, "text": example.answer}
        for row, example in enumerate(examples)
    ]


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
    (shown,) = re.findall(r"^    demo: (?:.*\n)+?\n", README.read_text(), re.MULTILINE)
    for line in without_numbers(shown):
        assert line in printed
        printed = printed[printed.index(line) + 1 :]


def test_answers_on_each_other_s_row_are_wrong_answers(demo, answers, examples):
    assert examples[12].answer != examples[13].answer
    answers[12]["text"], answers[13]["text"] = answers[13]["text"], answers[12]["text"]
    findings = demo.check_answers(answers, examples)
    assert findings.problems == []
    assert findings.right.total() == NUM_ROWS - 2
    assert not findings.passed


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda answers: answers.pop(3), "row 3: is missing"),
        (lambda answers: answers.append(answers[3]), "row 3: is there twice"),
        (lambda answers: answers.append(answers[3] | {"_row": 99}), "row 99: is one too many"),
        (lambda answers: answers[3].update(status=400), "row 3: is {'_row': 3"),
        (lambda answers: answers[3].update(_id="17x"), "row 3: is {'_row': 3, '_id': '17x'"),
    ],
)
def test_a_row_that_is_lost_doubled_or_an_error_is_named(demo, answers, examples, damage, message):
    damage(answers)
    findings = demo.check_answers(answers, examples)
    assert [problem.startswith(message) for problem in findings.problems] == [True]
    assert not findings.passed


def test_a_work_folder_of_somebody_else_is_left_alone(demo, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    assert demo.main(["--work-dir", str(tmp_path)]) == 2
    assert "pass another --work-dir" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_worker_that_ends_before_the_kill_fails_the_demo(demo, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(demo, "worker_command", lambda *_: [sys.executable, "-c", "exit(33)"])
    assert demo.main(["--work-dir", str(tmp_path / "work"), "--rows", "400"]) == 1
    assert "worker w0 ended with 33 before it could be killed" in capfd.readouterr().err


def test_no_worker_outlives_a_demo_that_breaks_off(demo):
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    started = {}

    def break_off():
        with demo.running_workers() as workers:
            started["w0"] = workers["w0"] = subprocess.Popen(sleeper)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert started["w0"].returncode is not None
