"""Everything that a worker gets as arguments: its configuration, the outside world, and its access to the run."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.records import EngineInfo, Money, Record
from batchinfer.engines import Engine, create_engine, identify_model, is_remote
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.models import end_mark
from batchinfer.ledger.claims import Claims, Lease
from batchinfer.ledger.publishing import Publisher
from batchinfer.prompts import EngineRules, PromptConfig
from batchinfer.storage import Preconditions, Store
from batchinfer.storage.scratch import Scratch
from batchinfer.worker.background import Background, Stopper, ThreadBackground
from batchinfer.worker.telemetry import Telemetry

_LONGEST_DELAY_SECONDS = 60.0


class Limits(Record, frozen=True, kw_only=True):
    """Limits on what a worker uses of memory and disk, and on how often it does the same thing again."""

    max_open_chunks: int = 64
    """Chunks that may be open at the same time. More are opened if small chunks cannot keep the engine busy."""
    max_openings: int = 4
    """Chunks that may be in the middle of being opened at the same time."""
    max_publishing: int = 7
    """Chunks that may be published at the same time, each by a thread that does nothing else.

    Uploads may take minutes, in which further chunks are to be opened and rows saved.
    """
    max_open_bytes: int = 16 << 30
    """Bytes of scratch disk that open chunks hold, input and finished rows, above which no further chunk is opened."""
    prefix_window: int = 0
    """Rows that are sorted together, so that prompts with equal beginnings follow each other; 0 keeps the order."""
    max_build_rows: int = 512
    """Most rows whose calls one background job builds."""
    max_build_bytes: int = 8 << 20
    """Bytes of input rows after which a background job that builds calls reads no further rows."""
    max_row_memory: int = 256
    """MiB of memory for each replica that rows take which wait for the engine or are in it.

    No further calls are built above it. At least one row is always built.
    """
    max_media_bytes: int = 20 << 20
    """Largest image, sound or video, in bytes as it is stored. A row with a larger one fails."""
    media_timeout_seconds: float = 30.0
    """Seconds that one attempt to fetch from a web server may take."""
    media_root: str = ""
    """Folder or URL from which paths of media in rows count; empty if rows must not name paths."""
    allow_private_urls: bool = False
    """Whether rows may name media at addresses of a private network."""
    storage_attempts: int = 4
    """Failed attempts to open or publish a chunk after which it is given up.

    If finished rows of the chunk are not on storage yet, one more attempt to publish follows, before which they are
    saved. While open chunks have unfinished rows, the attempts go on and no chunk is given up because of storage.
    """
    storage_retry_seconds: float = 5.0
    """Seconds between the first failed attempt and the second. Each further wait is twice as long, up to a minute."""

    def storage_delay_seconds(self, attempts: int) -> float:
        """Return the seconds to wait before the next attempt, when `attempts` attempts have failed."""
        return min(self.storage_retry_seconds * 2.0 ** max(0, attempts - 1), _LONGEST_DELAY_SECONDS)


class WorkerConfig(Record, frozen=True, kw_only=True):
    """The configuration of one worker. `manifests`, `output` and `job` are paths or URLs."""

    manifests: list[str]
    output: str
    engine: EngineConfig
    prompt: PromptConfig
    job: str | None = None
    run_seed: int | None = 0
    worker_id: str = ""
    limit: int | None = None
    allow_absolute: bool = False
    retry_errors: bool = False
    claims: bool = True
    steal: bool = True
    lease_seconds: float = 120.0
    checkpoint_seconds: float = 30.0
    checkpoint_rows: int | None = None
    grace_seconds: float = 20.0
    max_error_rate: float | None = None
    min_errors: int = 20
    max_attempts: int = 5
    max_cost: float | None = None
    max_hours: float | None = None
    price_per_hour: float | None = None
    """Dollars an hour for this worker's machine; None if nobody needs to know."""
    price_source: str = ""
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    scratch_dir: str | None = None
    limits: Limits = Limits()
    host: dict[str, Any] = {}

    @property
    def money(self) -> Money | None:
        """Price and limits for the worker's record; None if there is neither."""
        if self.max_cost is None and self.max_hours is None and self.price_per_hour is None:
            return None
        return Money(
            price_per_hour=self.price_per_hour,
            price_source=self.price_source,
            max_cost=self.max_cost,
            max_hours=self.max_hours,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a worker uses of the outside world: clock, threads, storage, engine. Tests and the simulation replace it."""

    clock: Clock
    background: Background
    open_store: Callable[[str], Store]
    probe: Callable[[Store], Preconditions]
    create_engine: Callable[[EngineConfig], Engine]
    identify_model: Callable[[EngineConfig], str]
    stopper: Stopper
    new_nonce: Callable[[], str]
    show_progress: Callable[[Telemetry], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAccess:
    """The objects with which a worker reads and writes its run, put together after it has taken its lease."""

    store: Store
    fingerprint: str = ""
    """Fingerprint of the run; "" before the worker has joined the run. It goes into markers and segments."""
    lease: Lease
    claims: Claims | None
    """The claims of this worker; None if the store ignores preconditions or claims are switched off."""
    publisher: Publisher
    scratch: Scratch


def real_environment(
    *, grace_seconds: float, show_progress: Callable[[Telemetry], None]
) -> Environment:
    """Make the environment of a real worker: real threads, the system's clock, and storage that is opened by URL."""
    from batchinfer.storage.opening import open_store, probe

    clock = SystemClock()
    return Environment(
        clock=clock,
        background=ThreadBackground(),
        open_store=open_store,
        probe=probe,
        create_engine=create_engine,
        identify_model=identify_model,
        stopper=Stopper(clock, grace_seconds=grace_seconds),
        new_nonce=lambda: secrets.token_hex(8),
        show_progress=show_progress,
    )


def rules_of(
    engine: EngineConfig, *, opened: Engine | None = None, info: EngineInfo | None = None
) -> EngineRules:
    """Return what the run's engine takes.

    Args:
        engine: Its configuration.
        opened: The engine, once it is open. It knows the names of its parameters.
        info: Facts about it, once it is open.
    """
    return EngineRules(
        model=engine.served_names[0],
        eos_token=end_mark(engine) if info is not None and engine.engine == "vllm" else "",
        adapters=tuple(sorted(engine.loras)),
        max_model_len=None if info is None else info.max_model_len,
        parameters=_unknown if opened is None else opened.parameters,
        fetches_links=is_remote(engine) or "allowed_media_domains" in engine.server_options,
        is_vllm=not is_remote(engine),
    )


def _unknown(_path: str) -> frozenset[str]:
    return frozenset()
