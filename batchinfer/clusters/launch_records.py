"""Records of launches below a run, launches/<id>.json: who is to be started where, written before it is submitted.

Whoever can write to the bucket can write such a record, so it is read as data: see `LaunchRecord`. An id ends with a
digest of the run's place, so that no record makes `stop --cancel` end the launch of another run.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from typing import Annotated

from msgspec import Meta

from batchinfer.clusters import ClusterName, Plan
from batchinfer.core import codec, layout
from batchinfer.core.errors import BatchinferError, InputError, ObjectNotFound
from batchinfer.core.records import FORMAT_VERSION, Record
from batchinfer.storage import Store

_DIGITS = 12
"""Hexadecimal digits of the digest of a run in the ids of its launches."""


class LaunchRecord(Record, frozen=True, kw_only=True):
    """Content of launches/<id>.json. Only `id` reaches a command line, and decoding checks how it is spelled."""

    format_version: int = FORMAT_VERSION
    id: Annotated[str, Meta(pattern=r"\A[0-9]{8}-[0-9]{6}-[0-9a-f]{16}\Z")]
    host: str
    """Machine on which `launch` ran."""
    on: ClusterName
    namespace: str
    """Namespace of Kubernetes, for people: where to look, the options of those who look say."""
    workers: Annotated[int, Meta(ge=1, le=100_000)]
    replaces: list[str]
    """Ids of lost workers of earlier launches in whose place some of these are started."""

    @property
    def worker_ids(self) -> list[str]:
        """Ids of the launch's workers, by rank."""
        return [layout.launched_worker(self.id, rank) for rank in range(self.workers)]


def new_id(now: float, run: str) -> str:
    """Return an id for a launch of a run: the time in UTC, four random digits, and a digest of these and the run."""
    start = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(2)}"
    return start + _digest(start, run)


def _digest(start: str, run: str) -> str:
    place = run if "://" in run else os.path.realpath(run)
    return codec.sha256(f"{start} {place}".encode())[:_DIGITS]


def record_launch(store: Store, plan: Plan, replaces: list[str]) -> None:
    """Create the record of a launch, before anything is submitted."""
    shared = {name: getattr(plan, name) for name in ("id", "on", "namespace", "workers")}
    record = LaunchRecord(**shared, host=socket.gethostname(), replaces=replaces)
    store.create(layout.launch_key(plan.id), codec.encode_pretty(record))


def forget_launch(store: Store, plan: Plan) -> None:
    """Remove the record of a launch of which nothing was submitted."""
    store.delete([layout.launch_key(plan.id)])


def find_launches(store: Store) -> tuple[dict[str, tuple[LaunchRecord, float]], list[str]]:
    """Return a run's launches by id, the oldest first, and notes about records that cannot be read.

    Each launch comes with the time at which it was recorded, in Unix seconds by storage's clock.
    """
    found: dict[str, tuple[LaunchRecord, float]] = {}
    notes = []
    for info in sorted(store.list(layout.LAUNCHES), key=lambda one: (one.modified, one.key)):
        try:
            record = codec.decode(store.get(info.key).data, LaunchRecord, name=info.key)
            if info.key != layout.launch_key(record.id):
                raise InputError(f"is not the record of {record.id}")
            if record.id != (start := record.id[:-_DIGITS]) + _digest(start, store.url):
                raise InputError("is of another run")
            found[record.id] = (record, info.modified)
        except ObjectNotFound:
            continue  # removed since it was listed
        except BatchinferError as error:
            notes.append(f"{info.key}: cannot be read, left out ({error.message})")
    return found, notes
