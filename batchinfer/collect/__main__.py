"""`python -m batchinfer.collect`: the same command as `batchinfer collect`."""

import sys

from batchinfer.cli.entry import start

start(["collect", *sys.argv[1:]])
