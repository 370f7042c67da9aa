"""Events of the log. Their names must not change: people search logs for them (docs/monitoring.md)."""

from __future__ import annotations

import logging
from typing import Any


def event(name: str, /, **fields: Any) -> dict[str, Any]:
    """Return the argument `extra` of a log call that makes its line an event.

    >>> event("chunk_held", chunk="part-00000", worker="w0")
    {'event': 'chunk_held', 'fields': {'chunk': 'part-00000', 'worker': 'w0'}}
    """
    return {"event": name, "fields": fields}


def tell(
    logger: logging.Logger,
    name: str,
    text: str,
    /,
    *values: object,
    level: int = logging.INFO,
    **fields: Any,
) -> None:
    """Log an event. Its message is `text`, filled in by `str.format` with the event's fields and with further values.

    >>> logger = logging.getLogger("batchinfer.example")
    >>> tell(logger, "chunk_held", "{chunk}: {} has it", "somebody", chunk="part-00000")
    """
    if logger.isEnabledFor(level):
        logger.log(level, "%s", text.format(*values, **fields), extra=event(name, **fields))
