"""Frozen records: those that modules pass to each other, and those that are stored as JSON.

Records are msgspec structs with keyword-only arguments and slots. Their fields cannot be set again. msgspec also
encodes and decodes them. Unknown keys are ignored on reading, so that older programs can read
records to which a newer program has added fields.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from batchinfer.core.counts import Count, Counts

FORMAT_VERSION = 1
"""Version of the format of the files below a job's and a run's folder. Programs refuse jobs and runs of a later one."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every record.

    Subclasses repeat `frozen` and `kw_only`: msgspec does not inherit kw_only, and type checkers do not inherit frozen.

    Classes with very many records set `gc=False`, to save the time of the garbage collector. Their records are never
    part of a reference cycle.
    """


Positive = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Version = Annotated[int, msgspec.Meta(ge=1, le=FORMAT_VERSION)]
"""A later version is refused."""


# --------------------------------------------------------------------------- the job (written once by `split`)


class SourceFile(Record, frozen=True, kw_only=True):
    """One input file. `rows` is the number of its rows, and broken lines count as rows."""

    url: str
    bytes: Count
    rows: Count
    digest: str
    """sha256 of the file's rows as JSON Lines, of parquet of its end with the footer: it tells changed files."""

    @property
    def content(self) -> tuple[int, int, str]:
        """What is the same of files with the same content, whatever their names."""
        return self.bytes, self.rows, self.digest


class Source(Record, frozen=True, kw_only=True):
    """One SOURCE argument of `split`, and its files. `revision` is a commit for hf:// sources, else empty."""

    url: str
    format: str
    files: list[SourceFile]
    revision: str = ""


class Chunk(Record, frozen=True, kw_only=True):
    """One chunk of a job.

    `first_row` is the place of its first row in the whole job, from 0. `bytes` and `sha256` are the size and checksum
    of the chunk's file on storage.
    """

    name: str
    first_row: Count
    rows: Count
    bytes: Count
    sha256: str
    file: str | msgspec.UnsetType = msgspec.UNSET
    """Key of the chunk's file below the job; its path or URL, if the job was made by reference. Unset: the key follows
    from the name."""


class Job(Record, frozen=True, kw_only=True):
    """Content of job.json: the sources of a job, and its chunks. It holds no time, so equal inputs give equal bytes."""

    format_version: Version
    sources: list[Source]
    columns: list[str]
    rows: Count
    chunks: list[Chunk]
    num_workers: Positive
    id_column: str = ""
    """Column whose values became `_id`; empty if row numbers did."""
    limit: Positive | None = None
    compression: str = "none"
    broken_lines: Count = 0
    """Number of lines of JSON Lines sources that hold no JSON object; each becomes an error row."""
    duplicate_ids: Count = 0
    """Number of rows with an `_id` that an earlier row has, among the first ten million that were split or appended
    together."""
    generation: Count = 0
    """Number of times that data were appended."""
    first_sha256: str = ""
    """sha256 of job.json before data were appended. It stands for the job in the fingerprints of runs."""

    @property
    def files(self) -> list[SourceFile]:
        """The files of all sources, in the order of their rows."""
        return [file for source in self.sources for file in source.files]


# --------------------------------------------------------------------------- a row's way to the engine and back


RowKey = tuple[str, int]
"""(chunk name, line index from 0), which identifies a row of a run."""


