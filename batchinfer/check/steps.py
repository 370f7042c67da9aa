"""The steps of `check`: options, model, data, storage, prompts, memory, and time and cost."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from batchinfer.check.data import Data, from_assignment, from_sources, synthetic
from batchinfer.check.estimate import Asked, Measured, give_advice, measure_run
from batchinfer.check.memory import ask_for_memory, parse_gpu
from batchinfer.core import layout, units
from batchinfer.core.clock import Clock
from batchinfer.core.errors import AccessDenied, BatchinferError, ConfigError, ObjectNotFound
from batchinfer.core.prices import Machine, Prices
from batchinfer.core.records import Record, Sampling
from batchinfer.core.tasks import is_pooling
from batchinfer.engines import check_engine, has_model
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.models import check_length, lacking_torchvision
from batchinfer.engines.parser_process import check_parsers
from batchinfer.ledger.jobs import OpenStore, check_columns, read_assignment
from batchinfer.ledger.runs import differing_keys, read_run
from batchinfer.prompts import PromptBuilder, PromptConfig, Tokenizer
from batchinfer.storage import Preconditions, Store
from batchinfer.storage.opening import leaving_no_folders
from batchinfer.storage.scratch import Scratch
from batchinfer.worker.adapters import identify_adapters, may_assume, name_in
from batchinfer.worker.config import (
    Limits,
    check_adapters_are_asked_for,
    check_together,
    has_budget,
)
from batchinfer.worker.joining import parsers_in
from batchinfer.worker.media import MediaFetcher, check_media
from batchinfer.worker.preview import RenderedRow, make_preview_builder, rendered, show_rows

ERROR, WARNING = "error", "warning"


class Problem(Record, frozen=True, kw_only=True):
    """One problem that `check` has found.

    A problem of level "error" makes `check` fail, and one of level "warning" does not.
    """

    level: str
    area: str
    """What the problem is about: config, storage, model, data, memory or estimate."""
    message: str
    hint: str = ""


class CheckConfig(Record, frozen=True, kw_only=True):
    """What to check. `engine`, `prompt` or `sampling` is None if its options were wrong and could not be read."""

    sources: list[str] = []
    delimiter: str = ""
    manifests: list[str] = []
    job: str | None = None
    output: str = ""
    limit: int | None = None
    allow_absolute: bool = False
    engine: EngineConfig | None = None
    prompt: PromptConfig | None = None
    sampling: Sampling | None = None
    run_seed: int | None = 0
    checkpoint_seconds: float = 30.0
    gpu: str = ""
    """GPUs of one worker, as in "L4:2"; several with commas between are alternatives, and the model must fit each."""
    rate: float | None = None
    rate_from: str = ""
    workers: int | None = None
    hours: float | None = None
    max_cost: float | None = None
    max_hours: float | None = None
    is_spot: bool | None = None
    sample_rows: int = 200
    show: int = 3
    synthetic: int | None = None
    scratch_dir: str | None = None
    limits: Limits = Limits()
    problems: list[Problem] = []
    """Problems that were found while the command line's options were read."""


class CheckWorld(Record, frozen=True, kw_only=True):
    """The outside world that a check uses: stores, models, prices and the clock. Tests replace it."""

    open_store: OpenStore
    probe: Callable[[Store], Preconditions]
    describe_model: Callable[[EngineConfig], Any]
    load_tokenizer: Callable[[EngineConfig], Tokenizer | None]
    prices: Prices
    clock: Clock


def differences(store: Store, config: CheckConfig, job_sha256: str) -> list[tuple[str, str, str]]:
    """Compare options with those of the run in a store.

    Args:
        store: The store at the run's place.
        config: The options.
        job_sha256: Hash of job.json; "" if it is not known, and then it is not compared.

    Returns:
        Name, the run's value and the option's value of each difference. Empty if there is no run yet, or if the options
            of prompts or sampling could not be read.
    """
    run = read_run(store)
    if run is None or config.prompt is None or config.sampling is None:
        return []
    mine: dict[str, Any] = {
        "prompt": msgspec.to_builtins(config.prompt),
        "sampling": msgspec.to_builtins(config.sampling),
        "seed": config.run_seed,
        "limit": config.limit,
    }
    theirs = dict(run.config)
    engine = config.engine
    if engine is not None:
        mine |= {
            "model": engine.model or engine.engine,
            "tokenizer": engine.tokenizer or "",
            "hf_config_path": engine.hf_config_path or "",
            "engine_args": engine.answer_arguments,
            "trust_remote_code": engine.trust_remote_code,
            "pooling": engine.pooling,
            "dimensions": engine.dimensions,
            "normalize": engine.normalize,
        }
        mine |= dict.fromkeys(("tool_call_parser", "reasoning_parser"), "") | parsers_in(engine)
        for key in ("tool_call_parser", "reasoning_parser"):
            theirs.setdefault(key, "")
        # The key is missing if the run does not trust the model's code, and in runs of earlier versions, which only
        # recorded the value.
        theirs.setdefault("trust_remote_code", bool(run.recorded.get("trust_remote_code")))
    if job_sha256:
        mine["job_sha256"] = job_sha256
    return differing_keys({key: theirs.get(key) for key in mine}, mine)


