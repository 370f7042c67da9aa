"""Frozen records: those that modules pass to each other, and those that are stored as JSON.

Records are msgspec structs with keyword-only arguments and slots. Their fields cannot be set again. msgspec also
encodes and decodes them (see docs/decisions/0002). Unknown keys are ignored on reading, so that older programs can read
records to which a newer program has added fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

FORMAT_VERSION = 1
"""Version of the format of the files below a job's and a run's folder. Programs refuse jobs and runs of a later one."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every record.

    Subclasses repeat `frozen` and `kw_only`: msgspec does not inherit kw_only, and type checkers do not inherit frozen.

    Classes with very many records set `gc=False`, to save the time of the garbage collector. Their records are never
    part of a reference cycle.
    """


Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""A number of rows, bytes or the like. Records that hold another number are refused on reading. The upper bound keeps
the sum of three such numbers within 64 bits."""
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**62)]


# --------------------------------------------------------------------------- the job (written once by `split`)


class SourceFile(Record, frozen=True, kw_only=True):
    """One input file. `rows` is the number of its rows, and broken lines count as rows."""

    url: str
    bytes: Count
    rows: Count
    digest: str = ""
    """sha256 of the file's content (JSON Lines, CSV) or footer (parquet), to notice that the file has changed."""
    crc32: str | msgspec.UnsetType = msgspec.UNSET
    """CRC-32 of a parquet file's bytes, 8 hexadecimal digits. Only for files on the machine that made the job: others
    would have to be fetched twice."""

    def is_same_as(self, other: SourceFile) -> bool:
        """Whether two files have the same content, by all that is known of both. Their names do not matter."""
        if (self.bytes, self.rows, self.digest) != (other.bytes, other.rows, other.digest):
            return False
        return not self.crc32 or not other.crc32 or self.crc32 == other.crc32


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
    nonce: str | msgspec.UnsetType = msgspec.UNSET
    """Nonce in the name of the chunk's file. Unset if the file has the plain name."""


class Append(Record, frozen=True, kw_only=True):
    """Where in the lists of job.json the data of one `split --append` begin: indices from 0."""

    first_source: Count
    first_chunk: Positive
    first_row: Positive


class Job(Record, frozen=True, kw_only=True):
    """Content of job.json: the sources of a job, and its chunks. It holds no time, so equal inputs give equal bytes.

    A job to which nothing was appended has none of the fields `generation`, `first_sha256` and `appends`.
    """

    format_version: Positive
    sources: list[Source]
    columns: list[str]
    rows: Count
    chunks: list[Chunk]
    num_workers: Positive
    id_column: str = ""
    group_by: str = ""
    limit: Positive | None = None
    compression: str = "none"
    shape: dict[str, Positive] = {}
    """Division into chunks that the user asked for or `split` chose: {"num_chunks": N} or {"chunk_rows": N}."""
    null_floats: Count = 0
    """Number of NaN and infinite values of the sources that `split` replaced by null."""
    broken_lines: Count = 0
    """Number of lines of JSON Lines sources that hold no JSON object; each becomes an error row."""
    duplicate_ids: Count = 0
    """Number of rows with an `_id` that an earlier row has, among the rows that were split or appended together."""
    blank_lines: Count | msgspec.UnsetType = msgspec.UNSET
    """Number of blank lines of the JSON Lines and CSV sources, which are no rows. Unset if there are none."""
    schema: str | msgspec.UnsetType = msgspec.UNSET
    """Arrow schema of the columns that have one type in all files: Arrow's IPC form as base64. It is unset unless all
    files are parquet."""
    renamed: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """Names that the sources' own columns ``_row`` and ``_id`` have in the rows. Unset if no source has them."""
    generation: Positive | msgspec.UnsetType = msgspec.UNSET
    """Number of times that data were appended."""
    first_sha256: str | msgspec.UnsetType = msgspec.UNSET
    """sha256 of job.json before data were appended. It stands for the job in the fingerprints of runs."""
    appends: list[Append] | msgspec.UnsetType = msgspec.UNSET
    """Where the appended data begin, one entry for each time."""

    @property
    def source_names(self) -> dict[str, str]:
        """Names in the sources of the columns that `split` renamed, by their names in the rows."""
        if isinstance(self.renamed, msgspec.UnsetType):
            return {}
        return {name: source_name for source_name, name in self.renamed.items()}


