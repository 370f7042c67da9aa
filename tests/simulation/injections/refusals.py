"""Stores that refuse what they took a moment ago: credentials expire and come back, an output disk is full."""

from __future__ import annotations

from batchinfer.core.errors import AccessDenied, BatchinferError, StorageError

from .base import Injection


class _Refusal(Injection):
    """Refuses requests for some time, now and then."""

    MOST_STRIKES = 3
    until = 0.0

    def begin(self, seconds: float) -> None:
        super().begin(seconds)
        self.scene.network.refuse = self._refuse

    def strike(self) -> str:
        seconds = self.chance.random() * self.chance.choice([0.2, 1.0, 3.0])
        seconds *= self.scene.plot.lease_seconds
        self.until = max(self.until, self.scene.scheduler.now + seconds)
        return f"{self.NAME} for {seconds:.1f} s"

    def calm(self) -> None:
        self.until = 0.0

    def explains(self, error: BatchinferError) -> bool:
        return bool(self.num_strikes) and isinstance(error, AccessDenied | StorageError)

    def _refuse(self, method: str, key: str) -> BatchinferError | None:
        return self._error(method, key) if self.scene.scheduler.now < self.until else None

    def _error(self, method: str, key: str) -> BatchinferError | None:
        raise NotImplementedError


class Denials(_Refusal):
    """Every request is answered with 403."""

    NAME = "denials"

    def _error(self, method: str, key: str) -> BatchinferError | None:
        return AccessDenied(f"{key}: {method} is forbidden")


class FullOutput(_Refusal):
    """The disk of a run in a local folder is full: nothing can be written, and everything can be read and removed."""

    NAME = "full-output"

    def _error(self, method: str, key: str) -> BatchinferError | None:
        return StorageError(f"{key}: no space left on device") if method == "put_object" else None
