"""Every error that batchinfer raises, and the exit status that each one means.

* BatchinferError
  x UsageError                2   the command, its configuration or its input is wrong; a retry cannot help
    - ConfigError                 an option or a settings file
    - InputError                  a source, chunk, manifest or record that cannot be used
      - NewerVersion              a record that a later batchinfer wrote
    - AccessDenied                credentials are missing or refused
    - RunMismatch                 the run was made with another configuration
  x PolicyStop                3   a rule ended the worker on purpose
    - ErrorRateExceeded
    - NoProgress                  too many starts that finished no new row
    - StopRequested               `batchinfer stop`
    - Superseded                  a newer epoch of the same worker exists
  x EngineError              33   the engine failed; a fresh start may help
    - EngineLoadError
    - EngineDied
    - EngineStalled
  x StorageError             34   storage failed after its retries
    - ObjectNotFound              (control flow: callers that expect absence catch it)
    - AlreadyExists               (control flow: the create lost)
    - PreconditionFailed          (control flow: the object changed since it was read)
    - LeaseLapsed                 this worker's heartbeat is late; nothing is published until it is renewed
    - ScratchFull                 the local scratch folder is full or unwritable
  x Interrupted              75   stopped by a signal or a preemption notice with work left
  x RunUnsound                1   `batchinfer verify` found a run that is incomplete or damaged
  x RowError                  -   one row is bad; never leaves the worker, becomes an error line

A message reads ``subject: what is, what was expected``; `hint` holds the next thing to do, as a command where it
can.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from batchinfer.core.redaction import redact

__all__ = [
    "AccessDenied",
    "AlreadyExists",
    "BatchinferError",
    "ConfigError",
    "EngineDied",
    "EngineError",
    "EngineLoadError",
    "EngineStalled",
    "ErrorRateExceeded",
    "InputError",
    "Interrupted",
    "LeaseLapsed",
    "NewerVersion",
    "NoProgress",
    "ObjectNotFound",
    "PolicyStop",
    "PreconditionFailed",
    "RowError",
    "RunMismatch",
    "RunUnsound",
    "ScratchFull",
    "StopRequested",
    "StorageError",
    "Superseded",
    "UsageError",
    "near",
]


class BatchinferError(Exception):
    """Base of the tree. Args: `message` for people, `hint` (optional) for what to do next.

    Secrets in the URLs of both are masked.
    """

    exit_status = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = redact(message)
        self.hint = redact(hint)
        self.result: dict[str, Any] | None = None
        super().__init__(self.message)

    def attach_result(self, result: dict[str, Any]) -> None:
        """Keep the result object that the command line prints although the command failed."""
        self.result = result


class UsageError(BatchinferError):
    """The command, its configuration or its input is wrong."""

    exit_status = 2


class ConfigError(UsageError):
    """An option or a settings file is wrong."""


class InputError(UsageError):
    """A source, chunk, manifest or stored record cannot be used."""


class NewerVersion(InputError):
    """A stored record is of a later format version than this program's."""


class AccessDenied(UsageError):
    """Credentials are missing, or storage refused them."""


class RunMismatch(UsageError):
    """The run was made with another configuration."""


class PolicyStop(BatchinferError):
    """A rule ended the worker on purpose."""

    exit_status = 3


class ErrorRateExceeded(PolicyStop):
    """More rows failed than `--max-error-rate` allows."""


class NoProgress(PolicyStop):
    """Too many starts of this worker finished no new row."""


class StopRequested(PolicyStop):
    """Someone ran `batchinfer stop` on the run."""


class Superseded(PolicyStop):
    """A newer epoch of this worker exists; this process is its ghost."""


class EngineError(BatchinferError):
    """The engine failed.

    `in_flight` holds the keys of the rows that the failed engine processes had. A row appears once for each process
    that failed while it had the row: a pool gives the rows of its first lost replicas to the others.
    """

    exit_status = 33

    def __init__(
        self, message: str, *, hint: str = "", in_flight: Iterable[tuple[str, int]] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.in_flight = list(in_flight)


class EngineLoadError(EngineError):
    """The engine did not become ready."""


class EngineDied(EngineError):
    """An engine process ended while it had work."""


class EngineStalled(EngineError):
    """The engine made no progress for longer than `--stall-seconds`."""


class StorageError(BatchinferError):
    """Storage failed after its retries."""

    exit_status = 34


class ObjectNotFound(StorageError):
    """No object has this key."""


class AlreadyExists(StorageError):
    """A create-only write found the key taken."""


class PreconditionFailed(StorageError):
    """The object is no longer the version that the writer had read."""


class LeaseLapsed(StorageError):
    """This worker's heartbeat was not renewed in time, so others may count it as gone."""


class ScratchFull(StorageError):
    """The local scratch folder is full or cannot be written."""


class Interrupted(BatchinferError):
    """Stopped by a signal or a preemption notice with work left."""

    exit_status = 75


class RunUnsound(BatchinferError):
    """`batchinfer verify` found a run that is incomplete or damaged."""


class RowError(BatchinferError):
    """One row is bad. `code` is stable (listed in docs/format.md)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.message = message  # not redacted, because the row's own author reads the message
        self.args = (message,)
        self.code = code


def near(name: str, options: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the closest option, else an empty string.

    >>> near("promt", ["prompt", "answer"])
    "; did you mean 'prompt'?"
    """
    matches = difflib.get_close_matches(name, list(options), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
