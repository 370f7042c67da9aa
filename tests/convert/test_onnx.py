"""`convert hf-to-onnx`, with the real exporter in the environment that `make setup` makes with `--setup`."""

import shutil
import subprocess
from pathlib import Path

import pytest

from batchinfer.cli.main import main
from batchinfer.convert import onnx
from models import DEMO_MODEL

pytestmark = pytest.mark.vllm  # needs the environment, as the tests of vLLM need theirs

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-onnx"


def convert(*arguments: object) -> int:
    return main(["convert", "hf-to-onnx", *map(str, arguments)])


def test_answers_equal_those_of_torch(tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    options = ("--batch-size", 2, "--max-seq-len", 24, "--environment", ENVIRONMENT)
    assert convert(DEMO_MODEL, tmp_path / "onnx", "--verify", *options) == 0
    error = capsys.readouterr().err
    assert "largest difference of a logit: " in error
    assert "greedy tokens equal: True" in error
    assert (tmp_path / "onnx/tokenizer.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["onnx"]
    other = shutil.copytree(DEMO_MODEL, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    script = Path(onnx.__file__).with_name("onnx_verify.py")
    command = [ENVIRONMENT / "bin/python", "-I", script, other, tmp_path / "onnx", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "largest difference" in done.stderr.splitlines()[-1]


def test_what_the_exporter_refuses_is_an_error(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "novelty"}')
    assert convert(tmp_path / "model", tmp_path / "onnx", "--environment", ENVIRONMENT) == 2
    error = capsys.readouterr().err
    assert "the exporter failed" in error
    assert "Traceback" not in error
    assert not (tmp_path / "onnx").exists()
