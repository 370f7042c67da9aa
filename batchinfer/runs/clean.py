"""`batchinfer clean`: remove what dead workers left under a run.

Except with --older-than 0, this is safe while workers work on the run. An output that a readable marker of any
generation names is never touched. An output without a marker (an orphan) may still get one, even from a machine that
wakes up after a week. So an orphan is removed only if three things hold: its chunk already has a marker, which keeps
the orphan from getting one; the orphan is old; and no live worker has claimed the chunk. Claims on unfinished chunks
stay: workers take over those of the dead by themselves.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

from batchinfer.cli.config_commands import config_command
from batchinfer.cli.terminal import say
from batchinfer.core import layout, units
from batchinfer.core.clock import Clock
from batchinfer.core.errors import InputError
from batchinfer.core.option_help import NO_OPTION, NotNegative, Opt
from batchinfer.core.records import Record
from batchinfer.ledger.inventory import Inventory, take_inventory
from batchinfer.ledger.runs import read_run
from batchinfer.runs.stop import require_run
from batchinfer.storage import ObjectInfo, Store
from batchinfer.storage.scratch import remove_quietly

DEFAULT_AGE_SECONDS = 3600.0
ANY_AGE = float("-inf")


class CleanConfig(Record, frozen=True, kw_only=True):
    """What to clean."""

    run: Annotated[str, NO_OPTION]
    yes: bool = False
    """Do it. Without it, only say what would be removed."""
    older_than_seconds: Annotated[NotNegative, Opt(flag="--older-than", metavar="SECONDS")] = (
        DEFAULT_AGE_SECONDS
    )
    """Leave what is younger: it may be a live worker's. 0 only when no worker runs."""
    redo: Annotated[list[str], Opt(metavar="CHUNK")] = []
    """Also remove this chunk's markers and checkpoints, whatever their age, so that a worker does it again."""


class Removal(NamedTuple):
    """An object that may be removed once it has an age in seconds, by the name of its kind."""

    what: str
    info: ObjectInfo
    least_age: float


def run_clean(config: CleanConfig, *, store: Store, clock: Clock) -> dict[str, Any]:
    """Remove what dead workers left.

    If this function is killed half way, the next call removes the rest.

    Args:
        config: What to clean.
        store: The run's store.
        clock: The clock by which a dry run computes ages. With `yes`, the store's own time is used.

    Raises:
        InputError: there is no run, or its run.json is damaged, edited or of a newer format version, or a chunk to do
            again has neither a marker nor segments.
    """
    require_run(store)
    read_run(store)  # only a newer batchinfer knows the objects of a newer run
    now = _time_of(store) if config.yes else clock.now()
    age_seconds = config.older_than_seconds
    inventory = take_inventory(store, now=now, patience_seconds=age_seconds)
    plan = list(find_removals(inventory, config))
    removed = [one for one in plan if now - one.info.modified >= one.least_age]
    if inventory.living():  # a temporary file may be a live worker's, and a large upload takes long
        age_seconds = max(age_seconds, DEFAULT_AGE_SECONDS)
    find_temps = getattr(store, "temps", None)  # killed writers leave such files in a local folder
    temps = list(find_temps(age_seconds)) if find_temps else []
    if config.yes:
        store.delete([one.info.key for one in removed])
        for path in temps:
            remove_quietly(path)
    return {
        "status": "SUCCESS",
        "run": store.url,
        "is_dry_run": not config.yes,
        "removed": dict(Counter(one.what for one in removed)),
        "removed_bytes": sum(one.info.bytes for one in removed),
        "temps_removed": len(temps),
        "kept_young": len(plan) - len(removed),
    }


def _time_of(store: Store) -> float:
    """Return the time by the store's clock: write an object, read its modification time and remove it again.

    If this machine's clock were used and were an hour ahead, every worker would look dead and every object old.
    """
    key = f"{layout.PROBES}{secrets.token_hex(8)}"
    try:
        store.create(key, b"clean: what time is it\n")
        return store.stat(key).modified
    finally:
        store.delete([key])


def find_removals(inventory: Inventory, config: CleanConfig) -> Iterator[Removal]:
    """Yield what may be removed, in the order in which it has to go. Sends no request to the store.

    A chunk's markers go after its segments: if the process is killed before, the chunk still counts as done. Notes go
    after the markers, because a worker may leave another one as long as the markers are there.

    Raises:
        InputError: a chunk to do again has neither a marker nor segments.
    """
    age = config.older_than_seconds
    for what, name, info in inventory.useless(is_at_rest=not age):
        # What is of a chunk in `redo` stays: `clean` removes the chunk's marker, and without a marker another worker
        # could still name an output.
        if name not in config.redo:
            yield Removal(what, info, age)
    for name in dict.fromkeys(config.redo):
        # The chunk's outputs become orphans. A later `clean` removes them, once the chunk has a new marker.
        markers = [found.info for found in inventory.markers.get(name, {}).values()]
        done = [*inventory.segments.get(name, ()), *markers]
        if not done:
            raise InputError(
                f"--redo {name}: no chunk of this name has a marker or checkpoints",
                hint="check the name, as in part-00012; a chunk that nobody has begun only needs workers",
            )
        for info in done:
            yield Removal("checkpoints and markers of chunks to do again", info, ANY_AGE)
    for info in inventory.complete if config.redo else ():
        yield Removal("notes of complete blocks", info, ANY_AGE)


@config_command("clean", CleanConfig)
def command(config: CleanConfig) -> dict[str, Any]:
    """Remove what dead workers left: orphan outputs, old claims, segments of done chunks, temporary files.

    A dry run unless --yes is given. Safe while workers run. No output that a marker names
    is removed; --redo removes markers and checkpoints.
    """
    from batchinfer.storage.opening import open_store

    result = run_clean(config, store=open_store(config.run), clock=Clock())
    removed = result["removed"] | {"temporary files": result["temps_removed"]}
    verb = "removed" if config.yes else "would remove"
    if found := ", ".join(f"{what}: {number}" for what, number in removed.items() if number):
        say(f"{verb} {units.size(result['removed_bytes'])}; {found}")
    if not config.yes:
        say("dry run; nothing was changed. To do it, add --yes")
    if result["kept_young"]:
        young = f"younger than {config.older_than_seconds:g} s (--older-than)"
        say(f"{result['kept_young']} objects stay because they are {young}")
    return result
