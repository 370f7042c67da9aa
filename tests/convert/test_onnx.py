"""`convert hf-to-onnx`, with the real exporter in the environment that `make setup` makes with `--setup`."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from batchinfer.cli.main import main
from batchinfer.convert import onnx
from tiny_model import DEMO_MODEL

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-onnx"


def convert(*arguments: object) -> int:
    return main(["convert", "hf-to-onnx", *map(str, arguments)])


@pytest.mark.vllm  # needs the environment, as the tests of vLLM need theirs
class TestWithTheExporter:
    def test_the_demo_model_answers_in_onnx_as_in_torch(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert convert(
            DEMO_MODEL, tmp_path / "onnx", "--verify", "--batch-size", 2, "--max-seq-len", 24,
            "--environment", ENVIRONMENT,
        ) == 0  # fmt: skip
        shown = capsys.readouterr()
        result = json.loads(shown.out.splitlines()[-1])
        assert result["tokens_equal"] is True
        assert 0 <= result["largest_difference"] < 1e-3
        assert "largest difference of a logit" in shown.err
        names = {path.name for path in (tmp_path / "onnx").iterdir()}
        assert {"model.onnx", "config.json", "tokenizer.json"} <= names
        assert [path.name for path in tmp_path.iterdir()] == ["onnx"]

    def test_weights_that_differ_are_found(self, tmp_path: Path) -> None:
        """The comparison itself: an export of the demo model beside a model with one changed weight."""
        from safetensors.torch import load_file, save_file

        assert convert(DEMO_MODEL, tmp_path / "onnx", "--environment", ENVIRONMENT) == 0
        other = tmp_path / "other"
        shutil.copytree(DEMO_MODEL, other)
        weights = load_file(other / "model.safetensors")
        weights["model.norm.weight"] *= 1.5
        save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
        code = (
            "import sys, json, runpy; compare = runpy.run_path(sys.argv[1])['compare'];"
            "print(json.dumps(compare(sys.argv[2], sys.argv[3], 1)))"
        )
        done = subprocess.run(
            [ENVIRONMENT / "bin/python", "-I", "-c", code, onnx._SCRIPT, other, tmp_path / "onnx"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["largest_difference"] > found["tolerance"]

    def test_what_the_exporter_refuses_is_an_error_and_leaves_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model/config.json").write_text('{"model_type": "novelty"}')
        assert convert(tmp_path / "model", tmp_path / "onnx", "--environment", ENVIRONMENT) == 2
        error = capsys.readouterr().err
        assert "the exporter failed" in error
        assert "Traceback" not in error
        assert not (tmp_path / "onnx").exists()


def test_a_missing_environment_says_how_to_make_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(DEMO_MODEL, tmp_path / "onnx", "--environment", tmp_path / "none") == 2
    said = capsys.readouterr().err
    assert f"convert hf-to-onnx --setup --environment {tmp_path}/none" in said


def test_the_default_environment_lies_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert onnx.default_environment() == Path("/cache/batchinfer/onnx")


def test_an_answer_that_differs_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"largest_difference": 0.5, "tokens_equal": True, "tolerance": 1e-2}
    with pytest.raises(Exception, match="answers otherwise"):
        onnx._check_answers("model", found)
    assert "5.00e-01" in capsys.readouterr().err


def test_packages_that_cannot_be_installed_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onnx, "_PACKAGES", ["no-such-package-of-batchinfer==0"])
    monkeypatch.setenv("TORCH_CPU_INDEX", "http://127.0.0.1:9/")
    monkeypatch.setenv("PIP_RETRIES", "0")
    assert convert("--setup", "--environment", tmp_path / "env") == 34
    assert "cannot be installed" in capsys.readouterr().err
    assert not (tmp_path / "env/batchinfer-ready").exists()


def test_the_extra_names_the_same_packages() -> None:
    project = tomllib.loads((ENVIRONMENT.parent / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["onnx"] == list(onnx.REQUIREMENTS)