class Call(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One row on its way to the engine: a request to a server that speaks the OpenAI API.

    The first field of a JSON body is the prompt (`messages`, `prompt`, `input` and the like), so bodies that sort next
    to each other begin alike.
    """

    key: RowKey
    path: str
    """Path at the server, as in ``/v1/chat/completions``."""
    body: bytes
    content_type: str = "application/json"
    """Type of `body`. Audio travels as ``multipart/form-data``."""


class Reply(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The engine's answer to one call, as the server gave it."""

    key: RowKey
    status: int
    """HTTP status. 0: an engine process ended, or was ended because it hung, with this row in flight."""
    body: bytes
    """The server's body, unread; with status 0 the reason as text."""
    prompt_tokens: int | None = None
    """The row's share of the prompt tokens of a request that rows shared; None if the body has its own count."""

    @property
    def is_engine_death(self) -> bool:
        """Whether the engine process ended with the row in it. The engine goes on with another process."""
        return self.status == 0


class Failure(Record, frozen=True, kw_only=True):
    """The reason why a row has no answer."""

    code: str
    """An entry of `core.row_codes.Code`."""
    message: str
    status: int = 400
    """HTTP status for the output line: the server's, or the one that a server would give for the same fault."""
    param: str | None = None
    """Request parameter or column that caused the failure; None if none did."""


Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**32)]
"""A number of tokens that a server may claim for an answer. The sum over a billion rows is a `Count`."""


