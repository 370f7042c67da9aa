"""Frozen records: those that modules pass to each other, and those that are stored as JSON.

They are msgspec structs: immutable, keyword-only, slotted, and their own codec (see docs/decisions/0002).
Unknown keys are ignored on reading, so that an older reader survives a newer writer's additions.
"""

from __future__ import annotations

from typing import Any

import msgspec

FORMAT_VERSION = 1
"""Version of everything under JOB/ and RUN/. A reader refuses a higher one."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every record.

    Subclasses repeat both arguments: msgspec does not inherit kw_only, and type checkers do not inherit frozen.

    Records that exist in large numbers set `gc=False`: they are in no reference cycle, so the
    garbage collector can skip them.
    """


# --------------------------------------------------------------------------- the job (written once by `split`)


class SourceFile(Record, frozen=True, kw_only=True):
    """One input file. `url` as given or resolved; `rows` counts its rows, broken lines included."""

    url: str
    bytes: int
    rows: int
    digest: str = ""
    """sha256 of the content (JSON Lines, CSV) or of the footer (parquet): tells a changed file from the same one."""


class Source(Record, frozen=True, kw_only=True):
    """One SOURCE argument, resolved. `revision` is a commit for hf:// sources, else empty."""

    url: str
    format: str
    files: list[SourceFile]
    revision: str = ""


class Chunk(Record, frozen=True, kw_only=True):
    """One chunk. `first_row` counts from 0 over the whole job; `bytes` and `sha256` are those of the stored object."""

    name: str
    first_row: int
    rows: int
    bytes: int
    sha256: str


class Job(Record, frozen=True, kw_only=True):
    """job.json: what was split, and into what. Holds no clock time, so equal inputs give equal bytes."""

    format_version: int
    sources: list[Source]
    columns: list[str]
    rows: int
    chunks: list[Chunk]
    num_workers: int
    id_column: str = ""
    group_by: str = ""
    limit: int | None = None
    compression: str = "none"
    shape: dict[str, int] = {}
    """Division that was asked for: {"num_chunks": N} or {"chunk_rows": N}."""
    null_floats: int = 0
    """Number of NaN and infinite values that became null."""
    broken_lines: int = 0
    """Number of lines of JSON Lines sources that hold no JSON object; each becomes an error row."""
    duplicate_ids: int = 0


# --------------------------------------------------------------------------- requests and completions


