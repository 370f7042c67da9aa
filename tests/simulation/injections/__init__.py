"""Mishaps that come from outside of the workers, each kind in a share of the seeds.

python -m simulation --seeds 500 --inject records     this kind in every seed, and no other
"""

import random
from collections.abc import Collection
from typing import Any

from .base import Injection
from .commands import Cleanings, Stops
from .hands import EditedChunks, LostRuns, WorkerRecords
from .machines import FullDisks, Hangs, SteppingClocks
from .stores import Denials, FullOutput, LaggingListings

KINDS: dict[str, type[Injection]] = {
    kind.NAME: kind
    for kind in (
        Cleanings, WorkerRecords, EditedChunks, LostRuns, Denials, FullOutput, LaggingListings, FullDisks,
        SteppingClocks, Stops, Hangs,
    )
}  # fmt: skip


def draw_injections(scene: Any, only: Collection[str] | None) -> list[Injection]:
    """Return the injections of a scene's seed. `only`: Names of kinds to use in any case; None: as the seed has it."""
    draw = random.Random(f"injections {scene.seed}").random
    drawn = [name for name, kind in KINDS.items() if draw() < kind.SHARE]
    return [
        kind(scene) for name, kind in KINDS.items() if name in (drawn if only is None else only)
    ]
