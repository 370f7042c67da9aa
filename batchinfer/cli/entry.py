"""The entry point of every command. It is small, so that Ctrl-C while Python imports the rest gives no traceback."""

from __future__ import annotations

import os
from collections.abc import Sequence

INTERRUPTED = 75


def start(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and end the process; see `batchinfer.cli.main.run`."""
    try:
        from batchinfer.cli.main import run

        run(arguments)
    except KeyboardInterrupt:
        # The modules that write to the terminal may not have been imported yet.
        os.write(2, b"error: interrupted\n")
        os._exit(INTERRUPTED)
