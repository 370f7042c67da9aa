"""`python -m batchinfer.worker`: the same command as `batchinfer worker`."""

import sys

from batchinfer.cli.entry import start

start(["worker", *sys.argv[1:]])
