"""What a worker is told, and the outside world that it works in; both come in as arguments."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.records import Record, Sampling
from batchinfer.engines import Engine, create_engine, find_engine, identify_model
from batchinfer.engines.config import EngineConfig
from batchinfer.prompts import PromptConfig, Tokenizer
from batchinfer.storage import Preconditions, Store
from batchinfer.worker.background import Background, ThreadBackground
from batchinfer.worker.services import Limits
from batchinfer.worker.stopping import Stopper
from batchinfer.worker.stream import RowStream
from batchinfer.worker.telemetry import Telemetry


class WorkerConfig(Record, frozen=True, kw_only=True):
    """Everything a worker is told. Paths may be URLs."""

    manifests: list[str]
    output: str
    engine: EngineConfig
    prompt: PromptConfig
    sampling: Sampling
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
    scratch_dir: str | None = None
    limits: Limits = Limits()
    host: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The outside world of one worker, so that a test or simulation can supply its own."""

    clock: Clock
    background: Background
    open_store: Callable[[str], Store]
    probe: Callable[[Store], Preconditions]
    create_engine: Callable[[EngineConfig], Engine]
    load_tokenizer: Callable[[EngineConfig], Tokenizer | None]
    identify_model: Callable[[EngineConfig], str]
    check_sampling: Callable[[WorkerConfig], None]
    stopper: Stopper
    new_nonce: Callable[[], str]
    progress: Callable[[Telemetry, RowStream | None], None]


def real_world(
    *, grace_seconds: float, progress: Callable[[Telemetry, RowStream | None], None]
) -> World:
    """Threads, the system's clock, and storage by URL."""
    from batchinfer.engines.tokenizers import tokenizer_for
    from batchinfer.storage.opening import open_store, probe

    clock = SystemClock()
    return World(
        clock=clock,
        background=ThreadBackground(),
        open_store=open_store,
        probe=probe,
        create_engine=create_engine,
        load_tokenizer=tokenizer_for,
        identify_model=identify_model,
        check_sampling=check_sampling,
        stopper=Stopper(clock, grace_seconds=grace_seconds),
        new_nonce=lambda: secrets.token_hex(8),
        progress=progress,
    )


def check_sampling(config: WorkerConfig) -> None:
    """Refuse sampling parameters that the engine does not know. Starts and imports nothing heavy."""
    if config.sampling.extra:
        find_engine(config.engine.engine).check_parameters(config.sampling.extra)
