"""`python -m batchinfer.check`: the same command as `batchinfer check`."""

import sys

from batchinfer.cli.main import run

run(["check", *sys.argv[1:]])
