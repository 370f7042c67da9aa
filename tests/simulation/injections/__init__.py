"""Mishaps that come from outside of the workers: one module for each kind, each in a share of the seeds.

    python -m simulation --seeds 500 --inject records     this kind in every seed, and no other
    python -m simulation --seeds 500 --no-inject          none

Each kind draws from a random stream of its own. So the seeds without it go as they went before it was added, and the
others do until it first changes something.
"""

from __future__ import annotations

from collections.abc import Collection

from .base import Injection, Scene
from .chunks import EditedChunks
from .clocks import SteppingClocks
from .disks import FullDisks
from .hanging import Hangs
from .listings import LaggingListings
from .records import WorkerRecords
from .refusals import Denials, FullOutput
from .runs import LostRuns
from .stopping import Stops

KINDS: dict[str, type[Injection]] = {
    kind.NAME: kind
    for kind in (
        WorkerRecords,
        EditedChunks,
        LostRuns,
        Denials,
        FullOutput,
        LaggingListings,
        FullDisks,
        SteppingClocks,
        Stops,
        Hangs,
    )
}


def draw_injections(scene: Scene, only: Collection[str] | None) -> list[Injection]:
    """Return the injections of a scene's seed. `only`: Names of kinds to use in any case; None: as the seed has it."""
    return [
        kind(scene)
        for name, kind in KINDS.items()
        if (kind.is_drawn(scene.seed) if only is None else name in only)
    ]
