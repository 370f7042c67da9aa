"""Everything that a worker gets as arguments: its configuration, the outside world, and its access to the run."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.errors import ConfigError
from batchinfer.core.records import EngineInfo, Money, Record, Sampling
from batchinfer.core.tasks import SCORE, PairForm
from batchinfer.engines import (
    Engine,
    create_engine,
    find_engine,
    has_model,
    identify_model,
    is_remote,
    own_parameters_of,
    pair_form_of,
)
from batchinfer.engines.config import EngineConfig
from batchinfer.ledger.claims import Claims, Lease
from batchinfer.ledger.publishing import Publisher
from batchinfer.prompts import (
    ANY_NAME,
    CONSTRAINT_BACKEND,
    ConstraintChecker,
    EngineRules,
    PromptConfig,
    Tokenizer,
    check_run_constraint,
    check_run_tools,
)
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
    """Most rows whose prompts one background job builds."""
    max_build_bytes: int = 8 << 20
    """Bytes of input rows after which a background job that builds prompts reads no further rows."""
    max_row_memory: int = 256
    """MiB of memory for each replica that rows take which wait for the engine or are in it.

    No further prompts are built above it. At least one row is always built. With `dedupe`, kept answers may take as
    much once more.
    """
    max_media_bytes: int = 20 << 20
    """Largest image, in bytes as it is stored or sent. A row with a larger one fails."""
    media_timeout_seconds: float = 30.0
    """Seconds that one attempt to fetch an image from a web server may take."""
    media_root: str = ""
    """Folder or URL from which paths of images in rows count; empty if rows must not name paths."""
    allow_private_urls: bool = False
    """Whether rows may name images at addresses of a private network."""
    dedupe: bool = False
    """Whether rows with equal requests are answered once."""
    row_attempts: int = 3
    """Attempts to generate a row that fails for a passing reason."""
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
    create_engine: Callable[..., Engine]
    """Function that creates the engine from its configuration; `nodes` may be given, as in `engines.create_engine`."""
    load_tokenizer: Callable[[EngineConfig], Tokenizer | None]
    identify_model: Callable[[EngineConfig], str]
    check_sampling: Callable[[WorkerConfig], None]
    stopper: Stopper
    new_nonce: Callable[[], str]
    show_progress: Callable[[Telemetry], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAccess:
    """The objects with which a worker reads and writes its run, put together after it has taken its lease."""

    store: Store
    lease: Lease
    claims: Claims | None
    """The claims of this worker; None if the store ignores preconditions or claims are switched off."""
    publisher: Publisher
    scratch: Scratch


def real_environment(
    *, grace_seconds: float, show_progress: Callable[[Telemetry], None]
) -> Environment:
    """Make the environment of a real worker: real threads, the system's clock, and storage that is opened by URL."""
    from batchinfer.engines.tokenizers import tokenizer_for
    from batchinfer.storage.opening import open_store, probe

    clock = SystemClock()
    return Environment(
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
        show_progress=show_progress,
    )


def check_sampling(config: WorkerConfig) -> None:
    """Check the options of prompts and sampling against the engine; see `check_together`."""
    check_adapters_are_asked_for(config.prompt)
    check_together(config.engine, config.prompt, config.sampling)


def check_adapters_are_asked_for(prompt: PromptConfig) -> None:
    """Refuse several adapters if rows cannot say which of them answers.

    Raises:
        ConfigError: rows are no requests, and no column names their adapters.
    """
    adapters = prompt.adapters or []
    if len(adapters) > 1 and not prompt.rows_say_adapter:
        raise ConfigError(
            f"--lora: is given {len(adapters)} times, and nothing says which adapter answers a row",
            hint="name the column that says it: --lora-column COLUMN; one adapter alone answers every row",
        )


def check_together(engine: EngineConfig, prompt: PromptConfig, sampling: Sampling) -> None:
    """Refuse options of prompts and sampling that the engine cannot do.

    Does not start the engine, and imports no large library.

    Raises:
        ConfigError: the engine does not know one of the additional sampling parameters, the constraint does not
            compile, nor do the schemas of forced calls, a parameter does not go with speculative decoding, or prompts
            should be cut and only another program has the tokenizer.
    """
    kind = find_engine(engine.engine)
    if sampling.extra:
        kind.check_parameters("--sampling", sampling.extra)
    is_cut = bool(sampling.min_p) and sampling.temperature != 0
    if engine.speculation and (is_cut or sampling.logit_bias):
        name = "min_p" if is_cut else "logit_bias"
        raise ConfigError(
            f"--speculative-config: vLLM does not speculate with {name}", hint=f"leave out {name}"
        )
    if kind.is_remote and prompt.truncate_prompt != PromptConfig().truncate_prompt:
        raise ConfigError(
            f"--truncate-prompt {prompt.truncate_prompt}: needs the model's tokenizer, which only the endpoint has",
            hint="a vLLM server cuts prompts itself: --sampling truncate_prompt_tokens=N",
        )
    check_run_tools(prompt, sampling, checker_for(engine))
    check_run_constraint(sampling.structured, checker_for(engine))
    if prompt.task == SCORE and prompt.request_format == PromptConfig().request_format:
        is_apart = has_model(engine) and pair_form_of(engine) is PairForm.APART
        if is_apart and not prompt.pair_columns:
            raise ConfigError(
                "--task score: the model embeds texts, so it scores pairs of them",
                hint="name both columns: --pair-columns query,document",
            )
    if has_budget(sampling) and not (kind.is_remote or may_end_reasoning(engine)):
        raise ConfigError(
            "--thinking-budget: without --reasoning-parser the engine does not know what reasoning is",
            hint="add --reasoning-parser with the parser for your model (docs/tools.md)",
        )


def has_budget(sampling: Sampling) -> bool:
    """Whether the run limits the tokens of reasoning."""
    return (sampling.extra or {}).get("thinking_token_budget") is not None


def may_end_reasoning(engine: EngineConfig) -> bool:
    """Whether an option tells the engine with which tokens reasoning ends."""
    return bool(engine.reasoning_parser or engine.engine_args.get("reasoning_config"))


def rules_of(engine: EngineConfig, assumed_name: str = "") -> EngineRules:
    """Return what this engine takes. `assumed_name` is a further name of the model; see `adapters.assumed_name`."""
    return EngineRules(
        own_parameters=own_parameters_of(engine),
        checker=checker_for(engine),
        pairs=pair_form_of(engine),
        max_images=engine.max_images,
        fetches_links=is_remote(engine),
        finds_calls=bool(engine.tool_call_parser) or is_remote(engine),
        finds_reasoning=bool(engine.reasoning_parser),
        own_names=[ANY_NAME] if is_remote(engine) else [*own_names(engine), assumed_name],
    )


def shown_name(config: WorkerConfig, info: EngineInfo) -> str:
    """Return the model's name for output lines: the first of --served-model-name, as vLLM's server does."""
    served = config.prompt.served_model_name or []
    return next((name for name in served if name != ANY_NAME), config.engine.model or info.model)


def own_names(engine: EngineConfig) -> list[str]:
    """Return the names that a run's model has without options: the value of --model, and its last part."""
    if not engine.model:
        return [engine.engine]
    return [engine.model, engine.model.rstrip("/").rpartition("/")[2]]


def checker_for(engine: EngineConfig) -> ConstraintChecker | None:
    """Return a checker of constraints for this engine; None if the engine compiles them in another way."""
    is_same = engine.constraint_backend == CONSTRAINT_BACKEND and not is_remote(engine)
    return ConstraintChecker() if is_same else None