class Sampling(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Sampling parameters of one request, by vLLM's names. None means the engine's default.

    `structured` holds one of {"json": schema}, {"json_object": True}, {"regex": ...}, {"choice": [...]} and
    {"grammar": ...}.
    `extra` goes to the engine's own parameter object unchanged (``--sampling key=value``).
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    n: int = 1
    best_of: int | None = None
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured: dict[str, Any] | None = None
    extra: dict[str, Any] | None = None


RowKey = tuple[str, int]
"""(chunk name, line index from 0), which identifies a row everywhere."""


class Request(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One row on its way to the engine. Exactly one of text, token_ids and messages is set."""

    key: RowKey
    sampling: Sampling
    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    adapter: str | None = None
    task: str = "generate"


class TokenLogprob(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One position: the token, its text and log-probability, and the alternatives as (text, log-probability)."""

    token: str
    logprob: float
    token_id: int = -1
    top: list[tuple[str, float]] = []


class Choice(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One generated answer. `index` counts from 0 below n."""

    index: int
    text: str
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None
    cumulative_logprob: float | None = None
    num_tokens: int = 0


class Failure(Record, frozen=True, kw_only=True):
    """Why a row has no answer. `transient` failures are worth another try in the same worker."""

    code: str
    message: str
    transient: bool = False


class Completion(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The engine's answer to one request: choices, or a failure.

    `prompt_logprobs` has one entry per prompt token, the first None (it has no predecessor).
    Seconds are measured by the engine: waiting for the scheduler, and generating.
    """

    key: RowKey
    choices: list[Choice] = []
    failure: Failure | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    queue_seconds: float = 0.0
    generation_seconds: float = 0.0


class EngineInfo(Record, frozen=True, kw_only=True):
    """Facts about an opened engine. `max_in_flight`: number of requests that the worker should keep in it."""

    name: str
    version: str
    model: str
    max_model_len: int
    max_num_seqs: int
    max_in_flight: int
    dtype: str = ""
    revision: str = ""
    quantization: str = ""
    num_replicas: int = 1
    device: str = ""
    load_seconds: float = 0.0
    """Seconds until the engine was open. `import_seconds` and `model_seconds` are parts of these, of the slowest
    replica."""
    import_seconds: float = 0.0
    model_seconds: float = 0.0
    max_logprobs: int | None = None
    """Largest number of alternatives per token. Negative: no limit. None: the engine does not say."""


class EngineStats(Record, frozen=True, kw_only=True):
    """Counters since the engine was opened, summed over its replicas."""

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    replicas_lost: int = 0
    """Number of loaded replicas that have died or stalled. The other replicas take over their rows."""


# --------------------------------------------------------------------------- the run


class Run(Record, frozen=True, kw_only=True):
    """run.json, created once. The fingerprint covers `config`; `recorded` only informs."""

    format_version: int
    fingerprint: str
    config: dict[str, Any]
    recorded: dict[str, Any]
    nonce: str


class Marker(Record, frozen=True, kw_only=True):
    """`<output>.succeed`: vouches for one output. `start` and `end` are UTC, ISO 8601."""

    output: str
    output_bytes: int
    output_sha256: str
    chunk: str
    chunk_sha256: str
    generation: int
    rows_ok: int
    rows_error: int
    rows_resumed: int
    fingerprint: str
    worker: str
    epoch: int
    start: str
    end: str
    prompt_tokens: int
    completion_tokens: int
    nonce: str
    cached_tokens: int = 0
    errors: dict[str, int] = {}
    """Error rows by code."""
    chunk_root: str = ""
    """Folder of the chunk's file; "" for a chunk of a job."""
    chunk_bytes: int | None = None
    """Size of the chunk as stored."""


class Claim(Record, frozen=True, kw_only=True):
    """claims/<chunk>.json: who works on a chunk. Valid as long as that worker's heartbeat moves at this epoch."""

    worker: str
    epoch: int
    nonce: str


class ErrorExample(Record, frozen=True, kw_only=True):
    """The first row that failed with a code."""

    chunk: str
    line: int
    message: str


class Minute(Record, frozen=True, kw_only=True, array_like=True):
    """What a worker did in one minute; `minute` counts from the Unix epoch.

    `length`: number of minutes that this record covers; old minutes of a long run are joined.
    """

    minute: int
    rows: int
    prompt_tokens: int
    completion_tokens: int
    errors: int
    length: int = 1


class Span(Record, frozen=True, kw_only=True, array_like=True):
    """One chunk's time in a worker, in Unix seconds.

    `rows` finished, `resumed` of them from checkpoints. `outcome` is done, lost (another worker published it),
    released, killed (the worker's process ended without saying so), or open.
    """

    chunk: str
    start: float
    end: float
    rows: int
    resumed: int
    epoch: int
    outcome: str


class Worker(Record, frozen=True, kw_only=True):
    """workers/<id>.json: heartbeat, lease and the numbers that `status` and `report` read.

    Counters cover every epoch of this worker; per-epoch starts are in `starts`. Lists are bounded (see telemetry).
    """

    id: str
    epoch: int
    nonce: str
    state: str
    """loading, running, waiting, done, stopped or failed; `status` derives stalled and gone from `heartbeat`."""
    started: float
    heartbeat: float
    lease_seconds: float = 120.0
    beat: int = 0
    """Number of renewals, so that every renewal changes the record's etag."""
    attempts: int = 0
    """Number of starts since the last one that finished a new row. Starts that were asked to stop, or had no chunk, do
    not count."""
    reason: str = ""
    fingerprint: str = ""
    host: dict[str, Any] = {}
    """Facts about the machine, where known: cloud, region, accelerator, gpus, spot. Never the host name."""
    engine: dict[str, Any] = {}
    open_chunks: list[str] = []
    chunks_done: int = 0
    chunks_skipped: int = 0
    rows_done: int = 0
    rows_ok: int = 0
    rows_error: int = 0
    rows_resumed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    engine_steps: int = 0
    busy_seconds: float = 0.0
    load_seconds: float = 0.0
    errors: dict[str, int] = {}
    examples: dict[str, ErrorExample] = {}
    finish_reasons: dict[str, int] = {}
    prompt_lengths: dict[str, int] = {}
    """Rows by length bucket: the key is the bucket's upper bound in tokens, a power of two, inclusive."""
    completion_lengths: dict[str, int] = {}
    minutes: list[Minute] = []
    spans: list[Span] = []
    """Spans of closed chunks, in the order of closing; only the newest where there are too many."""
    open_spans: list[Span] = []
    """Spans of open chunks."""
    starts: list[float] = []
    ends: list[tuple[float, str]] = []
    """Last heartbeat and state of every start but the last, so this list is one shorter than `starts`."""
    replicas_lost: int = 0
    """Number of replicas that this start has lost, of the `num_replicas` in `engine`."""
    up_seconds: float = 0.0
    """Seconds that the worker's processes ran, as far as heartbeats tell: without machine set-up and time between
    starts."""
