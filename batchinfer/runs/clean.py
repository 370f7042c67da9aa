"""`batchinfer clean`: remove what dead workers left under a run.

Except with --older-than 0, this is safe while workers work on the run. An output that a readable marker of any
generation names is never touched. An output without a marker (an orphan) may still get one, even from a machine that
wakes up after a week. So an orphan is removed only if three things hold: its chunk already has a marker, which keeps
the orphan from getting one; the orphan is old; and no live worker has claimed the chunk. A dead worker's claim on an
unfinished chunk is not deleted, but released by a conditional write (if-match): its owner may have returned since the
claim was read, and then the write fails.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import click

from batchinfer.cli.settings import common_options
from batchinfer.cli.terminal import say
from batchinfer.cli.values import NumberRange
from batchinfer.core import codec, layout
from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.errors import InputError, ObjectNotFound, PreconditionFailed
from batchinfer.core.records import Claim, Record
from batchinfer.ledger.claims import decode_claim
from batchinfer.ledger.inventory import Inventory, take_inventory
from batchinfer.ledger.runs import no_run, refuse_newer
from batchinfer.storage import ObjectInfo, Store

logger = logging.getLogger(__name__)

DEFAULT_AGE_SECONDS = 3600.0
PROBE_SECONDS = 600.0
"""Smallest age in seconds at which a probe object counts as left behind.

A worker writes a probe object to test the store. It removes the object after half a dozen requests.
"""


class CleanConfig(Record, frozen=True, kw_only=True):
    """What to clean. Without `yes` nothing is changed. Objects younger than `older_than_seconds` stay."""

    run: str
    yes: bool = False
    older_than_seconds: float = DEFAULT_AGE_SECONDS
    redo: list[str] = []
    """Names of chunks to do again. `clean` removes the markers and segments of these chunks, whatever their age."""


@runtime_checkable
class _KeepsTemps(Protocol):
    """A store in which killed writers leave temporary files. The local folder is such a store."""

    def temps(self, older_than_seconds: float) -> Iterable[object]: ...

    def sweep_temps(self, older_than_seconds: float) -> int: ...


@runtime_checkable
class _KeepsUploads(Protocol):
    """A store in which killed writers leave unfinished multipart uploads. S3 is such a store."""

    def list_multipart_uploads(self) -> Iterator[Any]: ...

    def abort_multipart_uploads(self, older_than_seconds: float) -> int: ...


@dataclass(slots=True)
class Removals:
    """`removed` holds the objects to remove by the name of their kind; `released`, the keys of claims to release."""

    removed: dict[str, list[ObjectInfo]] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    num_kept_young: int = 0

    def add(self, what: str, info: ObjectInfo) -> None:
        """Add an object to the objects of one kind."""
        self.removed.setdefault(what, []).append(info)

    def keys(self) -> list[str]:
        """Every key to delete, with markers last.

        If `clean` is killed before it deletes the markers, their chunks still count as done.
        """
        order = sorted(self.removed, key=lambda what: what == "markers")
        return [info.key for what in order for info in self.removed[what]]


def run_clean(
    config: CleanConfig,
    *,
    store: Store,
    clock: Clock,
    show: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Remove what dead workers left.

    If this function is killed half way, the next call removes the rest.

    Args:
        config: What to clean.
        store: The run's store.
        clock: The clock by which a dry run computes ages. With `yes`, the store's own time is used if it gives any.
        show: Called with each line of text about what is removed, or would be removed.

    Raises:
        InputError: there is no run, or the run is of a newer format version, or a chunk to do again has neither a
            marker nor segments.
    """
    refuse_newer(store)  # only a newer batchinfer knows which objects of a newer run may be removed
    now = _time_of(store, clock) if config.yes else clock.now()
    inventory = take_inventory(store, now=now, patience_seconds=config.older_than_seconds)
    if inventory.is_empty:
        raise no_run(store)
    # The inventory of a large run takes minutes, and a worker may have written a damaged record of its own anew since.
    inventory.look_again_at_damaged(store)
    removals = find_removals(inventory, config)
    for what, infos in removals.removed.items():
        show(f"{what}: {len(infos)}, {sum(info.bytes for info in infos)} bytes")
    if removals.released:
        show(f"claims of workers that are gone, released: {len(removals.released)}")
    age_seconds = config.older_than_seconds
    if (
        inventory.living()
    ):  # an unfinished upload may be a live worker's, and a large upload takes long
        age_seconds = max(age_seconds, DEFAULT_AGE_SECONDS)
    num_temps = _count_temps(store, age_seconds, now)
    if num_temps:
        show(f"unfinished uploads: {num_temps}")
    if config.yes:
        store.delete(removals.keys())
        for key in removals.released:
            _release(store, key, inventory)
        num_temps = _remove_temps(store, age_seconds)
    return {
        "status": "SUCCESS",
        "run": store.url,
        "is_dry_run": not config.yes,
        "removed": {what: len(infos) for what, infos in removals.removed.items()},
        "removed_bytes": sum(info.bytes for infos in removals.removed.values() for info in infos),
        "claims_released": len(removals.released),
        "uploads_aborted": num_temps,
        "kept_young": removals.num_kept_young,
    }