class Examination:
    """Runs the steps of one check. An error in one step becomes a problem, and the next step still runs."""

    def __init__(self, config: CheckConfig, world: CheckWorld, scratch: Scratch) -> None:
        self.config = config
        self.world = world
        self.scratch = scratch
        self.problems = list(config.problems)
        self.result: dict[str, Any] = {}
        self.model: Any = None
        self.data: Data | None = None

    def run(self) -> dict[str, Any]:
        """Run every step and return the result."""
        config = self.config
        with self._step("config"):
            self._check_options()
        if config.engine is not None and has_model(config.engine):
            with self._step("model"):
                self.model = self.world.describe_model(config.engine)
                self.result["model"] = msgspec.to_builtins(self.model)
                if adapters := identify_adapters(config.engine):
                    self.result["adapters"] = adapters
                if (problem := lacking_torchvision(config.engine)) is not None:
                    self._problem(WARNING, "model", problem.message, problem.hint)
                budget = config.sampling is not None and has_budget(config.sampling)
                check_parsers(config.engine, has_budget=budget, keeps=False)
                if warning := check_length(config.engine, self.model):
                    self._problem(WARNING, "model", warning)
        if config.engine is not None:
            with self._step("model"):
                self._look_at_engine(config.engine)
        with self._step("data"):
            self.data = self._find_data()
        if config.output:
            with self._step("storage"):
                self._check_output()
        lengths = None
        with self._step("data"):
            lengths = self._check_prompts()
        for gpu in self._gpus:
            if self.model is None or config.engine is None:
                break
            with self._step("memory"):
                answer = config.sampling.max_tokens if config.sampling else None
                answer = 0 if is_pooling(config.engine.task) else answer
                memory = ask_for_memory(
                    gpu, self.model, config.engine, lengths.mean if lengths else None, answer
                )
                self.result["memory"] = msgspec.to_builtins(memory)
        with self._step("estimate"):
            self._estimate()
        return self._sum_up()

    @property
    def _gpus(self) -> list[str]:
        return self.config.gpu.split(",") if self.config.gpu else []

    @contextlib.contextmanager
    def _step(self, area: str) -> Iterator[None]:
        try:
            yield
        except BatchinferError as error:
            kind = "storage" if isinstance(error, AccessDenied) and area != "model" else area
            self._problem(ERROR, kind, error.message, error.hint)

    def _problem(self, level: str, area: str, message: str, hint: str = "") -> None:
        if not any((each.message, each.hint) == (message, hint) for each in self.problems):
            self.problems.append(Problem(level=level, area=area, message=message, hint=hint))

    # -- steps

    def _look_at_engine(self, engine: EngineConfig) -> None:
        """Ask the program that runs the model, if it is another one, whether it knows the model."""
        try:
            kind = check_engine(engine)
        except BatchinferError:
            return  # the step "config" has reported it
        if not kind.needs_model:  # in a rehearsal, the adapters' own files are checked
            identify_adapters(engine)
        kind.look(engine)
        if kind.is_remote:
            self.result["endpoint"] = {"base_url": engine.base_url, "model": engine.model}

    def _check_options(self) -> None:
        from batchinfer.formats import encoder_for

        config = self.config
        for gpu in self._gpus:
            with self._step("config"):
                parse_gpu(gpu)
        if config.engine is not None:
            with self._step("config"):
                check_engine(config.engine)
        if not (config.engine is None or config.prompt is None or config.sampling is None):
            with self._step("config"):
                check_adapters_are_asked_for(config.prompt)
                check_together(config.engine, config.prompt, config.sampling)
        if config.prompt is not None and config.sampling is not None:
            self._make_builder(config.prompt, config.sampling, None, None)
            encoder_for(config.prompt)

    def _make_builder(
        self,
        prompt: PromptConfig,
        sampling: Sampling,
        tokenizer: Tokenizer | None,
        room: int | None,
        assumed_name: str = "",
    ) -> PromptBuilder:
        engine = self.config.engine or EngineConfig()
        return make_preview_builder(
            prompt,
            sampling,
            self.config.run_seed,
            tokenizer,
            room,
            engine=engine,
            assumed_name=assumed_name,
        )

    def _find_data(self) -> Data | None:
        config = self.config
        if config.synthetic is not None:
            if config.prompt is None:
                return None
            return synthetic(config.synthetic, config.sample_rows, config.prompt)
        if config.sources:
            return from_sources(
                config.sources, config.sample_rows, config.limit, delimiter=config.delimiter
            )
        manifests = config.manifests
        if config.job and not manifests:
            manifests = [f"{config.job.rstrip('/')}/manifests/all.txt"]
        if not manifests:
            self._problem(
                ERROR,
                "data",
                "nothing to check: no SOURCE, no --job and no --manifest",
                "name one of them, or --synthetic 100000 for made-up rows",
            )
            return None
        assignment = read_assignment(
            manifests,
            job_url=config.job,
            allow_absolute=config.allow_absolute,
            limit=config.limit,
            open_store=self.world.open_store,
        )
        return from_assignment(assignment, config.sample_rows, self.world.open_store, self.scratch)

    def _check_output(self) -> None:
        store = self.world.open_store(self.config.output)
        with contextlib.suppress(ObjectNotFound):
            store.stat(layout.JOB_KEY)
            self._problem(
                ERROR,
                "config",
                f"--output {store.url}: is a job's own place",
                f"write the run beside it, as in --output {layout.run_url(store.url, 'first')}",
            )
        with leaving_no_folders(store.url):
            preconditions = self.world.probe(store)
        self.result["storage"] = {"url": store.url, "is_safe": preconditions.is_safe}
        if not preconditions.is_safe:
            self._problem(
                WARNING,
                "storage",
                f"{store.url}: ignores preconditions, so workers cannot share chunks there",
                "give each worker a manifest of its own, or use a store with conditional writes",
            )
        job_sha256 = self.data.job_sha256 if self.data is not None else ""
        for key, there, here in differences(store, self.config, job_sha256):
            self._problem(
                ERROR,
                "config",
                f"{store.url}: the run was made with another {key}: {there}, not {here}",
                "use the run's value, or another --output",
            )

    def _check_prompts(self) -> Any:
        config, data = self.config, self.data
        if data is None or config.prompt is None or config.sampling is None:
            return None
        tokenizer = None
        if config.engine is not None and self.model is not None:
            tokenizer = self.world.load_tokenizer(config.engine)
        room = config.engine.max_model_len if config.engine is not None else None
        room = room or (self.model.max_model_len if self.model is not None else 0) or None
        name = ""
        if config.engine is not None and may_assume(config.engine, config.prompt):
            name = name_in([row.data for _, raw in data.sample for row in raw], config.engine)
        try:
            builder = self._make_builder(config.prompt, config.sampling, tokenizer, room, name)
        except ConfigError as error:
            self._problem(ERROR, "config", error.message, error.hint)
            # The columns and prompts can still be checked if only the sampling options are wrong.
            builder = self._make_builder(config.prompt, Sampling(), tokenizer, room, name)
        if data.job is not None and (config.workers or 0) > data.job.num_workers:
            self._problem(
                ERROR,
                "data",
                f"--workers {config.workers}: the job has {units.many(data.job.num_workers, 'worker manifest')}",
                f"start fewer, or split again with --num-workers {config.workers}",
            )
        if data.job is not None:
            with self._step("data"):
                check_columns(
                    data.job, builder.needed_columns, optional=config.prompt.optional_columns
                )
        if data.counted is not None:
            with self._step("data"):
                for option, names in builder.needed_columns.items():
                    data.counted.require_in_each_file(option, names)
            for option, names in config.prompt.own_columns.items():
                with self._step("data"):
                    data.counted.require_in_any_file(option, names)
        rows: list[RenderedRow] = []
        cut = 0
        with self._step("config"):
            check_media(config.prompt, config.limits)
        fetcher = MediaFetcher(config.limits, self.world.open_store)
        for chunk, raw in data.sample:
            built = builder.build(chunk.name, chunk.first_row, raw)
            found = fetcher.fetch_all([prepared.media for prepared in built])
            for prepared, media in zip(built, found, strict=True):
                row = rendered(prepared, has_tokenizer=tokenizer is not None, media=media)
                rows.append(row)
                wanted = prepared.request.sampling.max_tokens if prepared.request else None
                if row.tokens is not None and wanted and room and row.tokens + wanted > room:
                    cut += 1
        measured = Measured.of(rows)
        self.result["sample"] = msgspec.to_builtins(measured)
        self.result["prompts"] = msgspec.to_builtins(rows[: config.show])
        show_rows(rows[: config.show])
        self._judge(rows, cut, room)
        return measured.lengths

    def _judge(self, rows: list[RenderedRow], cut: int, room: int | None) -> None:
        """Add problems for sample rows that would fail, and for sample rows whose answers may be cut off.

        `cut` counts rows whose prompt and --max-tokens together exceed the model's length, `room` tokens.
        """
        bad = Counter(row.code for row in rows if row.code)
        total = self.data.rows if self.data is not None else None
        for code, count in bad.most_common():
            first = next(row for row in rows if row.code == code)
            about = (
                "" if total is None else f", about {round(total * count / len(rows)):,} of all rows"
            )
            self._problem(
                ERROR if count == len(rows) else WARNING,
                "data",
                f"{count} of {len(rows)} sample rows would be {code}{about}; row {first.row}: {first.message}",
            )
        num_with_images = sum(bool(row.images) for row in rows)
        if num_with_images and self.model is not None and not self.model.takes_images:
            self._problem(
                WARNING,
                "model",
                f"{num_with_images} of {len(rows)} sample rows have images, "
                "and nothing in the model's config says that it takes images",
                "if it takes none, such rows become error rows (engine_rejected)",
            )
        if cut:
            self._problem(
                WARNING,
                "data",
                f"{cut} of {len(rows)} sample rows leave less than --max-tokens of the model's {room} tokens",
                "their answers may end early; lower --max-tokens or raise --max-model-len",
            )

    def _estimate(self) -> None:
        config = self.config
        measured = None
        if config.rate_from:
            measured = measure_run(config.rate_from, self.world.open_store, self.world.clock)
        rate = config.rate or (measured.rate if measured else None)
        if measured is not None:
            self.result["measured"] = msgspec.to_builtins(measured)
        rows = self.data.rows if self.data is not None else None
        if not rate or not rows:
            return
        name, count = (measured.accelerator, measured.gpus) if measured else ("", 1)
        if config.gpu:
            name, gpus = parse_gpu(self._gpus[0])
            count = len(gpus)
        machine = Machine(
            cloud="", region="", accelerator=name, gpus=count, is_spot=bool(config.is_spot)
        )
        asked = Asked(
            rows=rows,
            rate=rate,
            chunks=self.data.chunks if self.data is not None else None,
            workers=config.workers,
            hours=config.hours,
            load_seconds=measured.load_seconds if measured else None,
            row_seconds=measured.row_seconds if measured else None,
            checkpoint_seconds=config.checkpoint_seconds,
            price=self.world.prices.price(machine),
        )
        self.result |= give_advice(asked)
        self._compare_limits(self.result["estimate"])

    def _compare_limits(self, estimate: dict[str, Any]) -> None:
        """Add problems for limits of the run that the estimate exceeds."""
        config = self.config
        limits = [
            ("--max-cost", config.max_cost, estimate["cost"], units.money),
            ("--max-hours", config.max_hours, estimate["hours"], "{:.3g} h".format),
        ]
        for option, limit, estimated, write in limits:
            if limit is not None and estimated is not None and estimated > limit:
                self._problem(
                    WARNING,
                    "estimate",
                    f"{option} {write(limit)} is below the estimate of {write(estimated)}: the run would stop after "
                    f"about {limit / estimated:.0%} of it",
                    f"raise {option}, or take fewer rows: --limit",
                )

    def _sum_up(self) -> dict[str, Any]:
        problems = sorted(self.problems, key=lambda one: one.level != ERROR)
        errors = sum(one.level == ERROR for one in problems)
        return {
            "status": "PROBLEMS" if errors else "OK",
            "errors": errors,
            "warnings": len(problems) - errors,
            "problems": msgspec.to_builtins(problems),
            "rows": self.data.rows if self.data is not None else None,
            "chunks": self.data.chunks if self.data is not None else None,
            **self.result,
        }
