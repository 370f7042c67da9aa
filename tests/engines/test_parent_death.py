"""Real trees of processes. When the root is killed, no process below it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A stand-in for engines/host.py: it takes its end of a socket, then starts a child in one of the ways of vLLM.
HOST = r"""
import multiprocessing, os, socket, sys, threading, time
from batchinfer.engines import host
from batchinfer.engines.parent_death import ENGINE_VARIABLE, guard_forks
os.environ[ENGINE_VARIABLE] = str(os.getpid())
connection = socket.socket(fileno=int(sys.argv[2]))
guard_forks(connection.close)
sys.modules["__main__"].__spec__ = host.__spec__  # as under `python -m batchinfer.engines.host`

# A child tells its id once its imports are done. By then it is tied to its parent, however it was started.
# Two processes share the output. With PYTHONUNBUFFERED, print() would write an id and the end of its line one by one.
CHILD = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(60)"

def start(method=sys.argv[1]):
    multiprocessing.get_context(method).Process(target=exec, args=(CHILD, {})).start()

def start_two():  # a child whose child is forked again
    start("fork")
    time.sleep(60)

if sys.argv[1] == "nested":
    child = multiprocessing.get_context("fork").Process(target=start_two)
    child.start()
    os.write(1, b"%d\n" % child.pid)
elif sys.argv[1] == "thread":
    thread = threading.Thread(target=start, args=("fork",))
    thread.start()
    thread.join()
else:
    start()
time.sleep(60)
"""


def is_running(pid: int) -> bool:
    """Whether a process is alive and no zombie. An orphan may stay a zombie, as no parent waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < end, f"still alive: {left}"
        time.sleep(0.02)


@pytest.fixture
def start_host():
    """Start `HOST` with one of the ways to start children. Returns its process and our end of its socket."""
    started = []

    def start(way: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", HOST, way, str(theirs.fileno())],
                stdout=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        started.append((process, ours))
        return process, ours

    yield start
    for process, ours in started:
        # Kill the whole group, so that a failing test leaves no process behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
        process.stdout.close()
        ours.close()


@pytest.mark.parametrize(("way", "count"), [("fork", 1), ("nested", 2), ("spawn", 1)])
def test_children_of_a_host_that_is_killed_are_gone_and_its_socket_reads_end_of_file(
    start_host, way, count
):
    process, ours = start_host(way)
    children = [int(process.stdout.readline()) for _ in range(count)]
    assert all(map(is_running, children))
    process.kill()
    process.wait(60)
    ours.settimeout(60.0)
    assert ours.recv(1) == b""
    wait_until_gone(children)


def test_a_child_forked_by_a_thread_outlives_it_and_still_holds_no_socket(start_host):
    process, ours = start_host("thread")
    child = int(process.stdout.readline())
    time.sleep(0.5)
    assert is_running(child)
    process.kill()
    ours.settimeout(60.0)
    assert ours.recv(1) == b""
    assert is_running(child)
