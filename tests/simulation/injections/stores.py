"""What befalls the store itself: listings that lag behind, credentials that expire and come back, a full disk."""

from batchinfer.core.errors import AccessDenied, BatchinferError, StorageError

from .base import Injection


class LaggingListings(Injection):
    """Listings show the bucket as it was some seconds ago, while every object can be read as it is."""

    NAME = "listings"

    def strike(self) -> str:
        lag_seconds = self.leases(0.3, 2.0, 6.0)
        self.scene.server.lag_seconds = lag_seconds
        self.after(self.leases(3), self.calm)
        return f"listings lag behind by {lag_seconds:.1f} s"

    def causes(self, error: BatchinferError) -> bool:
        return "no run there" in error.message  # a young run is not on the listing yet

    def calm(self) -> None:
        self.scene.server.lag_seconds = 0.0


class Denials(Injection):
    """Every request is answered with 403 for some time."""

    NAME = "denials"
    MOST_STRIKES = 3
    CAUSES = (AccessDenied, StorageError)
    until = 0.0

    def begin(self, seconds: float) -> None:
        super().begin(seconds)
        self.scene.network.refuse = self._refuse

    def strike(self) -> str:
        seconds = self.leases(0.2, 1.0, 3.0)
        self.until = max(self.until, self.scene.scheduler.now + seconds)
        return f"{self.NAME} for {seconds:.1f} s"

    def calm(self) -> None:
        self.until = 0.0

    def _refuse(self, method: str, key: str) -> BatchinferError | None:
        return self._error(method, key) if self.scene.scheduler.now < self.until else None

    def _error(self, method: str, key: str) -> BatchinferError | None:
        return AccessDenied(f"{key}: {method} is forbidden")


class FullOutput(Denials):
    """The disk of a run in a local folder is full: nothing can be written, and everything can be read and removed."""

    NAME = "full-output"

    def _error(self, method: str, key: str) -> BatchinferError | None:
        return StorageError(f"{key}: no space left on device") if method == "put_object" else None
