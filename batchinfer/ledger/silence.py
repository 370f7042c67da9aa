"""When a worker without a heartbeat counts as gone, for other workers and for commands that look once."""

from __future__ import annotations

_LEASES_FOR_ONE_LOOK = 2.0
"""Number of leases without a heartbeat after which a command that looks only once, like `clean`, takes a worker for
gone. It is more than one, because the command compares storage's clock with its own, and the two may differ."""
_LEASES_OF_A_STALL = 0.6
"""Share of a lease without a heartbeat after which a worker seems stalled: two heartbeats in a row are missing."""


def has_lapsed(silent_seconds: float, *lease_seconds: float) -> bool:
    """Whether a worker had no heartbeat for a lease, the longest of these, so that others may take its chunks."""
    return silent_seconds >= max(lease_seconds)


def seems_gone(silent_seconds: float, lease_seconds: float, *, patience_seconds: float) -> bool:
    """Whether a command that looks only once may take a worker for gone.

    The worker must have had no heartbeat for longer than `patience_seconds`, and longer than two leases.
    """
    return silent_seconds > max(patience_seconds, _LEASES_FOR_ONE_LOOK * lease_seconds)


def seems_stalled(silent_seconds: float, lease_seconds: float) -> bool:
    """Whether at least two heartbeats of a worker are missing. Its claims may still be valid."""
    return silent_seconds >= _LEASES_OF_A_STALL * lease_seconds
