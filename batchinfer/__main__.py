"""``python -m batchinfer``."""

from batchinfer.cli import run

run()
