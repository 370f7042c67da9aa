"""The steps of `check`: options, model, data, access, prompts, memory, time and cost."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections import Counter as Tally
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from batchinfer.check.estimate import estimate
from batchinfer.check.machine import problems_of, this_machine
from batchinfer.check.model import Counter, memory_on
from batchinfer.cli.options import value_of
from batchinfer.core import codec, layout
from batchinfer.core.errors import BatchinferError, ConfigError
from batchinfer.core.option_help import NO_OPTION, Count, Opt, Positive
from batchinfer.core.records import Call, Failure, Job, Record, RowKey
from batchinfer.engines import create_engine, has_model, is_remote
from batchinfer.engines.adapters import describe_adapters
from batchinfer.engines.engine_config import EngineConfig, check_engine
from batchinfer.engines.models import ModelInfo, describe_model
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.jobs import ChunkRef, check_columns, read_assignment
from batchinfer.prompts.builder import PromptBuilder
from batchinfer.prompts.types import PromptConfig, RawRow, RowError
from batchinfer.storage.opening import (
    check_preconditions,
    open_store,
    split_url,
)
from batchinfer.storage.scratch import Scratch
from batchinfer.worker.command import engine_config, make_config, prompt_config
from batchinfer.worker.joining import Membership
from batchinfer.worker.worker_config import WorkerConfig, real_environment, rules_of

if TYPE_CHECKING:
    from batchinfer.split.sources import Sources

ERROR, WARNING = "error", "warning"
_PLACES = 4
"""Chunks or files, spread evenly, from whose beginnings sample rows are taken: sorted data are alike at one place."""

_FOLDERS = ("model", "loras", "media_root", "server_args")
"""Parameters of the worker that may name a folder of this machine."""

_LOOK_SECONDS = 3.0
"""Seconds after which an endpoint that does not answer counts as not there."""


class CheckConfig(Record, frozen=True, kw_only=True):
    """What to check, and the declaration of the options of `check` that are not the worker's."""

    options: Annotated[dict[str, Any], NO_OPTION]
    """All options of the command, by their parameters, as click has parsed them."""
    sources: Annotated[list[str], NO_OPTION] = []
    """Sources that are not split yet, in place of a job."""
    delimiter: Annotated[str, Opt(form="delimiter")] = ""
    """As in split, for SOURCE's CSV."""
    gpu: Annotated[str | None, Opt(metavar="NAME[:N],…")] = None
    """GPUs of one worker, or several kinds: L4, H100:8; none."""
    rate: Positive | None = None
    """Rows per second of one worker."""
    rate_from: Annotated[str | None, Opt(metavar="RUN")] = None
    """Take the rate of an earlier run's workers."""
    workers: Count | None = None
    """How many there will be."""
    hours: Positive | None = None
    """Wanted time: how many workers?"""
    machine: bool = False
    """Look at this machine alone: driver, GPUs, memory, disk, packages."""
    sample_rows: Count = 200
    """Rows to look at."""
    show: Annotated[int, Meta(ge=0)] = 3
    """Requests to show."""
    elsewhere: Annotated[str, NO_OPTION] = ""
    """Cluster of the workers, if these cannot see folders of this machine."""
    counts_tokens: Annotated[bool, NO_OPTION] = True
    """Whether the lengths of prompts are wanted, for which a tokenizer may have to be loaded."""


class Data(NamedTuple):
    """Size of the data, and sample rows: for each place, the chunk's name, its first row and the rows."""

    rows: int
    chunks: int | None
    sample: list[tuple[str, int, list[RawRow]]]
    job: Job | None = None
    counted: Sources | None = None


