"""The classes of batchinfer's own errors, and the exit status that each class means.

* BatchinferError
  x UsageError                2   the command, its configuration or its input is wrong; a retry alone cannot help
    - ConfigError                 an option or a settings file
    - InputError                  a source, chunk, manifest or record that cannot be used
    - AccessDenied                credentials are missing or refused
    - RunMismatch                 the run was made with another configuration
  x PolicyStop                3   a rule or a request ended the worker on purpose
    - ErrorRateExceeded
    - NoProgress                  too many starts that finished no new row
    - StopRequested               `batchinfer stop`
    - LimitReached                the worker has cost as much, or run as long, as it may
    - Superseded                  a newer start of the same worker exists
  x EngineError              33   the engine failed; a fresh start may help
    - EngineLoadError
    - EngineDied
  x StorageError             34   storage failed; remote storage has been tried several times where that may help
    - ObjectNotFound              (control flow: callers that expect absence catch it)
    - AlreadyExists               (control flow: the create lost)
    - PreconditionFailed          (control flow: the object changed since it was read)
    - LeaseLapsed                 this worker's heartbeat is late; nothing is published until it is renewed
    - ScratchFull                 the local scratch folder is full or unwritable
  x Interrupted              75   stopped by a signal with work left
  x RunUnsound                1   `verify` or `collect` found a run that is incomplete or damaged
  x prompts.types.RowError    -   one row is bad; the row becomes an error line, and the work goes on

Most messages read ``subject: what was found, what was expected``. `hint` says what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from batchinfer.core.redaction import redact

RESTART_STATUSES = (33, 34, 75)
"""Exit statuses of a worker after which a new start may help: the engine failed, storage failed, or a signal came."""
FINAL_STATUSES = (2, 3)
"""Exit statuses of a worker after which a new start cannot help: wrong configuration, or a rule stopped it."""


class BatchinferError(Exception):
    """Base class of batchinfer's own errors.

    Secrets in URLs are masked in the message and in the hint, except in a `RowError`.

    Args:
        message: What is wrong, for people.
        hint: What to do next; may be empty.
    """

    exit_status = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = redact(message)
        self.hint = redact(hint)
        self.result: dict[str, Any] | None = None
        super().__init__(self.message)
        if hint:
            self.add_note(f"hint: {self.hint}")

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


class AccessDenied(UsageError):
    """Credentials are missing, or storage refused them."""


class RunMismatch(UsageError):
    """The run was made with another configuration."""


class PolicyStop(BatchinferError):
    """A rule or a request ended the worker on purpose."""

    exit_status = 3


class ErrorRateExceeded(PolicyStop):
    """Too many rows failed; see `--max-error-rate`."""


class NoProgress(PolicyStop):
    """Too many starts of this worker finished no new row."""


class StopRequested(PolicyStop):
    """Someone ran `batchinfer stop` on the run."""


class LimitReached(PolicyStop):
    """The worker has reached --max-cost or --max-hours."""


class Superseded(PolicyStop):
    """A newer start of the same worker exists, so this process must end."""


class EngineError(BatchinferError):
    """The engine failed."""

    exit_status = 33


class EngineLoadError(EngineError):
    """The engine did not become ready."""


class EngineDied(EngineError):
    """No engine process is left, or an endpoint answered nothing for `--stall-seconds`."""

    def __init__(
        self, message: str, *, hint: str = "start the same command again: finished rows are kept"
    ) -> None:
        super().__init__(message, hint=hint)


class StorageError(BatchinferError):
    """Storage failed. Remote storage has been tried several times where that may help."""

    exit_status = 34


class ObjectNotFound(StorageError):
    """No object has this key."""


class AlreadyExists(StorageError):
    """A write that must create an object found that the key has one already."""


class PreconditionFailed(StorageError):
    """A conditional write found that the object has changed since the writer read it."""


class LeaseLapsed(StorageError):
    """This worker did not renew its heartbeat in time, so other workers may treat it as gone."""


class ScratchFull(StorageError):
    """The local scratch folder is full or cannot be written."""


class Interrupted(BatchinferError):
    """A signal stopped the worker before its work was done."""

    exit_status = 75


class RunUnsound(BatchinferError):
    """`batchinfer verify` or `collect` found a run that is incomplete or damaged."""


def near(name: str, options: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` with the option closest to `name`, or an empty string if none is close.

    >>> near("promt", ["prompt", "answer"])
    "; did you mean 'prompt'?"
    """
    matches = difflib.get_close_matches(name, list(options), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
