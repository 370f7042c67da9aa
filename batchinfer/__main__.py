"""``python -m batchinfer``."""

from batchinfer.cli.main import run

run()
