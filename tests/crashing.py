"""Kills a command before every change that it makes to files, runs it again, and compares what is there then.

For a store in a local folder every request that changes it is one change to files or more. So the command dies before
and after each of these requests, too. Between two changes it does not matter when it dies.
"""

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from batchinfer.cli.main import main

_CHANGES = {f"os.{name}" for name in ("link", "mkdir", "remove", "rename", "rmdir", "truncate")}
"""Python's audit events for changes to files, besides an opening for writing."""
_WRITES = os.O_WRONLY | os.O_RDWR
_RANDOM = re.compile(r"[0-9a-f]{12,}")
"""Parts of names that differ from run to run."""
_MADE = re.compile(rb"as of [0-9-]+ [0-9:]+ UTC")
"""What a page says about when it was made."""


def crash_everywhere(
    command: Sequence[str], wanted: Sequence[str], start: Path, *, step: int = 1
) -> list[str]:
    """Kill `batchinfer COMMAND` before every change to files, run it again, and check that the same bytes are there.

    Changes in the folder for temporary files do not count: what a killed command left there is nobody's.

    Args:
        command: The words after `batchinfer`. Relative paths are below the folder in which it runs.
        wanted: Patterns of the files whose bytes must be those that an undisturbed command leaves.
        start: The folder in which the command runs, as it is before; it is copied for each kill.
        step: 1 for every change, 2 for every second one, and so on.

    Returns:
        The changes before which the command was killed.
    """
    program = [sys.executable, __file__]
    words = json.dumps([list(command), list(wanted), str(start), step])
    done = subprocess.run(
        [*program, words], capture_output=True, text=True, timeout=280 if step > 1 else 600
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert not found["wrong"], found["wrong"]
    return list(found["killed"])


def _run_in_fork(command: list[str], folder: Path, point: str | None) -> tuple[int, str]:
    """Run a command in a fork of this process, killed before the change `point`. Returns its status and its log."""
    log = folder.with_suffix(".log")
    pid = os.fork()
    if pid == 0:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.alarm(60)
        os.chdir(folder)
        status, changes = 70, list[str]()

        def die_at_point(change: str) -> None:
            changes.append(change)
            if change == point:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            _before_changes(str(folder), die_at_point)
            status = main(command)
            folder.with_suffix(".json").write_text(json.dumps([changes, list(sys.modules)]))
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, log.read_text(errors="replace")


def _before_changes(folder: str, told: Callable[[str], None]) -> None:
    """Tell of every change to files before it happens, as "2nd os.link /job/job.json".

    Changes are named and not numbered over all: threads make them in another order each time.
    """
    lock, counts = threading.Lock(), Counter[str]()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _CHANGES and not (event == "open" and arguments[2] & _WRITES):
            return
        # A relative path is one in a folder for temporary files that is being removed.
        places = [
            each for each in arguments[:2] if isinstance(each, str) and each.startswith(folder)
        ]
        if not places or f"{places[-1]}/".startswith(f"{folder}/tmp/"):
            return
        with lock:
            name = f"{event} {_RANDOM.sub('*', places[-1].removeprefix(folder))}"
            counts[name] += 1
            told(f"{counts[name]}. {name}")

    sys.addaudithook(hook)


def _main(command: list[str], wanted: list[str], start: str, step: int) -> None:
    # Every run is in the same place, since records may hold absolute paths.
    folder = Path(f"{start}-crashes") / "here"
    folder.parent.mkdir()
    os.environ["TMPDIR"] = str(folder / "tmp")

    def begin() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder, symlinks=True)
        (folder / "tmp").mkdir()

    def found() -> dict[str, bytes]:
        places = [path for pattern in wanted for path in folder.glob(pattern) if path.is_file()]
        return {str(path.relative_to(folder)): _MADE.sub(b"", path.read_bytes()) for path in places}

    begin()
    status, said = _run_in_fork(command, folder, None)
    assert status == 0, said
    expected, killed, wrong = found(), list[str](), list[str]()
    assert expected, f"no file matches {wanted}"
    changes, modules = json.loads(folder.with_suffix(".json").read_text())
    for module in modules:  # once, and not in each fork
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    for point in changes[::step]:
        begin()
        status, said = _run_in_fork(command, folder, point)
        if status == 0:  # with threads in it the command does not make every change each time
            continue
        assert status == -signal.SIGKILL, said
        killed.append(point)
        status, said = _run_in_fork(command, folder, None)
        there = found()
        different = {each for each in {*there, *expected} if there.get(each) != expected.get(each)}
        if status or different:
            wrong.append(f"{point}: status {status}, {sorted(different)}\n{said}")
    shutil.rmtree(folder.parent)
    print(json.dumps({"killed": killed, "wrong": wrong}))


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