def _time_of(store: Store, clock: Clock) -> float:
    """Return the time by the store's clock: write an object, read its modification time and remove it again.

    If this machine's clock were used and were an hour ahead, every worker would look dead and every object old. So
    this machine's clock is used only if the store gives no times.

    Raises:
        InputError: there is no run at this place. Nothing is written in that case.
    """
    places = (layout.RUN_KEY, layout.WORKERS, layout.OUTPUTS)
    if not any(next(iter(store.list(place)), None) for place in places):
        raise no_run(store)
    key = f"{layout.PROBES}{secrets.token_hex(8)}"
    try:
        store.create(key, b"clean: what time is it\n")
        return store.stat(key).modified or clock.now()
    finally:
        store.delete([key])


def find_removals(inventory: Inventory, config: CleanConfig) -> Removals:
    """Decide what to remove, without any request to the store."""
    removals = Removals()
    nobody_lives = not inventory.living()
    no_worker_runs = (
        not config.older_than_seconds
    )  # by --older-than 0, the user says that no worker runs

    def is_old(info: ObjectInfo) -> bool:
        # If the store gives no times, the age of objects is not known. Then all objects stay while any worker is alive.
        if not info.modified:
            return nobody_lives
        return inventory.now - info.modified >= config.older_than_seconds

    def consider(what: str, info: ObjectInfo) -> None:
        if is_old(info):
            removals.add(what, info)
        else:
            removals.num_kept_young += 1

    def is_claimed(name: str) -> bool:
        owner = inventory.claims.get(name)
        return owner is not None and owner.is_alive

    for name in dict.fromkeys(config.redo):
        _redo(inventory, name, removals)
    for name, info in inventory.orphans():
        is_settled = inventory.is_passed_over(name, info) and not is_claimed(name)
        # An unreadable marker of the chunk may name this output, so the output stays. The output of a chunk in `redo`
        # stays, too: `clean` removes the chunk's marker, and without a marker another worker could still name it.
        if not is_settled or inventory.damaged_markers.get(name) or name in config.redo:
            continue
        consider("orphan outputs", info)
    for name, infos in inventory.segments.items():
        if name in config.redo or is_claimed(name) or inventory.current(name) is None:
            continue
        for info in infos:
            # Segments that are newer than the marker of a chunk with error rows may belong to a repair that has not
            # ended. They stay, unless no worker runs.
            if no_worker_runs or inventory.is_passed_over(name, info):
                consider("segments of done chunks", info)
    _consider_claims(inventory, consider, removals)
    _consider_unreadable(inventory, consider)
    _consider_probes(inventory, config.older_than_seconds, removals)
    return removals


def _consider_unreadable(inventory: Inventory, consider: Callable[[str, ObjectInfo], None]) -> None:
    """Consider claims and workers' records that cannot be read.

    A young one may be replaced by a live worker at any moment, with its next heartbeat or claim. That new object must
    not be deleted.
    """
    for damaged in inventory.damaged_claims.values():
        consider("unreadable claims", damaged.info)
    for damaged in inventory.damaged_workers.values():
        consider("unreadable worker records", damaged.info)