# --------------------------------------------------------------------------- requests, completions, the engine


class Sampling(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Sampling parameters of one request. None means the engine's default. Most names are vLLM's.

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


class Pooling(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What a request itself asks of a pooling model. None means what the run's options say."""

    dimensions: int | None = None
    normalize: bool | None = None
    extra: dict[str, Any] | None = None
    """Parameters that go to an endpoint unread."""


class RequestInput(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One of the texts of a request to a pooling model. Exactly one of text, token_ids and messages is set."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    second_start: int | None = None
    """Index of the first token of a pair's second text, for models that tell the two texts apart; else None."""


class AnswerForm(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What an answer may hold beside its text: calls of tools, and reasoning."""

    tools: list[dict[str, Any]] | None = None
    """Tools that the model may call, in the form of the OpenAI API."""
    tool_choice: str = "auto"
    """Which tools the model calls: ``auto``, the model decides; ``none``; ``required``, at least one; ``named``, the
    one of `tool_name`. With the last two the answer's text is JSON, to which a constraint holds it."""
    tool_name: str = ""
    is_parallel: bool = True
    """Whether an answer may have several calls."""
    template_kwargs: dict[str, Any] | None = None
    """Variables that the chat template got, since a parser may have to know whether the model was asked to think."""
    hides_reasoning: bool = False
    """Whether the request wants its reasoning left out."""


RowKey = tuple[str, int]
"""(chunk name, line index from 0), which identifies a row of a run."""


class Media(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One image of a request. Either `data` is set, or `url`, which the engine passes on."""

    data: bytes = b""
    """The image as it was found, for example a JPEG file. It has been decoded once, so it is whole."""
    url: str = ""
    mime: str = ""
    width: int = 0
    height: int = 0
    digest: str = ""
    """sha256 of `data`, 64 hexadecimal digits."""


class Request(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One row on its way to the engine. Exactly one of text, token_ids, messages and inputs is set."""

    key: RowKey
    sampling: Sampling
    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    adapter: str | None = None
    task: str = "generate"
    chat_options: dict[str, Any] | None = None
    """How an engine that renders conversations itself should render `messages`: fields of vLLM's chat requests, such as
    `chat_template_kwargs`. None for what the model's own chat template does."""
    media: list[Media] | None = None
    """Images of the request. The messages have a part ``{"type": "image"}`` for each, in order; a prompt that is no
    conversation has the model's own marks."""
    form: AnswerForm | None = None
    """What the answer may hold beside its text; None if its text is not to be taken apart."""
    is_streamed: bool = False
    """Whether `Engine.take_pieces` gives the answers' texts while they are generated."""
    returns_token_ids: bool = False
    """Whether the completion holds the token ids of prompt and answers."""
    priority: int = 0
    """Place in the queue of an engine that has one by priority: lower comes first. It changes no answer."""
    inputs: list[RequestInput] = []
    """Texts of a request to a pooling model that has several, or a pair of texts. Each gets an answer of its own."""
    num_queries: int = 0
    """For the task "score": number of inputs, counted from the first, that are compared with the other inputs. A single
    query is compared with all others, several queries with one other input each. With 0, each input is scored by
    itself."""
    pooling: Pooling | None = None

    @property
    def prompts(self) -> Sequence[Request | RequestInput]:
        """The inputs, or the request itself if it has only one text."""
        return self.inputs or (self,)


class TextPiece(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The next part of an answer to a streamed request.

    `index` is that of the answer's `Choice`. `num_tokens` counts the tokens since the answer's last piece. The text may
    be empty, for example while a token holds only the first byte of a character.
    """

    key: RowKey
    index: int = 0
    text: str = ""
    num_tokens: int = 0


class TokenLogprob(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One token of a text, with its log-probability. `top` holds the alternatives as (text, log-probability)."""

    token: str
    logprob: float
    token_id: int = -1
    top: list[tuple[str, float]] = []
    rank: int = 0
    """Place of the token among all tokens by probability, from 1; 0 if unknown. Only tokens of a prompt have it."""
    top_ids: list[int] = []
    """Token ids of the alternatives, in the order of `top`. Only tokens of a prompt have them."""


class Choice(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One generated answer. `index` numbers the answers of one request from 0 to `Sampling.n` - 1."""

    index: int
    text: str
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None
    cumulative_logprob: float | None = None
    num_tokens: int = 0
    """Number of the answer's tokens; 0 if the engine only counts the tokens of all answers together."""
    reasoning: str | None = None
    """The model's reasoning before its answer, if the engine separates the two."""
    tool_calls: list[dict[str, Any]] | None = None
    """Calls of tools in the form of the OpenAI API. A call without an `id` gets one when its output line is written."""
    token_ids: list[int] | None = None
    """Ids of the answer's tokens; None unless the request asked for them."""


class Pooled(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What a pooling model made of one input: a vector of `width` numbers, or one such vector for each token."""

    data: bytes
    """The numbers as little-endian float32, one vector after the other."""
    width: int
    label: str = ""
    """Name of the class with the highest probability; empty for other tasks than "classify"."""


class Failure(Record, frozen=True, kw_only=True):
    """The reason why a row has no answer. If `transient` is true, the same worker may try the row again."""

    code: str
    message: str
    transient: bool = False

    @property
    def is_engine_death(self) -> bool:
        """Whether the engine process ended with the row in it, and the same worker goes on with another process."""
        return self.transient and self.code == "engine_crash"


class Completion(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The engine's answer to one request: choices, numbers of a pooling model, or a failure.

    `prompt_logprobs` has one entry for each prompt token. Its first entry is None, because no token precedes the first.
    The engine measures the seconds: `queue_seconds` until it began with the request, `generation_seconds` from then on.
    """

    key: RowKey
    choices: list[Choice] = []
    failure: Failure | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    reasoning_tokens: int | None = None
    """Number of those tokens of `completion_tokens` that are reasoning; None if nobody counts them."""
    prompt_token_ids: list[int] | None = None
    """Ids of the prompt's tokens; None unless the request asked for them."""
    queue_seconds: float = 0.0
    generation_seconds: float = 0.0
    pooled: list[Pooled] = []
    """Numbers of a pooling model: one entry for each input, or for each pair of inputs that were compared."""


class EngineInfo(Record, frozen=True, kw_only=True):
    """Facts about an open engine. `max_in_flight` is the number of requests that the worker should keep in it."""

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
    """Seconds that opening the engine took. `import_seconds` and `model_seconds` are parts of this time, measured in
    the slowest replica."""
    import_seconds: float = 0.0
    model_seconds: float = 0.0
    max_logprobs: int | None = None
    """Largest number of alternative tokens that the engine returns per token. A negative number means no limit; None
    means that the engine does not say."""


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


# --------------------------------------------------------------------------- the run


class Run(Record, frozen=True, kw_only=True):
    """Content of run.json, which is created once. The fingerprint is computed from `config`; it ignores `recorded`."""

    format_version: int
    fingerprint: str
    config: dict[str, Any]
    recorded: dict[str, Any]
    nonce: str


class Marker(Record, frozen=True, kw_only=True):
    """Content of a marker (`<chunk>.jsonl.succeed`), which says that a chunk is done and describes its output.

    `start` and `end` are times in UTC, as ISO 8601.
    """

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
    """Number of error rows for each error code."""
    chunk_root: str = ""
    """Folder in which the chunk's file was; empty for a chunk of a job."""
    chunk_bytes: int | None = None
    """Size of the chunk's file on storage, in bytes."""
    finish_reasons: dict[str, int] = {}
    """Number of ok rows for each finish reason. Markers of earlier versions have neither this field nor the lengths."""
    prompt_lengths: dict[str, int] = {}
    """Number of ok rows for each range of prompt lengths; see the same field of `Worker`."""
    completion_lengths: dict[str, int] = {}
    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Number of those tokens of `completion_tokens` that are reasoning. Unset if there are none."""


class Claim(Record, frozen=True, kw_only=True):
    """Content of claims/<chunk>.json, which says which worker works on a chunk.

    The claim holds as long as this worker, at this epoch, renews its heartbeat.
    """

    worker: str
    epoch: int
    nonce: str


class ErrorExample(Record, frozen=True, kw_only=True):
    """The first row of a worker that failed with a certain error code."""

    chunk: str
    line: int
    message: str


class Minute(Record, frozen=True, kw_only=True, array_like=True):
    """What a worker did in one minute. `minute` is the number of whole minutes since 1970.

    In a long run, old records are joined. `length` is the number of minutes that a record covers.
    """

    minute: int
    rows: int
    prompt_tokens: int
    completion_tokens: int
    errors: int
    length: int = 1


class Span(Record, frozen=True, kw_only=True, array_like=True):
    """The time from `start` to `end`, in Unix seconds, during which one start of a worker had one chunk open.

    `rows` is the number of the chunk's finished rows; `resumed` of them came from checkpoints. `outcome` is done, lost
    (another worker published the chunk), released, killed (the process ended without noting it) or open.
    """

    chunk: str
    start: float
    end: float
    rows: int
    resumed: int
    epoch: int
    outcome: str


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


class Worker(Record, frozen=True, kw_only=True):
    """Content of workers/<id>.json: a worker's heartbeat, its lease, and the numbers that `status` and `report` read.

    Most counters are sums over all starts of the worker. `starts` holds the time of each start. Long lists lose their
    oldest entries (see worker/telemetry.py).
    """

    id: str
    epoch: int
    nonce: str
    state: str
    """State of the worker: loading, running, waiting, done, stopped or failed. `status` may show another one, such as
    gone if heartbeats are missing."""
    started: float
    heartbeat: float
    lease_seconds: float = 120.0
    beat: int = 0
    """Number of heartbeats. It makes the record's content, and so its etag, differ after every heartbeat."""
    attempts: int = 0
    """Number of starts since a start last finished a new row or found all work done. Starts that a signal, a preemption
    notice or `batchinfer stop` ended are not counted."""
    reason: str = ""
    fingerprint: str = ""
    host: dict[str, Any] = {}
    """Facts about the machine, as far as known: cloud, region, accelerator, gpus, spot. The host's name is left out."""
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
    """Number of rows for each range of prompt lengths. The key is the largest length in the range, in tokens: a power
    of two, or 0."""
    completion_lengths: dict[str, int] = {}
    minutes: list[Minute] = []
    spans: list[Span] = []
    """Spans of closed chunks, in the order of their closing. If there are too many, the oldest are left out."""
    open_spans: list[Span] = []
    """Spans of the chunks that are open now."""
    starts: list[float] = []
    ends: list[tuple[float, str]] = []
    """Time of the last heartbeat, and the last state, of every start except the latest. This list is one shorter than
    `starts`."""
    replicas_lost: int = 0
    """Number of the engine's replicas that this start has lost. `engine` holds their full number as `num_replicas`."""
    up_seconds: float = 0.0
    """Seconds that the worker's processes have run in all, as of this record. The time to set up machines and the time
    between two starts are not counted."""
    rows_copied: int = 0
    """Number of rows with a copy of another row's answer (--dedupe). Their tokens are not part of `prompt_tokens` and
    `completion_tokens`."""
    prompt_tokens_copied: int = 0
    completion_tokens_copied: int = 0
    money: Money | None = None
    """Price and limits, if the worker was started with one of them."""
    rows_in_engine: int = 0
    rows_waiting: int = 0
    """Number of rows that have a prompt and wait for the engine."""
    engine_restarts: int = 0
    checkpointed: float = 0.0
    """Time of the last round of checkpoints whose rows are all on storage, in Unix seconds; 0 before the first one."""
    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Number of those tokens of `completion_tokens` that are reasoning. Unset if there are none."""

    @property
    def engine_load_seconds(self) -> float:
        """Seconds that the last load of the engine took; 0 while none is loaded."""
        seconds = self.engine.get("load_seconds")
        return float(seconds) if isinstance(seconds, int | float) else 0.0

    @property
    def last_start(self) -> float:
        """Time of the worker's last start, in Unix seconds by its own clock."""
        return self.starts[-1] if self.starts else self.started
