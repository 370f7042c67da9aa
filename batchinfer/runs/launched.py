"""The launches of a run: which of their workers never came or did not come back, and what clusters say of these."""

from __future__ import annotations

import msgspec

from batchinfer.clusters import (
    Fate,
    LaunchRecord,
    find_cluster,
    find_launches,
    name_of,
    record_cancelled,
)
from batchinfer.core import errors, layout, units
from batchinfer.core.clock import Clock
from batchinfer.core.errors import FINAL_STATUSES, BatchinferError, Interrupted
from batchinfer.runs.overview import LaunchView, Overview, WorkerView
from batchinfer.storage import Store

LAUNCHING_SECONDS = 900.0
"""Seconds after its record for which a launch's workers may still be unknown to the cluster."""
ENDING_SECONDS, _POLL_SECONDS = 120.0, 5.0
"""Most seconds to wait until workers that were cancelled have ended, and seconds between two looks."""
_SHOWN = 8


def with_launches(seen: Overview, store: Store, namespace: str = "") -> Overview:
    """Return the overview with the run's launches.

    Unless the run is done, clusters are asked about workers that never came, or are gone, failed or were stopped by a
    signal. Of a cluster that cannot be asked from this machine, the overview gets a note. A worker is lost if its
    cluster gave it up, or does not know it a while after the launch. One that somebody cancelled is not lost, also
    after its cluster has forgotten it, nor is one that ended with a status after which no start can help.

    Args:
        seen: The overview without launches.
        store: Store of the run.
        namespace: Namespace of Kubernetes in which to look.
    """
    launches, notes = find_launches(store)
    workers = {view.id: view for view in seen.workers}
    replaced = {name for launch, _ in launches.values() for name in launch.replaces}
    views = []
    for launch, recorded in launches.values():
        names = [layout.launched_worker(launch.id, rank) for rank in range(launch.workers)]
        away = {
            rank: workers.get(name)
            for rank, name in enumerate(names)
            if name not in replaced and _is_away(workers.get(name))
        }
        fates = None
        if away and seen.state != "done":
            fates, more = _ask(store, launch, namespace)
            notes += more
        is_new = seen.time - recorded < LAUNCHING_SECONDS
        said: dict[str, list[int]] = {}
        lost, coming = list[str](), list[str]()
        for rank, worker in away.items():
            text, kind = worker.state if worker else "never seen", "coming"
            if fates is not None and (fate := fates.get(rank)):
                text, kind = f"{text}; {launch.on}: {fate.text or fate.kind}", fate.kind
            elif fates is not None:
                text, kind = f"{text}; {launch.on} does not know it", "coming" if is_new else "lost"
            if launch.is_cancelled and not (fates and rank in fates and kind == "coming"):
                kind = "ended"
            said.setdefault(text, []).append(rank)
            if kind == "coming":
                coming.append(names[rank])
            elif kind == "lost" and _exit_status(worker) not in FINAL_STATUSES:
                lost.append(names[rank])
        busy = [name for name in names if name in workers and workers[name].is_alive]
        view = LaunchView(
            id=launch.id,
            cluster=launch.on,
            expected=launch.workers,
            seen=sum(name in workers for name in names),
            away=said,
            lost=lost,
            coming=len(coming),
            left=_left(launch, lost, workers),
            held=None if seen.state == "done" else _left(launch, busy + coming, workers),
            relaunched=sum(name in replaced for name in names),
        )
        views.append(view)
    return msgspec.structs.replace(seen, launches=views, notes=[*seen.notes, *notes])


def launch_text(view: LaunchView) -> str:
    """Say in words how many workers of a launch were seen, and which are away.

    >>> away = {"stopped; slurm: PENDING": [2], "never seen; slurm: NODE_FAIL": [0, 1]}
    >>> print(launch_text(LaunchView(id="a", cluster="slurm", expected=4, seen=2, away=away)))
    4 workers on slurm (a), 2 seen; away: 2 (stopped; slurm: PENDING); away: 0, 1 (never seen; slurm: NODE_FAIL)
    """
    parts = [
        f"{units.many(view.expected, 'worker')} on {view.cluster} ({view.id}), {view.seen} seen"
    ]
    for said, ranks in view.away.items():
        more = f", … {len(ranks)} in all" if len(ranks) > _SHOWN else ""
        parts.append(f"away: {', '.join(map(str, ranks[:_SHOWN]))}{more} ({said})")
    parts += [f"{view.relaunched} launched again"] if view.relaunched else []
    return "; ".join(parts)


def cancel_launches(store: Store, clock: Clock, namespace: str = "") -> list[str]:
    """Cancel all launches of a run, and wait until their workers have ended. Return a sentence for each that has not.

    Args:
        store: Store of the run.
        clock: Tells the time.
        namespace: Namespace of Kubernetes in which to cancel.
    """
    launches, left = find_launches(store)
    asked = {}
    for launch, _ in launches.values():
        try:
            find_cluster(launch.on).cancel(name_of(launch.id, store.url), namespace)
            asked[launch.id] = launch
        except BatchinferError as error:
            left.append(f"launch {launch.id} on {launch.on}: not cancelled: {error.message}")
    until = clock.monotonic() + ENDING_SECONDS
    while asked:
        for name, launch in list(asked.items()):
            fates, notes = _ask(store, launch, namespace)
            alive = sum(one.kind == "coming" for one in (fates or {}).values())
            if alive and clock.monotonic() >= until:
                notes = [f"launch {name}: still ending: {units.many(alive, 'worker')}"]
            if notes or not alive:
                left += notes
                del asked[name]
                try:
                    if fates is not None:  # there, and not in another namespace
                        record_cancelled(store, name)
                except BatchinferError as error:  # it was changed meanwhile, for example
                    left.append(f"launch {name}: not recorded as cancelled: {error.message}")
        if asked:
            clock.sleep(_POLL_SECONDS)
    return left


def _left(launch: LaunchRecord, names: list[str], workers: dict[str, WorkerView]) -> float | None:
    """Return the dollars that some of a launch's workers have left of their shares; None: they have no limit."""
    if launch.share is None:
        return None
    costs = [workers[name].money.cost or 0.0 if name in workers else 0.0 for name in names]
    return sum(max(0.0, launch.share - cost) for cost in costs)


def _exit_status(view: WorkerView | None) -> int | None:
    """Return a worker's last exit status by the reason in its record, which begins with the class of an error."""
    kind = getattr(errors, view.reason.partition(":")[0], None) if view else None
    return getattr(kind, "exit_status", None)


def _is_away(view: WorkerView | None) -> bool:
    """Whether a worker should be at work and is not; a worker that is done, or that a rule stopped, should not be."""
    if view is None or view.state in ("gone", "failed"):
        return True
    return view.state == "stopped" and _exit_status(view) == Interrupted.exit_status


def _ask(
    store: Store, launch: LaunchRecord, namespace: str
) -> tuple[dict[int, Fate] | None, list[str]]:
    """Return what a launch's cluster says of its workers; None and a note if it cannot be asked."""
    try:
        fates = find_cluster(launch.on).look(name_of(launch.id, store.url), namespace)
    except BatchinferError as error:
        return None, [f"launch {launch.id}: {launch.on} cannot be asked here: {error.message}"]
    if not fates and launch.on == "kubernetes" and launch.namespace != namespace:
        return None, [f"launch {launch.id}: was made in --namespace {launch.namespace!r}"]
    return fates, []