def _consider_probes(inventory: Inventory, older_than_seconds: float, removals: Removals) -> None:
    for info in inventory.probes:
        # A worker probes the store before it writes its record. So a young probe may belong to a live worker that
        # has no record yet.
        if inventory.now - info.modified >= max(older_than_seconds, PROBE_SECONDS):
            removals.add("probes", info)
        else:
            removals.num_kept_young += 1


def _redo(inventory: Inventory, name: str, removals: Removals) -> None:
    """Add the markers and segments of a chunk that is to be done again.

    The chunk's outputs become orphans. A later `clean` removes them, once the chunk has a new marker.
    """
    markers = inventory.marker_infos.get(name, {})
    segments = inventory.segments.get(name, [])
    if not markers and not segments:
        raise InputError(
            f"--redo {name}: no chunk of this name has a marker or checkpoints",
            hint="check the name, as in part-00012; a chunk that nobody has begun only needs workers",
        )
    for info in segments:
        removals.add("segments of chunks to do again", info)
    for info in markers.values():
        removals.add("markers", info)


def _consider_claims(
    inventory: Inventory, consider: Callable[[str, ObjectInfo], None], removals: Removals
) -> None:
    for name, owner in inventory.claims.items():
        if owner.is_alive:
            continue
        if inventory.current(name) is not None:
            consider("claims of done chunks", owner.info)
        elif owner.claim.worker:
            removals.released.append(owner.info.key)


def _release(store: Store, key: str, inventory: Inventory) -> None:
    """Release a dead worker's claim, unless a live worker has taken the claim since the inventory was made."""
    try:
        data, etag = store.get(key)
    except ObjectNotFound:
        return
    claim = decode_claim(data, key)
    if not claim.worker:
        return
    # The claim's present owner may have started after the inventory was made. A worker writes its record before its
    # first claim, so the owner's record can be read now.
    inventory.look_again(store, claim.worker)
    if inventory.is_claim_alive(claim):
        return
    try:
        store.replace(key, codec.encode(Claim(worker="", epoch=0, nonce=claim.nonce)), etag)
    except PreconditionFailed:
        logger.info("%s: taken over meanwhile", key)


def _count_temps(store: Store, older_than_seconds: float, now: float) -> int:
    if isinstance(store, _KeepsTemps):
        return sum(1 for _ in store.temps(older_than_seconds))
    if isinstance(store, _KeepsUploads):
        limit = now - older_than_seconds
        return sum(1 for upload in store.list_multipart_uploads() if upload.started < limit)
    return 0


def _remove_temps(store: Store, older_than_seconds: float) -> int:
    if isinstance(store, _KeepsTemps):
        return store.sweep_temps(older_than_seconds)
    if isinstance(store, _KeepsUploads):
        return store.abort_multipart_uploads(older_than_seconds)
    return 0


@click.command("clean")
@click.argument("run")
@click.option("--yes", is_flag=True, help="Do it. Without it, only say what would be removed.")
@click.option(
    "--older-than",
    "older_than_seconds",
    type=NumberRange(0),
    default=DEFAULT_AGE_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="Leave what is younger: it may be a live worker's. 0 only when no worker runs.",
)
@click.option(
    "--redo",
    multiple=True,
    metavar="CHUNK",
    help="Also remove this chunk's markers and checkpoints, so that a worker does it again.",
)
@common_options
def command(**options: Any) -> dict[str, Any]:
    """Remove what dead workers left: orphan outputs, old claims, segments of done chunks, unfinished uploads.

    A dry run unless --yes is given. Safe while workers run. What a marker names is never touched, except by --redo.
    """
    from batchinfer.storage.opening import open_store

    config = CleanConfig(**{**options, "redo": list(options["redo"])})

    def tell(line: str) -> None:
        say(line if config.yes else f"would remove: {line}")

    result = run_clean(config, store=open_store(config.run), clock=SystemClock(), show=tell)
    if not config.yes:
        say("dry run; nothing was changed. To do it, add --yes")
    if result["kept_young"]:
        say(
            f"{result['kept_young']} objects stay because they are younger than "
            f"{config.older_than_seconds:g} s (--older-than)"
        )
    return result
