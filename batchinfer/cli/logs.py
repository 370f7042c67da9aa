"""The log: its two formats, and its set-up. Its events are in `batchinfer.core.events`."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from batchinfer.cli.terminal import StderrHandler
from batchinfer.core.printable import one_entry, printable_values


class JsonFormatter(logging.Formatter):
    """Writes each log record as one line of JSON: its time, level, logger and message.

    If the record has an event, fields or a traceback, the line contains these as well.
    """

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
        return json.dumps(printable_values(entry), ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Writes each log record as text for people: its time, level and message."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        return one_entry(super().format(record))


def configure_logging() -> None:
    """Send batchinfer's own log to stderr. The command line calls it once."""
    handler = StderrHandler()
    handler.setFormatter(TextFormatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("batchinfer")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    # If a library logs and has no handler, Python prints its warnings to stderr. stamina would print each retry, which
    # our own log already reports.
    logging.getLogger("stamina").addHandler(logging.NullHandler())


def set_level(level: str) -> None:
    """Log only lines whose level is at least `level`: debug, info, warning or error."""
    logging.getLogger("batchinfer").setLevel(level.upper())


def set_format(name: str) -> None:
    """Set the log's format: "text" for people to read, or "json" for one JSON object per line."""
    if name == "json":
        for handler in logging.getLogger("batchinfer").handlers:
            handler.setFormatter(JsonFormatter())
