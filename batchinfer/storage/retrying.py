"""Which failures of remote storage are worth another try, and how requests are repeated."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from batchinfer.core.errors import StorageError
from batchinfer.core.records import Record

T = TypeVar("T")

logger = logging.getLogger(__name__)

WRITES = 50
"""Attempts to write over the version of an object that was read. While replies are lost and others write, it may need
several; after so many, the store seems to refuse its own etags."""


class RetryPolicy(Record, frozen=True, kw_only=True):
    """How one request is repeated: `attempts` in all, with growing random pauses, until `total_seconds` have passed."""

    attempts: int = 7
    total_seconds: float = 120.0
    """Seconds from the start of the first attempt, after which a failed attempt is the last one."""
    first_pause_seconds: float = 1.0
    longest_pause_seconds: float = 30.0


class TransientError(StorageError):
    """A failure that may pass: a lost connection, a time-out, an overloaded or conflicting store."""


class NotSupported(StorageError):
    """The store lacks this operation; it answers 501 or similar."""


def retried(policy: RetryPolicy, action: Callable[[], T], *, log_level: int = logging.WARNING) -> T:
    """Run `action` until it succeeds, fails for good, or the policy ends it. Failed attempts are logged at `log_level`.

    Raises:
        StorageError: The last attempt failed with a TransientError; the message gives the number of attempts.
        BatchinferError: Any other error that `action` raises; it is not tried again.
    """
    import stamina  # takes its time to load

    tries = 0

    def may_pass(error: Exception) -> bool:
        """Whether stamina may try again, if its own limits allow it."""
        if not isinstance(error, TransientError):
            return False
        logger.log(log_level, "%s (attempt %d of %d)", error.message, tries, policy.attempts)
        return True

    try:
        for attempt in stamina.retry_context(
            on=may_pass,
            attempts=policy.attempts,
            timeout=policy.total_seconds,
            wait_initial=policy.first_pause_seconds,
            wait_max=policy.longest_pause_seconds,
            wait_jitter=policy.first_pause_seconds,
        ):
            tries = attempt.num
            with attempt:
                return action()
    except TransientError as error:
        times = f"{tries} attempts" if tries > 1 else "1 attempt"
        raise StorageError(f"{error.message} (after {times})", hint=error.hint) from error
    raise AssertionError("a retry loop ends by returning or raising")  # pragma: no cover


def keeps_refusing(key: str) -> StorageError:
    """Return the error for an object that could not be written in so many attempts as `WRITES`."""
    return StorageError(f"{key}: the store keeps refusing its own etag")
