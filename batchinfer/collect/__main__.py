"""`python -m batchinfer.collect`: the same command as `batchinfer collect`."""

import sys

from batchinfer.cli.main import run

run(["collect", *sys.argv[1:]])
