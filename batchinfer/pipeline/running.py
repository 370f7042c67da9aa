"""Keeps two `run` commands from working in one work folder at once, where they would answer rows twice.

A command writes a record with its host and process id into the work folder, and removes it at its end. The record of a
killed command blocks nobody. A new command on the same host sees at once that the process is gone. One on another host
watches for a while whether the worker still writes heartbeats.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Iterator

from batchinfer.core import codec, layout, units
from batchinfer.core.clock import Clock
from batchinfer.core.errors import (
    AlreadyExists,
    BatchinferError,
    InputError,
    ObjectNotFound,
    PreconditionFailed,
)
from batchinfer.core.processes import start_of_process
from batchinfer.core.records import FORMAT_VERSION, Record, Worker
from batchinfer.ledger.claims import HEARTBEATS_PER_LEASE
from batchinfer.storage import Store

logger = logging.getLogger(__name__)

WORKER_ID = "run"
"""Id of the worker of a `run` command."""
RUNNING = "running.json"
"""Key of the `RunningRecord` in the work folder."""
_ENDED = ("done", "stopped", "failed")
_LOOK_SECONDS = 2.0
_HEARTBEATS = 1.5
"""Number of intervals between heartbeats for which a command on another host is watched."""


class RunningRecord(Record, frozen=True, kw_only=True):
    """Content of `RUNNING`: the command that works in the work folder, or the one that was killed there last."""

    format_version: int
    host: str
    pid: int
    process_start: str
    """Text of `start_of_process` for the process."""
    started: float
    nonce: str


@contextlib.contextmanager
def running_alone(work: Store, run: Store, clock: Clock) -> Iterator[None]:
    """Record in the work folder that this process works there. The record is removed at the end.

    Args:
        work: Store of the work folder.
        run: Store of the run.
        clock: Tells the time.

    Raises:
        InputError: Another `run` command works there.
    """
    mine = RunningRecord(
        format_version=FORMAT_VERSION,
        host=socket.gethostname(),
        pid=os.getpid(),
        process_start=start_of_process(os.getpid()),
        started=clock.now(),
        nonce=secrets.token_hex(8),
    )
    data = codec.encode_pretty(mine)
    try:
        work.create(RUNNING, data)
    except AlreadyExists:
        _take_over(work, data, mine, _OtherWorker(run, clock), clock)
    try:
        yield
    finally:
        with contextlib.suppress(BatchinferError):
            if work.get(RUNNING).data == data:
                work.delete([RUNNING])


def _take_over(
    work: Store, data: bytes, mine: RunningRecord, other: _OtherWorker, clock: Clock
) -> None:
    """Replace the record of a command that is gone.

    Raises:
        InputError: The command still runs, or others replace the record at the same time.
    """
    for _ in range(3):
        try:
            there, etag = work.get(RUNNING)
            name = f"{work.url}/{RUNNING}"
            record = codec.decode(there, RunningRecord, name=name, hint=f"remove {name}")
            if _still_runs(record, mine, other):
                raise _refusal(record, mine, work.url, clock)
            work.replace(RUNNING, data, etag)
        except ObjectNotFound:  # the other command has just ended
            with contextlib.suppress(AlreadyExists):
                work.create(RUNNING, data)
                return
        except PreconditionFailed:
            continue
        else:
            return
    raise InputError(
        f"{work.url}: several `batchinfer run` commands were started there at once",
        hint="let one of them run",
    )


def _still_runs(record: RunningRecord, mine: RunningRecord, other: _OtherWorker) -> bool:
    if record.host == mine.host:
        is_own = (record.pid, record.process_start) == (mine.pid, mine.process_start)
        return not is_own and start_of_process(record.pid) == record.process_start != ""
    return other.is_alive(record)


def _refusal(record: RunningRecord, mine: RunningRecord, url: str, clock: Clock) -> InputError:
    is_here = record.host == mine.host
    seconds = max(0.0, clock.now() - record.started)
    return InputError(
        f"{url}: another `batchinfer run` works there: process {record.pid}"
        f"{'' if is_here else f' on the host {record.host}'}, for {units.duration(seconds)}",
        hint="wait until it has ended"
        + (f", or end it (kill {record.pid}) and run this command again" if is_here else ""),
    )


class _OtherWorker:
    """The worker of a `run` command on another host, as its heartbeats show it."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._key = layout.worker_key(WORKER_ID)
        self._clock = clock

    def is_alive(self, record: RunningRecord) -> bool:
        """Watch the worker for `_HEARTBEATS` intervals, and return whether it has written a heartbeat."""
        first = self._read()
        if first is None or first.state in _ENDED:
            return False
        seconds = _HEARTBEATS * first.lease_seconds / HEARTBEATS_PER_LEASE
        logger.info(
            "watching for %s whether the `batchinfer run` on the host %s (process %d) is still alive",
            *(units.duration(seconds), record.host, record.pid),
        )
        until = self._clock.monotonic() + seconds
        while self._clock.monotonic() < until:
            self._clock.sleep(_LOOK_SECONDS)
            found = self._read()
            if found is not None and (found.nonce, found.beat) != (first.nonce, first.beat):
                return True
        return False

    def _read(self) -> Worker | None:
        try:
            data = self._store.get(self._key).data
        except ObjectNotFound:
            return None
        return codec.decode(data, Worker, name=f"{self._store.url}/{self._key}")
