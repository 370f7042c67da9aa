"""The entry point of every command, small so that Ctrl-C while Python imports the rest gives no traceback.

It imports next to nothing itself: a SIGTERM before it runs ends the process with -15, after which no cluster brings a
worker back.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 75
_STOPPED_BY_SIGTERM = ("worker", "run")
"""Commands that SIGTERM ends as Ctrl-C does. A worker later puts handlers of its own in place."""


def start(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and end the process; see `batchinfer.cli.main.run`."""
    words = sys.argv[1:] if arguments is None else arguments
    # `split` gives polars a few thousand rows at a time: more threads cost a tenth more CPU, and save no time.
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    try:
        if words and words[0] in _STOPPED_BY_SIGTERM:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        from batchinfer.cli.main import run

        run(arguments)
    except KeyboardInterrupt:
        # The modules that write to the terminal may not have been imported yet.
        os.write(2, b"error: interrupted\n")
        os._exit(INTERRUPTED)
