"""The conversion `hf-to-onnx`: a model becomes ONNX, by optimum's own command in an environment of its own.

The exporter needs an older transformers than vLLM, so the two cannot share an environment. `make_environment` makes a
virtual environment with the exporter and torch for the CPU.
"""

from __future__ import annotations

import logging
import os
import subprocess
import venv
from pathlib import Path
from typing import Any

import click

from batchinfer.cli.settings import common_options
from batchinfer.cli.terminal import say
from batchinfer.convert.places import fetch_model, result_at
from batchinfer.core.errors import ConfigError, InputError
from batchinfer.core.shell import quote

logger = logging.getLogger(__name__)

_HINT = "architectures: https://huggingface.co/docs/optimum-onnx/onnx/overview; torch for CPUs: TORCH_CPU_INDEX"
_PACKAGES = ["torch==2.13.0+cpu", "optimum-onnx==0.1.0", "onnxruntime>=1.20"]


@click.command("hf-to-onnx")
@click.argument("model", required=False)
@click.argument("dest", required=False)
@click.option("--verify", is_flag=True, help="Compare answers with torch before DEST is made.")
@click.option("--batch-size", type=click.IntRange(1), help="Rows of the example that is traced.")
@click.option("--max-seq-len", "sequence_length", type=click.IntRange(1), help="Its tokens.")
@click.option("--setup", is_flag=True, help="Make the exporter's environment first (1.3 GB).")
@click.option(
    "--environment",
    type=click.Path(path_type=Path),
    default="~/.cache/batchinfer/onnx",
    help="Folder of that environment.  [default: ~/.cache/batchinfer/onnx]",
)
@common_options
def hf_to_onnx(
    model: str | None, dest: str | None, setup: bool, environment: Path, verify: bool, **sizes: Any
) -> dict[str, Any]:
    """Turn a model into ONNX, in float32 and with a cache of keys and values.

    MODEL is a folder or a name on the Hub. With --setup alone, only the environment is made.
    """
    environment = environment.expanduser()
    if setup:
        make_environment(environment)
        if model is None:
            return {"status": "SUCCESS", "environment": str(environment)}
    if model is None or dest is None or not (environment / "bin/optimum-cli").exists():
        raise ConfigError(
            f"hf-to-onnx: needs MODEL, DEST and the exporter's environment in {environment}",
            hint=f"make it once: batchinfer convert hf-to-onnx --setup --environment {quote(str(environment))}",
        )
    with result_at(dest) as folder:
        path = str(fetch_model(model))
        options = [f"--{name}={size}" for name, size in sizes.items() if size]
        options += ["--task=text-generation-with-past", "--dtype=fp32", f"--model={path}"]
        what = f"{model}: the exporter failed"
        _run(environment, what, "optimum-cli", "export", "onnx", *options, str(folder))
        if verify:
            what = f"{model}: the ONNX model answers otherwise than the model before"
            script = str(Path(__file__).with_name("onnx_verify.py"))
            rows = str(sizes["batch_size"] or 1)
            say(_run(environment, what, "python", "-I", script, path, str(folder), rows))
    return {"status": "SUCCESS", "dest": dest}


def make_environment(folder: Path) -> None:
    """Make the environment, or install what it lacks, as after a kill.

    Raises:
        ConfigError: The environment cannot be made.
        InputError: A package cannot be installed.
    """
    if not (folder / "bin/pip").exists():
        logger.info("making %s with %s (1.3 GB, a few minutes)", folder, ", ".join(_PACKAGES))
        try:
            venv.create(folder, with_pip=True)
        except (OSError, subprocess.CalledProcessError) as error:
            hint = "name another --environment; Debian's Python needs the package python3-venv"
            raise ConfigError(f"{folder}: cannot be made ({error})", hint=hint) from error
    index = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")
    problem = f"{folder}: its packages cannot be installed"
    try:
        _run(folder, problem, "pip", "install", "--quiet", *_PACKAGES)
    except InputError:  # pip's own index may lack torch's CPU build
        _run(folder, problem, "pip", "install", "--quiet", "--extra-index-url", index, *_PACKAGES)


def _run(environment: Path, problem: str, program: str, *words: str) -> str:
    """Run a program of an environment, and return the last line that it prints. It asks no server for a model.

    Raises:
        ConfigError: It cannot be started, as where the environment's Python is gone.
        InputError: The program has failed.
    """
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    command = [str(environment / "bin" / program), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    except OSError as error:
        hint = f"remove {quote(str(environment))}, and make it again with --setup"
        raise ConfigError(f"{command[0]}: cannot be run ({error.strerror})", hint=hint) from error
    last = (done.stderr if done.returncode else done.stdout).strip().rpartition("\n")[2]
    if done.returncode:
        raise InputError(f"{problem} ({last})", hint=_HINT)
    return last
