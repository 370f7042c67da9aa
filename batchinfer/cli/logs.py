"""The log: its events (a stable name and fields on a line, listed in docs/logs.md), formats and set-up."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

EVENTS: dict[str, str] = {
    "worker_started": "A start of a worker has its lease. `epoch` counts its starts from 1.",
    "worker_resumed": "It is not the first start; `before` is how the last one ended, `is_kill` if nobody was asked.",
    "manifests_read": "What is to do: chunks of the own manifests, and how many of them were done before.",
    "engine_loading": "The engine starts to load the model.",
    "engine_ready": "The engine has loaded; generation begins.",
    "first_rows": "The first rows of this start are in the engine; where the seconds since the start went.",
    "engine_preempted": "Its KV cache is too small for what runs; rows are computed again. Once a start.",
    "replica_lost": "A replica died or stalled. Its rows go to the others; its GPUs idle until the next start.",
    "chunk_open": "A chunk is being worked on; `resumed` rows came from checkpoints.",
    "chunk_taken_over": "Its claim lapsed at another worker, and is this one's now.",
    "chunk_helped": "Its worker is slow or finishes no row; this one works on it too, the first to finish wins.",
    "chunk_held": "Another worker holds it.",
    "chunk_skipped": "It was done already.",
    "chunk_done": "Its output and marker are published.",
    "publish_output": "Debug: its output is being written.",
    "publish_marker": "Debug: its output is durable; its marker is being written.",
    "publish_tidy": "Debug: its marker stands; segments and claim are being removed.",
    "chunk_lost": "Another worker published it first; nothing is lost but this work.",
    "chunk_released": "Given back unfinished, its finished rows checkpointed.",
    "chunk_retry": "Storage failed while it was opened or published; it is tried again.",
    "chunk_failed": "Given up in this worker; the other chunks go on.",
    "checkpoint": "Finished rows of an unfinished chunk are safe; `bytes` is the size of this segment.",
    "row_error": "The first row of this worker that failed with this code.",
    "row_errors": "All failed rows of this start, by code, when it ends.",
    "progress": "Every ten seconds where stderr is no terminal.",
    "heartbeat_failed": "The worker's record could not be written; it is tried again.",
    "stop_requested": "A signal, `batchinfer stop`, or a newer start of the same worker ends this one.",
    "worker_ended": "The last line: state, reason and sums of this start.",
}
"""Every event and what it says."""


def event(name: str, /, **fields: Any) -> dict[str, Any]:
    """The `extra` of a log call.

    >>> event("chunk_held", chunk="part-00000", worker="w0")
    {'event': 'chunk_held', 'fields': {'chunk': 'part-00000', 'worker': 'w0'}}
    """
    return {"event": name, "fields": fields}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, event where there is one, message."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key in ("event", "fields"):
            if hasattr(record, key):
                entry[key] = getattr(record, key)
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure_logging() -> None:
    """Send batchinfer's own log to stderr. Called once, by the command line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("batchinfer")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    # Each retry is in our own log; without a handler the library's bare event names would follow on stderr.
    # gcsfs logs the traceback of what it then raises.
    for library in ("stamina", "gcsfs"):
        logging.getLogger(library).addHandler(logging.NullHandler())


def set_level(level: str) -> None:
    """Log only what is at least this important: debug, info, warning or error."""
    logging.getLogger("batchinfer").setLevel(level.upper())


def set_format(name: str) -> None:
    """Log lines for people (text) or one JSON object a line (json)."""
    if name == "json":
        for handler in logging.getLogger("batchinfer").handlers:
            handler.setFormatter(JsonFormatter())
