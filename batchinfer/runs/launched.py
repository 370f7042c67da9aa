"""The launches of a run: how many of their workers were seen, and what their clusters say of the others."""

from __future__ import annotations

from collections import Counter

import msgspec

from batchinfer.clusters import FAILED, ClusterState, find_cluster, jobs_command
from batchinfer.clusters.launches import FoundLaunch, find_launches
from batchinfer.core import units
from batchinfer.core.errors import BatchinferError
from batchinfer.runs.overview import LaunchView, Overview
from batchinfer.storage import Store

_OVER = ("done", "cancelled", "failed")


def with_launches(seen: Overview, store: Store) -> Overview:
    """Return the overview with the run's launches.

    Unless the run is done, the clusters are asked about workers that are gone or were never seen. Of a cluster that
    cannot be asked from this machine, the overview gets a note.
    """
    launches, notes = find_launches(store)
    known = {view.id: view.state for view in seen.workers}
    replaced = {name for launch in launches for name in launch.record.plan.replaces}
    views = []
    for launch in launches:
        view, note = _view(launch, known, replaced, is_done=seen.state == "done")
        views.append(view)
        notes += [note] if note else []
    return msgspec.structs.replace(seen, launches=views, notes=[*seen.notes, *notes])


def launch_text(view: LaunchView) -> str:
    """Say in words how many workers of a launch were seen, and what became of those that are gone or were not.

    >>> failed = {"failed (NODE_FAIL)": 1}
    >>> launch_text(
    ...     LaunchView(id="a", cluster="ray", expected=4, seen=3, not_seen=failed, gone={"": 1})
    ... )
    '4 workers on ray (a), 3 seen, 1 of them gone, 1 never seen: failed (NODE_FAIL)'
    """
    parts = [
        f"{units.many(view.expected, 'worker')} on {view.cluster} ({view.id})",
        f"{view.seen} seen",
    ]
    parts += [_counted(number, "of them gone", said) for said, number in view.gone.items()]
    parts += [_counted(number, "never seen", said) for said, number in view.not_seen.items()]
    parts += [f"{view.relaunched} launched again"] if view.relaunched else []
    return ", ".join(parts)


def _counted(number: int, what: str, said: str) -> str:
    return f"{number} {what}" + (f": {said}" if said else "")


def cancel_launches(store: Store) -> list[str]:
    """Cancel all launches of a run. Return a sentence for each that may have left something."""
    launches, left = find_launches(store)
    for launch in launches:
        name = f"launch {launch.record.plan.id} on {launch.record.cluster}"
        try:
            cluster = find_cluster(launch.record.cluster)
            if launch.handle is None:
                look = jobs_command(cluster, launch.record.plan)
                left.append(f"{name}: what it submitted is not known; look for its jobs: {look}")
                continue
            cluster.cancel(launch.handle)
            states = cluster.look(launch.handle, launch.record.plan.workers)
        except BatchinferError as error:
            left.append(f"{name}: not cancelled: {error.message}")
            continue
        alive = [one for one in states.values() if one.state not in _OVER]
        if alive:
            left.append(f"{name}: still ending: {units.many(len(alive), 'worker')}")
    return left


def _view(
    launch: FoundLaunch, known: dict[str, str], replaced: set[str], *, is_done: bool
) -> tuple[LaunchView, str]:
    """Return the figures of one launch, and a note if its cluster could not be asked.

    `known` maps the id of each worker that was seen to its state. `replaced` are the workers that were launched again.
    """
    ids = launch.worker_ids
    missing = [rank for rank, name in enumerate(ids) if name not in known]
    gone = [rank for rank, name in enumerate(ids) if known.get(name) == "gone"]
    ended = [rank for rank, name in enumerate(ids) if known.get(name) == FAILED]
    states: dict[int, ClusterState] = {}
    note = ""
    if (missing or gone or ended) and not is_done:
        try:
            states = _ask(launch)
        except BatchinferError as error:
            note = f"launch {launch.record.plan.id}: {launch.record.cluster} cannot be asked here: {error.message}"
    view = LaunchView(
        id=launch.record.plan.id,
        cluster=launch.record.cluster,
        expected=len(ids),
        seen=len(ids) - len(missing),
        not_seen=Counter(_said(states.get(rank)) for rank in missing),
        gone=Counter(_said(states.get(rank)) for rank in gone),
        failed=[
            ids[rank]
            for rank in sorted((*missing, *gone, *ended))
            if rank in states and states[rank].state == FAILED and ids[rank] not in replaced
        ],
        relaunched=len(replaced.intersection(ids)),
    )
    return view, note


def _ask(launch: FoundLaunch) -> dict[int, ClusterState]:
    if launch.handle is None:
        return {}
    return find_cluster(launch.record.cluster).look(launch.handle, launch.record.plan.workers)


def _said(seen: ClusterState | None) -> str:
    if seen is None:
        return ""
    return f"{seen.state} ({seen.text})" if seen.text else seen.state