class Examination:
    """Runs the steps of one check. An error in one step becomes a problem, and the next step still runs."""

    def __init__(self, config: CheckConfig) -> None:
        self.config, self.options = config, config.options
        self.problems: list[dict[str, str]] = []
        self.result: dict[str, Any] = {}
        self.engine: EngineConfig | None = None
        self.prompt: PromptConfig | None = None
        self.model: ModelInfo | None = None
        self.data: Data | None = None

    def run(self) -> dict[str, Any]:
        """Run every step and return the result, whose entry `problems` lists all problems, errors first.

        A probe object is written to the run's place and removed again.
        """
        steps = (
            ("config", self._read_engine),
            ("config", self._read_prompt),
            ("model", self._find_model),
            ("data", self._find_data),
            ("access", self._check_places),
            ("access", self._check_access),
            ("prompts", self._check_prompts),
            ("memory", self._ask_for_memory),
            ("estimate", self._estimate),
        )
        for area, step in [("machine", self._look_here)] if self.config.machine else steps:
            try:
                step()
            except BatchinferError as error:
                self._problem(ERROR, area, error.message, error.hint)
        errors = sum(one["level"] == ERROR for one in self.problems)
        return {
            "status": "PROBLEMS" if errors else "OK",
            "errors": errors,
            "warnings": len(self.problems) - errors,
            "problems": sorted(self.problems, key=itemgetter("level")),
            "rows": self.data.rows if self.data else None,
            "chunks": self.data.chunks if self.data else None,
            **self.result,
        }

    def _problem(self, level: str, area: str, message: str, hint: str = "") -> None:
        """Note a problem, once. One of the level "error" makes the check fail.

        `area` says what it is about: machine, config, model, data, access, prompts, memory or estimate.
        """
        problem = {"level": level, "area": area, "message": message, "hint": hint}
        if all((each["message"], each["hint"]) != (message, hint) for each in self.problems):
            self.problems.append(problem)

    def _look_here(self) -> None:
        machine = this_machine()
        self.result["machine"] = msgspec.to_builtins(machine)
        for level, message, hint in problems_of(machine):
            self._problem(level, "machine", message, hint)

    def _read_engine(self) -> None:
        self.engine = engine_config(self.options)
        check_engine(self.engine)
        describe_adapters(self.engine)

    def _read_prompt(self) -> None:
        self.prompt = prompt_config(self.options)

    def _find_model(self) -> None:
        if self.engine is None:
            return
        if has_model(self.engine):
            self.model = describe_model(self.engine)
            self.result["model"] = msgspec.to_builtins(self.model)
            return
        self.result["not_checked"] = ["that prompts fit the model's length"]
        if is_remote(self.engine):  # it is asked whether it takes the key and the model
            quick = msgspec.structs.replace(self.engine, stall_seconds=_LOOK_SECONDS)
            with contextlib.closing(create_engine(quick)) as engine:
                engine.open(threading.Event())
        else:
            self.result["not_checked"].append("that the model is there")

    def _find_data(self) -> None:
        job, manifests = self.options["job"], list(self.options["manifests"] or ())
        if self.config.sources:
            if job or manifests:
                text = "--job, --manifest: are not looked at beside SOURCE"
                self._problem(WARNING, "data", text, "leave SOURCE out to check the job")
            self.data = _read_sources(self.config)
            return
        if not manifests and not job:
            hint = "name data or a job; of the machine alone: --machine"
            raise ConfigError("nothing to check: no SOURCE, no --job, no --manifest", hint=hint)
        found = read_assignment(
            manifests or [f"{job.rstrip('/')}/{layout.ALL_MANIFEST}"],
            job_url=job,
            limit=self.options["limit"],
            open_store=open_store,
        )
        self.data = _read_chunks(found.chunks, self.config.sample_rows, found.job)
        wanted, there = self.options.get("workers") or 0, found.job.num_workers
        if wanted > there:
            raise ConfigError(
                f"--workers {wanted}: the job has {there} worker manifests",
                hint="make it anew with `batchinfer split --num-workers N`, or start fewer workers",
            )

    def _check_places(self) -> None:
        """Refuse folders of this machine, if the workers cannot see them."""
        if not self.config.elsewhere:
            return
        urls = (self.options["job"], self.options["output"])
        here = [url for url in urls if split_url(url)[0] in ("file", "memory")]
        for name in _FOLDERS:
            given = self.options.get(name) or ()
            for word in [given] if isinstance(given, str) else given:
                place = word.partition("=")[2] or word
                here += [place] if Path(place).expanduser().is_dir() else []
        if here:
            raise ConfigError(
                f"{', '.join(here)}: workers on {self.config.elsewhere} see no folder of this machine",
                hint="copy it to a bucket; if it is at the same path on their machines: --no-check",
            )

    def _check_access(self) -> None:
        if not self.options["output"]:
            return
        store = open_store(self.options["output"])
        check_preconditions(store)
        self.result["storage"] = {"url": store.url}
        if self.data is not None and self.data.job is not None:
            refuse_other_run(self.options)

    def _check_prompts(self) -> None:
        data, engine = self.data, self.engine
        if data is None or engine is None or self.prompt is None:
            return
        rules = dataclasses.replace(rules_of(engine), max_model_len=self._longest)
        builder = PromptBuilder(
            self.prompt, value_of(WorkerConfig, "run_seed", self.options), rules=rules
        )
        if data.job is not None:
            check_columns(data.job, builder.needed_columns, optional=self.prompt.optional_columns)
        if data.counted is not None:
            for option, names in builder.needed_columns.items():
                data.counted.require(option, names)
            for option, names in self.prompt.optional_columns.items():
                data.counted.require(option, names, in_each=False)
        rows = [row for place in data.sample for row in builder.build(*place)]
        calls = [row.call for row in rows if row.call and row.call.content_type.endswith("json")]
        if self.config.counts_tokens and calls:
            refused = self._measure(calls)
            rows = [
                msgspec.structs.replace(row, failure=row.failure or refused.get(row.key))
                for row in rows
            ]
        failed = [(row.row, row.failure) for row in rows if row.failure]
        codes = Tally(failure.code for _, failure in failed)
        num_media = sum(bool(row.media) for row in rows)
        self.result["sample"] = {"rows": len(rows), "errors": dict(codes), "with_media": num_media}
        self.result["requests"] = [call.body.decode() for call in calls]
        for code, number in codes.items():
            row, failure = next(each for each in failed if each[1].code == code)
            text = (
                f"{number} of {len(rows)} sample rows would be {code}; row {row}: {failure.message}"
            )
            self._problem(ERROR if number == len(rows) else WARNING, "prompts", text)

    @property
    def _longest(self) -> int | None:
        """Most tokens of prompt and answer together; None if they are not known."""
        typed = self.engine.typed_number("max_model_len") if self.engine else None
        return typed or (self.model.max_model_len if self.model else None) or None

    def _measure(self, calls: list[Call]) -> dict[RowKey, Failure]:
        """Measure the lengths of prompts, and warn of those that leave no room for their answers.

        Returns:
            Why the model's chat template refuses a row, for each that it refuses.
        """
        counter = Counter(self.engine if self.model else None)
        lengths, refused = list[int](), dict[RowKey, Failure]()
        for call in calls:
            try:
                lengths.append(counter.count(call))
            except RowError as problem:
                refused[call.key] = problem.as_failure()
        if not lengths:
            return refused
        lengths.sort()
        self.result["lengths"] = {
            "is_estimate": counter.is_estimate,
            "mean": round(sum(lengths) / len(lengths), 1),
            "p95": lengths[-(-len(lengths) * 19 // 20) - 1],
            "longest": lengths[-1],
        }
        most, longest = self.options["max_tokens"] or 0, self._longest
        cut = sum(length + most > longest for length in lengths) if longest else 0
        if cut:
            text = f"{cut} of {len(calls)} sample rows and --max-tokens exceed the model's {longest} tokens"
            self._problem(WARNING, "prompts", text, "lower --max-tokens or raise --max-model-len")
        return refused

    def _ask_for_memory(self) -> None:
        gpu, engine = self.options.get("gpu"), self.engine
        if gpu not in (None, "", "none") and self.model is not None and engine is not None:
            tokens = self.result.get("lengths", {}).get("mean")
            answer = 0 if engine.is_pooling else self.options["max_tokens"] or 512
            found = [memory_on(one, engine, self.model, tokens, answer) for one in gpu.split(",")]
            self.result["memory"] = min(found, key=lambda one: one["cache_tokens"])

    def _estimate(self) -> None:
        rows = self.data.rows if self.data else None
        found = estimate(rows, self.options)
        self.result |= found
        for name in ("cost", "hours"):
            limit, estimated = self.options[f"max_{name}"], found.get("estimate", {}).get(name)
            if limit is not None and estimated is not None and estimated > limit:
                text = f"--max-{name} {limit:g} is below the estimate of {estimated:.4g}"
                self._problem(WARNING, "estimate", text, f"raise --max-{name}, or take fewer rows")


def refuse_other_run(options: dict[str, Any]) -> None:
    """Refuse options with which a worker could not join the run that is there. Reads only, and asks for no price.

    Raises:
        RunMismatch: the run was made with another configuration; the message says what differs.
        BatchinferError: the worker could not start for another reason.
    """
    worker = make_config(options | {"max_cost": None}, dict(os.environ))
    assignment = read_assignment(
        worker.manifests,
        job_url=worker.job,
        limit=worker.limit,
        open_store=open_store,
    )
    outside = real_environment(grace_seconds=0.0, show_progress=lambda _telemetry: None)
    Membership(worker, outside, open_store(worker.output), assignment).check()


# --------------------------------------------------------------------------- sample rows


def _spread(length: int) -> list[int]:
    """Return up to `_PLACES` indices below `length`, spread evenly from the first to the last.

    >>> _spread(2), _spread(1000)[0], _spread(1000)[-1]
    ([0, 1], 0, 999)
    """
    if length <= _PLACES:
        return list(range(length))
    return [index * (length - 1) // (_PLACES - 1) for index in range(_PLACES)]


def _read_chunks(chunks: list[ChunkRef], sample_rows: int, job: Job) -> Data:
    """Take sample rows from the beginnings of some chunks, which are fetched whole."""
    sample = []
    with contextlib.closing(Scratch()) as scratch:
        for ref in (chunks[index] for index in _spread(len(chunks))):
            local = fetch(open_store(ref.root), ref, scratch)
            with local.path.open("rb") as file:
                lines = islice(codec.lines(file), min(-(-sample_rows // _PLACES), ref.rows_to_do))
                rows = [RawRow(index, line) for index, line in enumerate(lines)]
            sample.append((ref.name, ref.first_row, rows))
    return Data(sum(ref.rows_to_do for ref in chunks), len(chunks), sample, job=job)


def _read_sources(config: CheckConfig) -> Data:
    """Count the rows of sources, and take sample rows in the form in which `split` would write them."""
    from batchinfer.split.sources import count_sources

    counted = count_sources(
        config.sources, limit=config.options["limit"], delimiter=config.delimiter
    )
    sample = []
    places = _spread(len(counted.files))
    for index in places:
        # Rows are identified by chunk and line, so each file has a chunk of its own.
        first, lines = counted.head(index, -(-config.sample_rows // len(places)))
        sample.append((f"row-{first}", first, [RawRow(i, line) for i, line in enumerate(lines)]))
    return Data(counted.rows, None, sample, counted=counted)
