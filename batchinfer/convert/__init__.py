"""`batchinfer convert`: checkpoints of trainers become models, models become other formats."""

from __future__ import annotations

import click

from batchinfer.convert.composer import composer_to_hf
from batchinfer.convert.mpt import mpt_to_ft
from batchinfer.convert.onnx import hf_to_onnx


@click.group("convert", commands=[composer_to_hf, hf_to_onnx, mpt_to_ft])
def command() -> None:
    """Turn checkpoints into models, and models into other formats.

    DEST is a folder that does not exist yet, local or in a bucket (s3://, gs://). A local folder appears when the
    conversion is complete; in a bucket, config.json comes last. After a kill the same command begins anew, in a bucket
    once it is empty.
    """
