"""`convert hf-to-onnx`, with the real exporter in the environment that `make setup` makes with `--setup`."""

import shutil
import subprocess
import venv
from pathlib import Path
from subprocess import CalledProcessError
from unittest.mock import Mock

import pytest

from batchinfer.cli.main import main
from batchinfer.convert import onnx
from models import DEMO_MODEL

needs_exporter = pytest.mark.vllm  # needs the environment, as the tests of vLLM need theirs

Capture = pytest.CaptureFixture[str]
ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-onnx"


def convert(*arguments: object) -> int:
    return main(["convert", "hf-to-onnx", *map(str, arguments)])


@needs_exporter
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


@needs_exporter
def test_what_the_exporter_refuses_is_an_error(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "novelty"}')
    assert convert(tmp_path / "model", tmp_path / "onnx", "--environment", ENVIRONMENT) == 2
    error = capsys.readouterr().err
    assert "the exporter failed" in error
    assert "Traceback" not in error
    assert not (tmp_path / "onnx").exists()


@pytest.mark.parametrize("setup", [(), ("--setup",)])
def test_an_environment_whose_python_is_gone_is_said(setup, tmp_path, capsys):
    """It was called an error of the scratch folder."""
    for name in ("pip", "optimum-cli"):
        program = tmp_path / "old/bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/gone/python\n")
        program.chmod(0o755)
    assert convert(DEMO_MODEL, tmp_path / "onnx", "--environment", tmp_path / "old", *setup) == 2
    error = capsys.readouterr().err
    assert f"{program if not setup else program.with_name('pip')}: cannot be run (No such" in error
    assert f"hint: remove {tmp_path}/old, and make it again with --setup" in error


@pytest.mark.parametrize(
    "failure", [NotADirectoryError(20, "Not a directory"), CalledProcessError(1, "ensurepip")]
)
def test_an_environment_that_cannot_be_made_is_said(failure, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(venv, "create", Mock(side_effect=failure))
    assert convert("--setup", "--environment", tmp_path / "new") == 2
    assert f"{tmp_path}/new: cannot be made (" in capsys.readouterr().err
