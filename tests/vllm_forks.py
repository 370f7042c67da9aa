"""Runs programs that need vLLM as forks of a process that has imported it: a server starts in a second, not in twenty.

All processes of a test run share it. As a program it answers messages of JSON on the socket whose number it is given:
for code, its arguments and a file for what it writes, the process group of the fork that runs it; for such a group, its
exit status, or null while it runs. It ends with its last client, and every fork with it.
"""

import contextlib
import fcntl
import gc
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SERVE = "from batchinfer.engines.vllm_serve import main; main()"
_LONGEST_MESSAGE = 1 << 17


class Forks:
    """A client of the process, which the first one starts.

    Args:
        place: The socket.
        environment: Variables of the process beside those of the first client.
    """

    def __init__(self, place: Path, environment: dict[str, str]) -> None:
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self._line.connect(str(place))
            except OSError:  # nobody has started it, or it has ended with its last client
                place.unlink(missing_ok=True)
                self._begin(place, os.environ | environment)
                self._line.connect(str(place))

    @staticmethod
    def _begin(place: Path, environment: dict[str, str]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(place))
            listener.listen()
            program = ["setsid", "--fork", sys.executable, "-P", __file__, str(listener.fileno())]
            subprocess.run(
                program,
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # some versions of vLLM write there while they are imported
                env=environment,
                pass_fds=[listener.fileno()],
            )

    def start(self, code: str, arguments: Sequence[str], log: Path) -> int:
        """Run code in a fork. Returns its process group."""
        return self._ask([code, list(arguments), str(log)])

    def run(self, code: str, arguments: Sequence[str], log: Path) -> int:
        """Run code in a fork to its end. Returns its exit status."""
        group = self.start(code, arguments, log)
        while (status := self._ask(group)) is None:
            time.sleep(0.02)
        return status

    def _ask(self, request: Any) -> Any:
        self._line.send(json.dumps(request).encode())
        return json.loads(self._line.recv(_LONGEST_MESSAGE))

    def close(self) -> None:
        self._line.close()


def _become(code: str, arguments: list[str], log: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for place, number in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(number, place)
    sys.argv[1:] = arguments
    exec(code, {"__name__": "__main__"})
    sys.exit()


def _main(listener: socket.socket) -> None:
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
    clients = {listener.accept()[0]}
    while clients:
        for ready in select.select([listener, *clients], [], [])[0]:
            if ready is listener:
                clients.add(listener.accept()[0])
            elif message := ready.recv(_LONGEST_MESSAGE):
                request = json.loads(message)
                if isinstance(request, int):
                    answer = statuses.get(request)
                elif (answer := os.fork()) == 0:
                    _become(*request)
                ready.send(json.dumps(answer).encode())
            else:
                clients.remove(ready)
                ready.close()


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
