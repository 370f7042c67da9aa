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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

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
_MARKERS = "markers"


class CleanConfig(Record, frozen=True, kw_only=True):
    """What to clean. Without `yes` nothing is changed. Objects younger than `older_than_seconds` stay."""

    run: str
    yes: bool = False
    older_than_seconds: float = DEFAULT_AGE_SECONDS
    redo: list[str] = []
    """Names of chunks to do again. `clean` removes the markers and segments of these chunks, whatever their age."""


class Removal(NamedTuple):
    """An object that may be removed once it has an age, by the name of its kind. An age of None: whatever its age."""

    what: str
    info: ObjectInfo
    least_age_seconds: float | None


@runtime_checkable
class _KeepsTemps(Protocol):
    """A store in which killed writers leave temporary files. The local folder is such a store."""

    def temps(self, older_than_seconds: float) -> Iterator[Path]: ...


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
    removed: dict[str, list[ObjectInfo]] = {}
    plan = list(find_removals(inventory, config))
    for removal in plan:
        if is_old(inventory, removal):
            removed.setdefault(removal.what, []).append(removal.info)
    released = claims_to_release(inventory)
    age_seconds = config.older_than_seconds
    if inventory.living():  # a temporary file may be a live worker's, and a large upload takes long
        age_seconds = max(age_seconds, DEFAULT_AGE_SECONDS)
    temps = list(store.temps(age_seconds)) if isinstance(store, _KeepsTemps) else []
    for what, infos in removed.items():
        show(f"{what}: {len(infos)}, {sum(info.bytes for info in infos)} bytes")
    for what, number in (("claims of the dead, released", released), ("temporary files", temps)):
        if number:
            show(f"{what}: {len(number)}")
    if config.yes:
        # Markers go last. If this process is killed before, their chunks still count as done.
        order = sorted(removed, key=lambda what: what == _MARKERS)
        store.delete([info.key for what in order for info in removed[what]])
        for key in released:
            _release(store, key, inventory)
        for path in temps:
            path.unlink(missing_ok=True)
    everything = [info for infos in removed.values() for info in infos]
    return {
        "status": "SUCCESS",
        "run": store.url,
        "is_dry_run": not config.yes,
        "removed": {what: len(infos) for what, infos in removed.items()},
        "removed_bytes": sum(info.bytes for info in everything),
        "claims_released": len(released),
        "temps_removed": len(temps),
        "kept_young": len(plan) - len(everything),
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


def is_old(inventory: Inventory, removal: Removal) -> bool:
    """Whether an object has the age at which it may be removed, by the time of the inventory."""
    if removal.least_age_seconds is None:
        return True
    if not removal.info.modified:
        # The store gives no times, so ages are not known. Then all objects stay while any worker is alive.
        return not inventory.living()
    return inventory.now - removal.info.modified >= removal.least_age_seconds


def find_removals(inventory: Inventory, config: CleanConfig) -> Iterator[Removal]:
    """Yield what may be removed. Sends no request to the store.

    Raises:
        InputError: a chunk to do again has neither a marker nor segments.
    """
    age = config.older_than_seconds
    no_worker_runs = not age  # by --older-than 0, the user says so
    for name in dict.fromkeys(config.redo):
        yield from _redone(inventory, name)
    for name, info in inventory.orphans():
        # An unreadable marker of the chunk may name this output, so the output stays. The output of a chunk in `redo`
        # stays, too: `clean` removes the chunk's marker, and without a marker another worker could still name it.
        is_in_use = inventory.has_damaged_marker(name) or name in config.redo
        is_settled = inventory.is_passed_over(name, info) and not inventory.owner(name)
        if is_settled and not is_in_use:
            yield Removal("orphan outputs", info, age)
    for name, infos in inventory.segments.items():
        if name in config.redo or inventory.owner(name) or inventory.current(name) is None:
            continue
        for info in infos:
            # Segments that are newer than the marker of a chunk with error rows may belong to a repair that has not
            # ended. They stay, unless no worker runs.
            if no_worker_runs or inventory.is_passed_over(name, info):
                yield Removal("segments of done chunks", info, age)
    for name, claim in inventory.claims.items():
        if claim.record is None:
            # A young record that cannot be read may be replaced by a live worker at any moment, with its next heartbeat
            # or claim. That new object must not be deleted.
            yield Removal("unreadable claims", claim.info, age)
        elif not inventory.owner(name) and inventory.current(name) is not None:
            yield Removal("claims of done chunks", claim.info, age)
    for record in inventory.workers.values():
        if record.record is None:
            yield Removal("unreadable worker records", record.info, age)
    for info in inventory.probes:
        # A worker probes the store before it writes its record. So a young probe may belong to a live worker that
        # has no record yet.
        yield Removal("probes", info, max(age, PROBE_SECONDS))


def _redone(inventory: Inventory, name: str) -> Iterator[Removal]:
    """Yield the markers and segments of a chunk that is to be done again.

    The chunk's outputs become orphans. A later `clean` removes them, once the chunk has a new marker.
    """
    markers = inventory.markers.get(name, {})
    segments = inventory.segments.get(name, [])
    if not markers and not segments:
        raise InputError(
            f"--redo {name}: no chunk of this name has a marker or checkpoints",
            hint="check the name, as in part-00012; a chunk that nobody has begun only needs workers",
        )
    for info in segments:
        yield Removal("segments of chunks to do again", info, None)
    for marker in markers.values():
        yield Removal(_MARKERS, marker.info, None)


def claims_to_release(inventory: Inventory) -> list[str]:
    """Return the keys of the claims on unfinished chunks whose workers are gone."""
    return [
        claim.info.key
        for name, claim in inventory.claims.items()
        if claim.record is not None
        and claim.record.worker
        and not inventory.owner(name)
        and inventory.current(name) is None
    ]


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
        store.replace(
            key, codec.encode(Claim(worker="", nonce=claim.nonce, number=claim.number)), etag
        )
    except PreconditionFailed:
        logger.info("%s: taken over meanwhile", key)


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
    """Remove what dead workers left: orphan outputs, old claims, segments of done chunks, temporary files.

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
        young = f"younger than {config.older_than_seconds:g} s (--older-than)"
        say(f"{result['kept_young']} objects stay because they are {young}")
    return result
