"""Runs programs that need vLLM as forks of a process that has imported it: a server starts in a second, not in twenty.

As a program it reads requests from standard input, a line of JSON each: code, its arguments, a file for what it writes,
and whether to wait for its end. It answers each with the fork's process group, or with its exit status.
"""

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SERVE = "from batchinfer.engines.vllm_serve import main; main()"


class Forks:
    """The process, which ends with this object, and every fork with it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment,
        )

    def start(self, code: str, arguments: Sequence[str], log: Path) -> int:
        """Run code in a fork. Returns its process group."""
        return self._ask(code, list(arguments), str(log), False)

    def run(self, code: str, arguments: Sequence[str], log: Path) -> int:
        """Run code in a fork to its end. Returns its exit status."""
        return self._ask(code, list(arguments), str(log), True)

    def _ask(self, *request: Any) -> int:
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _become(code: str, arguments: list[str], log: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for place, number in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(number, place)
    sys.argv[1:] = arguments
    exec(code, {"__name__": "__main__"})
    sys.exit()


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some versions of vLLM write to standard output while they are imported
    import vllm.entrypoints.cli.serve
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401 - so that no fork imports it

    from batchinfer.engines.parent_death import die_with_parent

    # vLLM asks for a fresh process for the core of an engine, whatever the environment says.
    fork: Any = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _method=None: fork
    os.register_at_fork(after_in_child=die_with_parent)
    statuses: dict[int, int] = {}

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                statuses[found[0]] = os.waitstatus_to_exitcode(found[1])

    signal.signal(signal.SIGCHLD, reap)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        *request, has_to_end = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(*request)
        while has_to_end and pid not in statuses:
            time.sleep(0.02)
        print(statuses[pid] if has_to_end else pid, file=answers, flush=True)


if __name__ == "__main__":
    _main()
