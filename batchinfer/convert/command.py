"""`batchinfer convert`: the command of each conversion."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import click

from batchinfer.cli.options import F
from batchinfer.cli.settings import common_options
from batchinfer.convert import composer, onnx
from batchinfer.convert.composer import ComposerConfig
from batchinfer.convert.places import Conversion, conversion
from batchinfer.core.errors import ConfigError
from batchinfer.storage.opening import join_url


@click.group("convert")
def command() -> None:
    """Turn checkpoints into models, and models into other formats.

    SOURCE and DEST may be paths or URLs (s3://, gs://). DEST is a folder that does not exist yet. A local folder
    appears when the conversion is complete; in a bucket, the object _UNFINISHED stands in DEST until then. After a
    kill the same command begins anew.
    """


def _scratch_option(function: F) -> F:
    return click.option(
        "--scratch-dir",
        type=click.Path(path_type=Path),
        help="Local folder for files under way, for a DEST in a bucket.",
    )(function)


def _need(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"convert: needs the packages {', '.join(missing)}",
            hint="pip install 'batchinfer[convert]'",
        )


def _result(
    work: Conversion, source: str, started: float, details: dict[str, Any]
) -> dict[str, Any]:
    published = work.publish()
    return {
        "status": "SUCCESS",
        "source": source,
        "dest": work.dest,
        "files": published.files,
        "bytes": published.bytes,
        **details,
        "run_time_sec": round(time.monotonic() - started, 3),
    }


@command.command("composer-to-hf")
@click.argument("source")
@click.argument("dest")
@click.option(
    "--dtype",
    type=click.Choice(list(composer.DTYPES)),
    help="Type of the weights.  [default: as they are]",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with a tokenizer, for a checkpoint without one.",
)
@click.option(
    "--trust-remote-code", is_flag=True, help="Write .py files that the checkpoint holds."
)
@_scratch_option
@common_options
def composer_to_hf(**options: Any) -> dict[str, Any]:
    """Turn a Composer checkpoint (ep0-ba2000-rank0.pt) into a folder that transformers and vLLM load.

    No code in the checkpoint is run. Optimizer, metrics and the like are left out.
    """
    _need("torch", "transformers", "safetensors")
    started = time.monotonic()
    config = ComposerConfig(
        source=options["source"],
        dtype=options["dtype"] or "",
        tokenizer=options["tokenizer"],
        trust_remote_code=options["trust_remote_code"],
    )
    with conversion(options["dest"], scratch_dir=options["scratch_dir"]) as work:
        details = composer.convert(config, work)
        return _result(work, config.source, started, details)


@command.command("hf-to-onnx")
@click.argument("model", required=False)
@click.argument("dest", required=False)
@click.option(
    "--verify",
    is_flag=True,
    help="Compare logits and greedy tokens with torch before DEST is made.",
)
@click.option("--batch-size", type=click.IntRange(1), help="Rows of the example that is traced.")
@click.option("--max-seq-len", type=click.IntRange(1), help="Tokens of the example that is traced.")
@click.option("--opset", type=click.IntRange(9), help="Version of ONNX's operators.")
@click.option(
    "--setup",
    is_flag=True,
    help="Make the exporter's environment first, if it is missing (1.3 GB).",
)
@click.option(
    "--environment",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of that environment.  [default: ~/.cache/batchinfer/onnx]",
)
@_scratch_option
@common_options
def hf_to_onnx(**options: Any) -> dict[str, Any]:
    """Turn a model into ONNX, in float32 and with a cache of keys and values.

    MODEL is a folder, a URL or a name on the Hub. With --setup alone, only the environment is made.
    """
    started = time.monotonic()
    environment = options["environment"] or onnx.default_environment()
    if options["setup"]:
        onnx.make_environment(environment.absolute())
        if options["model"] is None:
            return {"status": "SUCCESS", "environment": str(environment)}
    if options["model"] is None or options["dest"] is None:
        raise ConfigError(
            "hf-to-onnx: needs MODEL and DEST", hint="batchinfer convert hf-to-onnx MODEL DEST"
        )
    config = onnx.OnnxConfig(
        source=options["model"],
        environment=environment.absolute(),
        verify=options["verify"],
        batch_size=options["batch_size"],
        max_seq_len=options["max_seq_len"],
        opset=options["opset"],
    )
    with conversion(options["dest"], scratch_dir=options["scratch_dir"]) as work:
        return _result(work, config.source, started, onnx.convert(config, work))


@command.command("mpt-to-ft")
@click.argument("model")
@click.argument("dest")
@click.option(
    "--gpus", type=click.IntRange(1), required=True, help="Number of GPUs to divide it over."
)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "fp16"]),
    default="fp32",
    show_default=True,
    help="Type of the weights.",
)
@click.option(
    "--force", is_flag=True, help="Convert also what FasterTransformer ignores (clip_qkv, qk_ln)."
)
@_scratch_option
@common_options
def mpt_to_ft(**options: Any) -> dict[str, Any]:
    """Turn an MPT model into the layout of FasterTransformer, in DEST/<gpus>-gpu.

    MODEL is a folder, a URL or a name on the Hub. Only for programs that read this layout: vLLM runs MPT as it is.
    """
    _need("torch", "transformers", "safetensors", "numpy")
    from batchinfer.convert import mpt

    started = time.monotonic()
    config = mpt.MptConfig(options["model"], options["gpus"], options["dtype"], options["force"])
    dest = join_url(options["dest"], f"{config.gpus}-gpu")
    with conversion(dest, scratch_dir=options["scratch_dir"]) as work:
        return _result(work, config.source, started, mpt.convert(config, work))
