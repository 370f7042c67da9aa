"""Records of launches below a run: what was to be submitted, and what was submitted.

`launches/<id>.json` is created before anything is submitted, and `launches/<id>.submitted.json` afterwards. A launch
with only the first is being submitted or was killed meanwhile; what it submitted is not known.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Any, NamedTuple

from batchinfer.clusters import Plan, find_cluster
from batchinfer.core import codec, layout
from batchinfer.core.clock import iso_utc
from batchinfer.core.errors import BatchinferError, ConfigError, ObjectNotFound
from batchinfer.core.records import FORMAT_VERSION, Record
from batchinfer.storage import Store

_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{4}")
"""Ids of launches, as `new_id` makes them."""


class LaunchRecord(Record, frozen=True, kw_only=True):
    """Content of launches/<id>.json."""

    format_version: int
    at: str
    cluster: str
    plan: Plan


class SubmissionRecord(Record, frozen=True, kw_only=True):
    """Content of launches/<id>.submitted.json."""

    format_version: int
    at: str
    handle: dict[str, Any]
    """What names the workers in the cluster."""


class FoundLaunch(NamedTuple):
    """A launch of a run. `handle` is None if it is not known what was submitted."""

    record: LaunchRecord
    handle: dict[str, Any] | None
    created: float
    """Unix seconds by storage's clock."""

    @property
    def worker_ids(self) -> list[str]:
        """Ids of the launch's workers, by rank."""
        plan = self.record.plan
        return [layout.launched_worker(plan.id, rank) for rank in range(plan.workers)]


def new_id(now: float) -> str:
    """Return an id for a launch: the time in UTC, and four random hexadecimal digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(2)}"


def record_launch(store: Store, cluster: str, plan: Plan, now: float) -> None:
    """Create the record of a launch, before anything is submitted."""
    record = LaunchRecord(
        format_version=FORMAT_VERSION, at=iso_utc(now), cluster=cluster, plan=plan
    )
    store.create(layout.launch_key(plan.id), codec.encode_pretty(record))


def record_submission(store: Store, plan: Plan, handle: dict[str, Any], now: float) -> None:
    """Create the record of what was submitted."""
    record = SubmissionRecord(format_version=FORMAT_VERSION, at=iso_utc(now), handle=handle)
    store.create(layout.submission_key(plan.id), codec.encode_pretty(record))


def forget_launch(store: Store, plan: Plan) -> None:
    """Remove the record of a launch of which nothing was submitted."""
    store.delete([layout.launch_key(plan.id)])


def find_launches(store: Store) -> tuple[list[FoundLaunch], list[str]]:
    """Return a run's launches, the oldest first, and notes about records that cannot be read.

    Whoever can write to the bucket can write a record. One that names anything but the jobs of its own launch is left
    out, so that its words reach no command line.
    """
    infos = {info.key: info for info in store.list(layout.LAUNCHES)}
    found, notes = [], []
    for key, info in infos.items():
        if key.endswith(".submitted.json"):
            continue
        try:
            record = codec.decode(store.get(key).data, LaunchRecord, name=key)
            submitted = layout.submission_key(record.plan.id)
            handle = None
            if submitted in infos:
                data = store.get(submitted).data
                handle = codec.decode(data, SubmissionRecord, name=submitted).handle
            _refuse_strange(key, record, handle)
        except ObjectNotFound:
            continue  # removed since it was listed
        except BatchinferError as error:
            notes.append(f"{key}: cannot be read, left out ({error.message})")
            continue
        found.append(FoundLaunch(record, handle, info.modified))
    # The ids of launches of one second differ only in random digits; `at` has milliseconds.
    found.sort(key=lambda launch: (launch.record.at, launch.record.plan.id))
    return found, notes


def _refuse_strange(key: str, record: LaunchRecord, handle: dict[str, Any] | None) -> None:
    plan = record.plan
    if not _ID.fullmatch(plan.id) or key != layout.launch_key(plan.id):
        raise ConfigError(f"{key}: is not the record of a launch {plan.id!r}")
    cluster = find_cluster(record.cluster)
    if handle is not None:
        cluster.check_handle(plan, handle)
