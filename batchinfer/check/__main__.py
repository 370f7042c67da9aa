"""`python -m batchinfer.check`: the same command as `batchinfer check`."""

import sys

from batchinfer.cli.entry import start

start(["check", *sys.argv[1:]])