class Usage(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Tokens of one answered row."""

    prompt_tokens: Tokens = 0
    cached_tokens: Tokens = 0
    """Number of those tokens of `prompt_tokens` that came from the prefix cache."""
    completion_tokens: Tokens = 0
    reasoning_tokens: Tokens | None = None
    """Number of those tokens of `completion_tokens` that are reasoning; None if nobody counts them."""


class FinishedRow(Usage, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One line of a segment: a finished row, or a note that an engine died while it was generating the row.

    `output` must stay the last field, because `encode_rows` computes its place from the end of the encoded record.
    """

    line: int
    ok: bool | None = None
    """None in a note."""
    code: str = ""
    finish_reason: str = ""
    engine_deaths: int = 0
    """Number of deaths that a note tells of; 0 in a finished row."""
    rows_in_flight: int = 0
    """Number of rows that were in the engine when it died, this row included."""
    output: msgspec.Raw = msgspec.Raw()


class EngineInfo(Record, frozen=True, kw_only=True):
    """Facts about an open engine. `max_in_flight` is the number of calls that the worker should keep in it."""

    name: str
    version: str
    model: str
    max_in_flight: int
    max_model_len: int | None = None
    """Most tokens of prompt and answer together; None if the engine does not say."""
    max_num_seqs: int | None = None
    revision: str = ""
    num_replicas: int = 1
    device: str = ""
    load_seconds: float = 0.0


class EngineStats(Record, frozen=True, kw_only=True):
    """Counters since the engine was opened, summed over its replicas."""

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    replicas_lost: int = 0
    """Number of replicas that have died or stalled so often that they are not started again. The others go on."""
    restarts: int = 0
    """Number of times that a replica was started again after it had died or stalled."""
    rows: int = 0
    """Rows that the engines have now, waiting ones included. Others in flight are in the servers' front ends."""


# --------------------------------------------------------------------------- the run


class Run(Record, frozen=True, kw_only=True):
    """Content of run.json, which is created once. The fingerprint is computed from `config`; it ignores `recorded`."""

    format_version: Version
    fingerprint: str
    config: dict[str, Any]
    recorded: dict[str, Any]
    nonce: str


class Marker(Counts, frozen=True, kw_only=True):
    """Content of a marker (`<chunk>.succeed`), which says that a chunk is done and describes its output.

    `start` and `end` are times in UTC, as ISO 8601.
    """

    output: str
    output_bytes: int
    output_sha256: str
    chunk: str
    chunk_sha256: str
    generation: int
    fingerprint: str
    worker: str
    start: str
    end: str
    nonce: str


class Claim(Record, frozen=True, kw_only=True):
    """Content of claims/<chunk>.json, which says which worker works on a chunk.

    The claim holds as long as this start of this worker renews its heartbeat. A released claim names no worker.
    """

    worker: str
    nonce: str
    """The worker's start."""
    number: int = 0
    """Makes all claims of one start differ."""


class ErrorExample(Record, frozen=True, kw_only=True):
    """The first row of a worker that failed with a certain error code."""

    chunk: str
    line: int
    message: str


class Minute(Record, frozen=True, kw_only=True, array_like=True):
    """What a worker did in one minute. `minute` is the number of whole minutes since 1970.

    In a long run, old records are joined. `length` is the number of minutes that a record covers.
    """

    minute: Count
    rows: Count
    prompt_tokens: Count
    completion_tokens: Count
    errors: Count
    length: Positive = 1


Dollars = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Money(Record, frozen=True, kw_only=True):
    """What a worker's machines have cost in dollars, and the limits that its last start keeps to."""

    price_per_hour: Dollars | None = None
    """Dollars an hour for the machine of the last start; None if the worker does not know its price."""
    price_source: str = ""
    """Name of the source of the price, as in `core.prices.Price`."""
    cost: Dollars | None = None
    """Dollars for all starts of the worker, each at its own price; None if no price is known."""
    max_cost: Dollars | None = None
    max_hours: Annotated[float, msgspec.Meta(ge=0)] | None = None


class WorkerLease(Record, frozen=True, kw_only=True):
    """Content of workers/<id>.json: a worker's lease, which it renews regularly.

    Other workers read it, so it has at most 1 KB.
    """

    id: str
    nonce: str
    """The worker's last start."""
    state: str
    """State of the worker: loading, running, done, stopped or failed. `status` finds out others by itself: waiting,
    slow, stalled and gone."""
    heartbeat: float
    lease_seconds: float = 120.0
    beat: int = 0
    """Number of heartbeats. It makes the record's content, and so its etag, differ after every heartbeat."""
    attempts: int = 0
    """Number of starts since a start last finished a new row or found all work done. Not counted are starts that were
    asked to end, reached a limit, were refused for another configuration, or only waited."""


class Worker(Counts, frozen=True, kw_only=True):
    """Content of workers/<id>.stats.json: the numbers that `status` and `report` read.

    It is written with heartbeats and at the worker's end. Readers take nonce, state, heartbeat, lease_seconds and
    attempts from the worker's lease. Most counters are sums over all starts of the worker. Its lists have a largest
    length: see worker/minutes.py, and MAX_CODES in core/counts.py.
    """

    id: str
    nonce: str
    state: str
    started: float
    heartbeat: float
    lease_seconds: float = 120.0
    attempts: int = 0
    reason: str = ""
    host: dict[str, Any] = {}
    """Facts about the machine, as far as known: cloud, region, accelerator, gpus, spot. The host's name is left out."""
    engine: dict[str, Any] = {}
    open_chunks: dict[str, int] = {}
    """Number of finished rows of each chunk that is open now."""
    chunks_done: int = 0
    busy_seconds: float = 0.0
    examples: dict[str, ErrorExample] = {}
    minutes: list[Minute] = []
    num_starts: int = 0
    last_start: float = 0.0
    """Time of the worker's last start, in Unix seconds by its own clock."""
    replicas_lost: int = 0
    """Number of the engine's replicas that this start has lost. `engine` holds their full number as `num_replicas`."""
    up_seconds: float = 0.0
    """Seconds that the worker's processes have run in all, as of this record. The time to set up machines and the time
    between two starts are not counted."""
    money: Money | None = None
    """Price and limits, if the worker was started with one of them."""
    rows_in_engine: int = 0
    engine_restarts: int = 0

    @property
    def engine_load_seconds(self) -> float:
        """Seconds that the last load of the engine took; 0 while none is loaded."""
        seconds = self.engine.get("load_seconds")
        return float(seconds) if isinstance(seconds, int | float) else 0.0

    def with_lease(self, lease: WorkerLease) -> Worker:
        """Return the statistics with what the worker's lease says."""
        return msgspec.structs.replace(
            self,
            nonce=lease.nonce,
            state=lease.state,
            heartbeat=lease.heartbeat,
            lease_seconds=lease.lease_seconds,
            attempts=lease.attempts,
        )
