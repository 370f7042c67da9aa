"""Everything that a worker gets as arguments: its configuration, the outside world, and its access to the run."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta

from batchinfer.core.clock import Clock
from batchinfer.core.option_help import NO_OPTION, RECORDED, Count, NotNegative, Opt, Positive
from batchinfer.core.records import EngineInfo, Money, Record
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.prompts.types import EngineRules, PromptConfig, Sampling

if TYPE_CHECKING:  # the declarations of options are read by `--help`, which answers at once
    from batchinfer.engines import Engine
    from batchinfer.ledger.claims import Claims, Lease
    from batchinfer.storage import Store
    from batchinfer.storage.scratch import Scratch
    from batchinfer.worker.background import Background, Stopper
    from batchinfer.worker.telemetry import Telemetry

_LONGEST_DELAY_SECONDS = 60.0
Most = Annotated[float, Meta(gt=0, le=1e9)] | None


class Limits(Record, frozen=True, kw_only=True):
    """Limits on what a worker uses of memory and disk, and on how often it does the same thing again."""

    SECTION: ClassVar[str] = "media"

    media_root: Annotated[str, Opt(metavar="URL", is_recorded=True)] = ""
    """Folder or URL that paths of media in rows count from. Without it, rows name media by URLs only."""
    max_media_bytes: Annotated[Count, Opt(metavar="BYTES")] = 20 << 20
    """Largest image, sound or video that is taken; rows with a larger one are error rows."""
    allow_private_urls: Annotated[bool, RECORDED] = False
    """Fetch links of rows from addresses of a private network, too."""
    media_timeout_seconds: Annotated[float, NO_OPTION] = 30.0
    """Seconds that one attempt to fetch from a web server may take."""
    max_row_memory: Annotated[Count, Opt(metavar="MIB")] = 256
    """MiB of memory for rows on their way, with their media, for each replica. One row is always taken. A cache
    of media that rows share takes half of it once more, for all replicas together."""
    max_open_chunks: Annotated[int, NO_OPTION] = 256
    """Chunks that may be at work at the same time, each on a thread."""
    max_openings: Annotated[int, NO_OPTION] = 4
    """Chunks that may be in the middle of being opened at the same time."""
    max_publishing: Annotated[int, NO_OPTION] = 7
    """Chunks that may be published at the same time, each by a thread that does nothing else.

    Uploads may take minutes, in which further chunks are to be opened and rows saved.
    """
    max_open_bytes: Annotated[int, NO_OPTION] = 16 << 30
    """Bytes of scratch disk that open chunks hold, input and finished rows, above which no further chunk is opened."""
    max_build_rows: Annotated[int, NO_OPTION] = 512
    """Most rows whose calls one background job builds."""
    max_build_bytes: Annotated[int, NO_OPTION] = 8 << 20
    """Bytes of input rows after which a background job that builds calls reads no further rows."""
    storage_attempts: Annotated[int, NO_OPTION] = 4
    """Failed attempts to open or publish a chunk after which it is given up.

    If finished rows of the chunk are not on storage yet, one more attempt to publish follows, before which they are
    saved. While open chunks have unfinished rows, the attempts go on and no chunk is given up because of storage.
    """
    storage_retry_seconds: Annotated[float, NO_OPTION] = 5.0
    """Seconds between the first failed attempt and the second. Each further wait is twice as long, up to a minute."""

    def storage_delay_seconds(self, attempts: int) -> float:
        """Return the seconds to wait before the next attempt, when `attempts` attempts have failed."""
        return min(self.storage_retry_seconds * 2.0 ** max(0, attempts - 1), _LONGEST_DELAY_SECONDS)


class WorkerConfig(Record, frozen=True, kw_only=True):
    """The configuration of one worker, and the declaration of the options of `batchinfer worker`."""

    SECTION: ClassVar[str] = "behaviour"

    job: Annotated[str | None, Opt(section="input", metavar="URL", is_first=True)] = None
    """Job that `batchinfer split` wrote: path or URL."""
    output: Annotated[str, Opt(short="-o", section="input", metavar="RUN", is_first=True)]
    """Place of the run. Default: JOB/runs/default."""
    manifests: Annotated[
        list[str],
        Opt(
            flag="--manifest",
            section="input",
            variables=("BATCHINFER_WORKER_MANIFEST", "DATA_METADATA"),
        ),
    ]
    """Manifest to work through: path or URL; may be repeated. Default: of --job those of this worker's rank
    (BATCHINFER_RANK and BATCHINFER_NUM_WORKERS, or SkyPilot's), without one all.txt."""
    limit: Annotated[Count | None, Opt(section="input", is_recorded=True)] = None
    """Only the first N rows of the job."""
    engine: EngineConfig
    prompt: PromptConfig
    sampling: Sampling = Sampling()
    """Only declares the options of which `prompt.body` is made."""
    run_seed: Annotated[
        int | None, Opt(form="seed", flag="--seed", section="sampling", is_recorded=True)
    ] = 0
    """Seed of the run, or none: faster on a GPU, not repeatable."""
    limits: Limits = Limits()

    worker_id: Annotated[str, Opt(variables=("BATCHINFER_WORKER_WORKER_ID",))] = ""
    """Stable name of this worker. Default: SkyPilot's task id and node rank, else random."""
    checkpoint_seconds: Positive = 30.0
    """Seconds between checkpoints of open chunks."""
    lease_seconds: Positive = 120.0
    """Without a heartbeat for so long, others take a worker's chunks."""
    grace_seconds: NotNegative = 20.0
    """Time to finish rows after SIGTERM or SIGINT."""
    retry_errors: bool = False
    """Do the error rows of a finished run again. A repair that was begun is ended first."""
    max_error_rate: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Stop (exit 3) when a larger share of rows fails. Default: when nearly all of the first 100 fail, or of all; 1
    never stops."""
    min_errors: Count = 20
    """Failed rows before --max-error-rate counts."""
    max_attempts: Count = 5
    """Starts without a new finished row before the worker gives up (exit 3)."""
    max_cost: Annotated[Most, Opt(metavar="DOLLARS")] = None
    """Stop (exit 3) once this worker's machines have cost so many dollars, all its starts together. launch divides it
    among its workers."""
    max_hours: Annotated[Most, Opt(metavar="H")] = None
    """Stop (exit 3) once this worker was up for so many hours, all its starts together."""
    price_per_hour: Annotated[
        Annotated[float, Meta(ge=0, le=1e6)] | None, Opt(metavar="DOLLARS")
    ] = None
    """Dollars an hour for this worker's machine. Default, with --max-cost: SkyPilot's catalog if this machine has it,
    else list prices by GPU."""
    price_source: Annotated[str, NO_OPTION] = ""
    metrics: Annotated[str, Opt(form="place", metavar="[HOST:]PORT")] = ""
    """Serve metrics for Prometheus there. Without HOST: at 127.0.0.1; port 0: a free one, which the log names."""
    scratch_dir: Annotated[str | None, Opt(form="folder")] = None
    """Local folder for chunks and outputs under way."""
    host: Annotated[dict[str, Any], NO_OPTION] = {}

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
    probe: Callable[[Store], None]
    """Refuses a store that does not honour preconditions; see `storage.opening.check_preconditions`."""
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
    claims: Claims
    scratch: Scratch
    source_at: Callable[[str], Store]
    """Returns the store at a URL, from which chunks are read."""
    retry_errors: bool = False
    """Whether error rows in checkpoints are asked again."""


def real_environment(
    *, grace_seconds: float, show_progress: Callable[[Telemetry], None]
) -> Environment:
    """Make the environment of a real worker: real threads, the system's clock, and storage that is opened by URL."""
    from batchinfer.engines import create_engine, identify_model
    from batchinfer.storage.opening import check_preconditions, open_store
    from batchinfer.worker.background import Background, Stopper

    clock = Clock()
    return Environment(
        clock=clock,
        background=Background(),
        open_store=open_store,
        probe=check_preconditions,
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
    from batchinfer.engines import is_remote
    from batchinfer.engines.models import end_mark

    return EngineRules(
        model=engine.served_names[0],
        eos_token=end_mark(engine) if info is not None and engine.engine == "vllm" else "",
        max_model_len=None if info is None else info.max_model_len,
        fills_length=not is_remote(engine) and not engine.server_command,
        parameters=opened.parameters if opened else lambda _path: frozenset(),
        fetches_links=is_remote(engine) or "allowed_media_domains" in engine.server_options,
    )
