"""`python -m batchinfer.split`: the same command as `batchinfer split`."""

import sys

from batchinfer.cli.main import run

run(["split", *sys.argv[1:]])
