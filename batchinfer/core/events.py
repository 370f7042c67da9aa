"""Events of the log, which docs/monitoring.md lists, too."""

from __future__ import annotations

import logging
from typing import Any

EVENTS: dict[str, str] = {
    "worker_started": "A worker has its lease and begins. `start` counts its starts from 1.",
    "worker_resumed": "Not the worker's first start. `before`: how the last one ended; `is_kill`: killed, or running.",
    "manifests_read": "The manifests' chunks are known, and how many of them were done before.",
    "engine_loading": "The engine starts to load the model.",
    "engine_ready": "The engine has loaded; generation begins.",
    "engine_preempted": "The KV cache is too small for the rows that run at once; some are computed again.",
    "engine_starved": "The engine has free slots for a minute because its server's front end is busy.",
    "replica_restarted": "A replica died or stalled. Its rows are tried again, and it is started again.",
    "replica_lost": "A replica ended too often without a finished row. Its GPUs idle until the worker's next start.",
    "chunk_open": "The worker begins with a chunk; `resumed` rows came from checkpoints.",
    "chunk_taken_over": "Another worker's claim on the chunk has lapsed, and this worker has it now.",
    "chunk_held": "Another worker has claimed the chunk.",
    "chunk_skipped": "The chunk was already done.",
    "chunk_done": "The chunk's output and marker are published.",
    "publish_output": "Debug: the chunk's output is being written.",
    "publish_marker": "Debug: the chunk's output is durable, and its marker is being written.",
    "publish_tidy": "Debug: the chunk's marker is written, and its segments and claim are being removed.",
    "chunk_lost": "Another worker published the chunk first. Nothing is lost but this worker's effort.",
    "chunk_released": "The chunk is given back unfinished; its finished rows are checkpointed.",
    "chunk_retry": "Storage failed while the chunk was opened or published. It is tried again.",
    "chunk_failed": "This worker gives the chunk up; its other chunks go on.",
    "checkpoint": "Debug: one segment is written; `bytes` is its size.",
    "row_error": "The first row of this worker that failed with this code.",
    "progress": "How far the worker is. Logged every ten seconds where stderr is no terminal.",
    "heartbeat_failed": "The worker's record could not be written; it is tried again.",
    "stop_requested": "The worker ends early: a signal, `batchinfer stop`, or a limit of cost or time, for example.",
    "worker_ended": "The last line: state, reason and sums of this start.",
}
"""Meaning of each event, by the event's name. Names must not change, because people search logs for them."""


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
