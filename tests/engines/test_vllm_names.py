"""Names that vLLM does not have are refused before anything is loaded, with the nearest, by the worker and by check."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from batchinfer.cli.main import main
from batchinfer.core.errors import ConfigError
from batchinfer.engines import vllm_names
from batchinfer.engines.vllm_names import (
    ARGUMENTS,
    CALL_PARSERS,
    REASONING_PARSERS,
    SAMPLING,
    check_names,
    check_quantization,
    listed_names,
)
from making import make_job

MISTAKES = [
    (["--sampling", "tempreature=1"], "did you mean 'temperature'?"),
    (["--sampling", "max_new_token=1"], "did you mean 'max_new_tokens'?"),
    (["--engine-arg", "enable_lorra=true"], "did you mean 'enable_lora'?"),
]


needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="compares with vLLM's source"
)
WITH_VLLM = [
    pytest.param(["--quantization", name], message, marks=needs_vllm)
    for name, message in (
        ("fb8", "--quantization fb8: vLLM has no such method; did you mean 'fp8'?"),
        ("compresed-tensors", "did you mean 'compressed-tensors'?"),
        ("four bits", "--quantization four bits: vLLM has no such method"),
    )
]


@pytest.mark.parametrize(("options", "message"), [*MISTAKES, *WITH_VLLM])
def test_a_misspelt_name_is_refused_before_anything_is_made(
    tmp_path: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = str(tmp_path / "job")
    make_job(job, rows=2, per_chunk=2)
    echo = ["--job", job, "--engine", "echo", "--prompt-column", "prompt", *options]
    assert main(["worker", *echo, "--output", f"{job}/runs/a"]) == 2
    assert message in capsys.readouterr().err
    assert not Path(job, "runs").exists()
    assert main(["check", *echo]) == 2
    [problem] = json.loads(capsys.readouterr().out.splitlines()[-1])["problems"]
    assert message in problem["message"]


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_names, "installed_names", lambda _kind: frozenset())


@pytest.mark.usefixtures("without_vllm")
def test_a_machine_without_vllm_refuses_what_is_like_a_known_name_and_warns_of_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ConfigError, match="did you mean 'enable_lora'"):
        check_names("--engine-arg", ARGUMENTS, ["kv_cache_dtype", "enable_lorra"])
    check_names("--sampling", SAMPLING, ["bad_words", "brand_new"])
    assert [record.getMessage() for record in caplog.records] == [
        "--sampling brand_new: not known here, and vLLM is not installed to ask"
    ]


@needs_vllm
def test_methods_of_quantization_are_known_and_an_extension_may_have_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("fp8", "FP8", "awq", "gptq", "compressed-tensors", "mxfp8", ""):
        check_quantization("--quantization", name)
    extension = EntryPoint("mine", "my_quantization:register", vllm_names._PLUGINS[0])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [extension])
    check_quantization("--quantization", "fp8_mine")
    assert [record.getMessage() for record in caplog.records] == [
        "--quantization fp8_mine: not known here; an extension of vLLM may have it"
    ]


@pytest.mark.usefixtures("without_vllm")
def test_a_machine_without_vllm_refuses_no_method_of_quantization() -> None:
    check_quantization("--quantization", "fb8")


@needs_vllm
@pytest.mark.parametrize("kind", [ARGUMENTS, SAMPLING, CALL_PARSERS, REASONING_PARSERS])
def test_the_list_is_that_of_the_installed_vllm(kind: str) -> None:
    names = {name for name in vllm_names.installed_names(kind) if not name.startswith("_")}
    assert listed_names(kind) == names


def test_the_names_are_known_without_importing_vllm() -> None:
    script = (
        "import sys; from batchinfer.engines.vllm_names import *; check_names('o', ARGUMENTS, ['dtype']);"
        "print({'vllm', 'torch'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_an_engine_argument_without_a_value_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(tmp_path / "job")
    make_job(job, rows=2, per_chunk=2)
    assert main(["worker", "--job", job, "--engine", "echo", "--engine-arg", "foo"]) == 2
    shown = capsys.readouterr().err
    assert "--engine-arg 'foo': expected NAME=VALUE" in shown
    assert "EngineArgs" in shown
    assert "top_k" not in shown
