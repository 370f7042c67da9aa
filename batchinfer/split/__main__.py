"""`python -m batchinfer.split`: the same command as `batchinfer split`."""

import sys

from batchinfer.cli.entry import start

start(["split", *sys.argv[1:]])
