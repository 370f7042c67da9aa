"""`python -m batchinfer.worker`: the same command as `batchinfer worker`."""

import sys

from batchinfer.cli.main import run

run(["worker", *sys.argv[1:]])
