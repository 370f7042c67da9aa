"""The examples of README and docs/python.md run as they stand."""

import re
import textwrap
from pathlib import Path

import pytest

from making import python

ROOT = Path(__file__).resolve().parents[2]
README = re.findall(r"(?m)(?:^    .*\n)+", (ROOT / "README.md").read_text())
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)

MODEL = 'model="examples/demo-model"'
QUESTIONS = ["What is the capital of Peru?", "What is 47 plus 38?"]


@pytest.fixture
def folder(tmp_path):
    """Where a reader of the page would be: beside the demo's model."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def test_the_first_prints_an_answer_to_each_question(folder):
    """The engine `echo` repeats the questions."""
    assert EXAMPLES[0].count(MODEL) == 1
    assert EXAMPLES[0].endswith("# ['Lima', '85']\n")
    out = python(EXAMPLES[0].replace(MODEL, 'engine="echo"'), cwd=folder)
    assert out == f"{QUESTIONS}\n"


def test_the_second_reads_a_run_that_is_not_finished(folder):
    out = python(EXAMPLES[1], cwd=folder)
    assert out.startswith("idle 2 of 3\n")
    assert "chunks are done and sound; " in out


def test_the_third_splits_a_generator(folder):
    assert python(EXAMPLES[2], cwd=folder) == "1000 rows in 20 chunks\n"


@pytest.fixture
def shared(demo_url):
    """What an example has in the place of `MODEL`: the server of all tests. `make demo` starts one for the user."""
    return f'{MODEL}, engine="openai", base_url="{demo_url}"'


@pytest.mark.vllm
def test_readmes_example_prints_what_it_says(folder, shared):
    [code] = [block for block in README if block.lstrip().startswith("import batchinfer")]
    assert MODEL in code
    (folder / "questions.txt").write_text("\n".join(QUESTIONS) + "\n")
    out = python(textwrap.dedent(code).replace(MODEL, shared), cwd=folder)
    assert out == code.rpartition("# ")[2]


@pytest.mark.vllm
def test_the_notebook_runs(folder, shared):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "examples/run.ipynb", as_version=4)
    source = notebook.cells[1].source
    assert all(common in source for common in (MODEL, *QUESTIONS))
    notebook.cells[1].source = source.replace(MODEL, shared)
    client = NotebookClient(
        notebook, timeout=280, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    log = "".join(output.get("text", "") for output in notebook.cells[1].outputs)
    assert "worker run: done" in log
    last = notebook.cells[-1].outputs[0]["data"]["text/plain"]
    assert all(answer in last for answer in ("Lima", "Tokyo", "85"))
