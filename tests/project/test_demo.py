"""The demo passes on a real server, and removes nothing of others."""

import importlib
import json
from pathlib import Path

import pytest

from models import DEMO_MODEL

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("demo")


@pytest.mark.vllm
def test_the_demo_kills_resumes_and_passes(demo, demo_url, tmp_path, capfd):
    options = ["--work-dir", str(tmp_path / "work"), "--rows", "600", "--num-chunks", "6"]
    model = ["--engine", "openai", "--base-url", demo_url, "--model", str(DEMO_MODEL)]
    assert demo.main([*options, *model, "--max-concurrency", "4"]) == 0
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (result["passed"], result["rows"]) == (True, 600)
    assert result["rows_resumed"] > 0


def test_a_work_folder_of_somebody_else_is_left_alone(demo, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    assert demo.main(["--work-dir", str(tmp_path)]) == 2
    assert "pass another --work-dir" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
