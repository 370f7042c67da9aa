"""``python -m batchinfer``."""

from batchinfer.cli.entry import start

start()
