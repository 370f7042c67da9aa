"""The launches of a run: which of their workers never came or did not come back, and what clusters say of these."""

from __future__ import annotations

from collections import defaultdict

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
from batchinfer.core.errors import FINAL_STATUSES, BatchinferError, ConfigError, Interrupted
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
            rank: name
            for rank, name in enumerate(names)
            if name not in replaced and _is_away(workers.get(name))
        }
        fates = dict[int, Fate]()
        unknown = Fate("lost" if launch.is_cancelled else "coming", "")
        if away and seen.state != "done":
            try:
                fates = _ask(store, launch, namespace)
                is_new = not launch.is_cancelled and seen.time - recorded < LAUNCHING_SECONDS
                unknown = Fate("coming" if is_new else "lost", "not known there")
            except BatchinferError as error:
                why = f"{launch.on} cannot be asked here: {error.message}"
                notes.append(f"launch {launch.id}: {why}")
        said = defaultdict[str, list[int]](list)
        lost, coming = list[str](), list[str]()
        for rank, name in away.items():
            worker, (kind, text) = workers.get(name), fates.get(rank, unknown)
            state = worker.state if worker else "never seen"
            said[f"{state}; {launch.on}: {text}" if text else state].append(rank)
            if kind == "coming":
                coming.append(name)
            elif kind == "lost" and not launch.is_cancelled:
                lost += [name] if _exit_status(worker) not in FINAL_STATUSES else []
        busy = [name for name in names if name in workers and workers[name].is_alive]
        view = LaunchView(
            **msgspec.structs.asdict(launch),
            away=said,
            lost=lost,
            coming=len(coming),
            left=_left(launch, lost, workers),
            held=None if seen.state == "done" else _left(launch, busy + coming, workers),
        )
        views.append(view)
    return msgspec.structs.replace(seen, launches=views, notes=[*seen.notes, *notes])


def launch_text(view: LaunchView) -> str:
    """Say in words what was launched, and which workers are away.

    >>> known = {"on": "slurm", "workers": 4, "namespace": "", "share": None, "replaces": []}
    >>> away = {"stopped; slurm: PENDING": [2], "never seen; slurm: NODE_FAIL": [0, 1]}
    >>> print(launch_text(LaunchView(id="a", away=away, **known)))
    4 workers on slurm (a); away: 2 (stopped; slurm: PENDING); away: 0, 1 (never seen; slurm: NODE_FAIL)
    """
    parts = [f"{units.many(view.workers, 'worker')} on {view.on} ({view.id})"]
    parts += [f"{len(view.replaces)} in place of lost ones"] if view.replaces else []
    for said, ranks in view.away.items():
        more = f", … {len(ranks)} in all" if len(ranks) > _SHOWN else ""
        parts.append(f"away: {', '.join(map(str, ranks[:_SHOWN]))}{more} ({said})")
    return "; ".join(parts)


def cancel_launches(store: Store, clock: Clock, namespace: str = "") -> list[str]:
    """Cancel all launches of a run, and wait until their workers have ended. Return a sentence for each that has not.

    Args:
        store: Store of the run.
        clock: Tells the time.
        namespace: Namespace of Kubernetes in which to cancel.
    """
    launches, left = find_launches(store)
    asked = []
    for launch, _ in launches.values():
        try:
            find_cluster(launch.on).cancel(name_of(launch.id, store.url), namespace)
            asked.append(launch)
        except BatchinferError as error:
            left.append(f"launch {launch.id} on {launch.on}: not cancelled: {error.message}")
    until = clock.monotonic() + ENDING_SECONDS
    for launch in asked:
        try:
            while alive := [
                one for one in _ask(store, launch, namespace).values() if one.kind == "coming"
            ]:
                if clock.monotonic() >= until:
                    many = units.many(len(alive), "worker")
                    left.append(f"launch {launch.id}: still ending: {many}")
                    break
                clock.sleep(_POLL_SECONDS)
            record_cancelled(store, launch.id)
        except BatchinferError as error:  # the record was changed meanwhile, for example
            left.append(f"launch {launch.id}: not recorded as cancelled: {error.message}")
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


def _ask(store: Store, launch: LaunchRecord, namespace: str) -> dict[int, Fate]:
    """Return what a launch's cluster says of its workers.

    Raises:
        ConfigError: It cannot be asked.
    """
    fates = find_cluster(launch.on).look(name_of(launch.id, store.url), namespace)
    if not fates and launch.on == "kubernetes" and launch.namespace != namespace:
        raise ConfigError(f"it was made in --namespace {launch.namespace!r}")
    return fates
