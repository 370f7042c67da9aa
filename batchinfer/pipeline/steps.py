"""The steps of `run`: check, split, generate, collect. Each can be killed, and the same command goes on from there.

Besides DEST they write the work folder: the job into ``job/``, the run into ``run/``, the record `COLLECTING`, which
says that DEST is this command's, and the record `RUNNING` of running.py.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import msgspec

from batchinfer.check.command import run_check
from batchinfer.check.steps import ERROR, CheckConfig, CheckWorld, differences
from batchinfer.cli.run_options import value_of
from batchinfer.collect.command import check_options, run_collect
from batchinfer.collect.destinations import suffix_of
from batchinfer.collect.hub_destination import data_files
from batchinfer.collect.selection import Selection, select
from batchinfer.collect.table import CollectConfig
from batchinfer.core import codec, layout, units
from batchinfer.core.clock import Clock
from batchinfer.core.errors import (
    AlreadyExists,
    BatchinferError,
    ConfigError,
    ErrorRateExceeded,
    InputError,
    ObjectNotFound,
    RunMismatch,
)
from batchinfer.core.records import FORMAT_VERSION, Job, Record
from batchinfer.core.tasks import is_pooling
from batchinfer.engines import find_engine, has_model
from batchinfer.ledger.jobs import OpenStore, chunk_key, load_job, split_name
from batchinfer.pipeline.running import running_alone
from batchinfer.pipeline.sources import recognise
from batchinfer.pipeline.splitting import split_or_append
from batchinfer.split.command import SplitConfig
from batchinfer.split.sources import ColumnChoice, CountedSources, count_sources
from batchinfer.storage.hub_data_set import open_hub
from batchinfer.storage.opening import is_inside, join_url, local_path, split_url
from batchinfer.worker.command import engine_config, prompt_config, sampling_config

logger = logging.getLogger(__name__)

COLLECTING = "collecting.json"
"""Key of the `CollectingRecord` in the work folder."""


class PipelineConfig(Record, frozen=True, kw_only=True):
    """Options of `run` that are not the worker's. `limit` is the number of first rows to answer now."""

    sources: list[str]
    dest: str
    work: str
    limit: int | None = None
    delimiter: str = ""
    format: str = ""
    with_source: bool = False
    explode: bool = False
    is_plain: bool = False
    """Whether prompts of a column are sent as they are, also to a model with a chat template."""


class CollectingRecord(Record, frozen=True, kw_only=True):
    """Content of `COLLECTING`. It is written before DEST: a DEST without it is not this command's."""

    format_version: int
    dest: str
    """DEST. If DEST and the work folder are local, it is a path relative to the work folder: both can be moved
    together."""
    options: dict[str, Any]
    """Options of `PipelineConfig` on which DEST's content depends."""
    rows: int = 0
    """Number of rows at DEST; 0 until DEST is complete."""
    generation: int | msgspec.UnsetType = msgspec.UNSET
    """Generation of the job from which DEST was written. Unset if no data had been appended to it."""


class LookedAt(NamedTuple):
    """Result of `WorkFolder.look`: the sources, and the options with those that are chosen from the data."""

    counted: CountedSources
    options: dict[str, Any]


class WorkFolder:
    """The work folder of one command, and the steps that lead from its sources to DEST."""

    def __init__(self, config: PipelineConfig, open_store: OpenStore, clock: Clock) -> None:
        self.config = config
        self.job_url = join_url(config.work, "job")
        self.run_url = join_url(config.work, "run")
        self._store = open_store(config.work)
        is_hub = config.dest.startswith("hf://")
        self._hub = open_hub(config.dest, is_private=True) if is_hub else None
        self._open_store = open_store
        self._clock = clock

    # -- split

    def look(self, options: dict[str, Any], world: CheckWorld) -> LookedAt:
        """Count the rows of the sources, and choose options by the data. If there is no job yet, check everything.

        Writes nothing, but the check of a run at a URL writes a probe object there and removes it.

        Raises:
            ConfigError: The options and the sources would not work together.
            InputError: The sources cannot be read.
        """
        config = self.config
        choice = ColumnChoice()
        counted = count_sources(
            config.sources, choice=choice, delimiter=config.delimiter, with_checksums=True
        )
        counted.check_apart(config.dest)
        options = options | recognise(counted.columns, options)
        options |= self._as_chat(options, world)
        if load_job(self.job_url, self._open_store) is None:
            self._check(options, world)
        return LookedAt(counted, options)

    def alone(self) -> AbstractContextManager[None]:
        """Keep other `run` commands out of the work folder for the time of a `with` block; see `running_alone`."""
        return running_alone(self._store, self._open_store(self.run_url), self._clock)

    def split(self, counted: CountedSources) -> None:
        """Make the job if there is none. If the sources still have all of its files, append those that it lacks.

        With --limit, the first chunk of a new job ends at the limit, so that its rows can be answered alone.

        Raises:
            InputError: The sources cannot be read, or are not those of the job that is there.
        """
        config, limit = self.config, self.config.limit
        split = SplitConfig(
            sources=config.sources,
            output=self.job_url,
            delimiter=config.delimiter,
            first_rows=limit if limit is not None and limit < counted.rows else None,
        )
        is_there = load_job(self.job_url, self._open_store) is not None
        try:
            split_or_append(split, counted, self._open_store)
        except InputError as error:
            if not is_there:
                raise
            raise InputError(
                error.message, hint=f"name another DEST, or remove {config.work}"
            ) from error

    def _as_chat(self, options: dict[str, Any], world: CheckWorld) -> dict[str, Any]:
        """Return ``as_chat`` as an option if each prompt is to be sent as a user's message, else no option."""
        if options["as_chat"] or not options["prompt_column"] or self.config.is_plain:
            return {}
        reason = "--system-prompt" if options["system_prompt"] else ""
        if find_engine(options["engine"]).is_remote:
            reason = reason or ("" if is_pooling(options["task"]) else "endpoints answer chats")
        if not reason:
            if is_pooling(options["task"]):
                return {}  # such models are trained on plain texts, whatever template they have
            engine = engine_config(options)
            is_new = load_job(self.job_url, self._open_store) is None
            try:
                if is_new and has_model(engine):
                    # If the Hub cannot be reached, this fails at once; the tokenizer's loader tries for a minute.
                    world.describe_model(engine)
                tokenizer = world.load_tokenizer(engine)
            except BatchinferError:
                if is_new:
                    self._check(options, world)  # says all that is wrong, with the model and else
                raise
            if tokenizer is None or not tokenizer.has_chat_template:
                return {}
            reason = "the model has a chat template"
        logger.info(
            "each prompt is sent as a user's message: %s (--plain sends it as it is)", reason
        )
        return {"as_chat": True}

    def _check(self, options: dict[str, Any], world: CheckWorld) -> None:
        result = run_check(self._asked(options), world)
        errors: list[str] = []
        for problem in result["problems"]:
            hint = f" ({problem['hint']})" if problem["hint"] else ""
            message = f"{problem['message']}{hint}"
            if problem["level"] == ERROR:
                errors.append(message)
            else:
                logger.warning("%s", message)
        if errors:
            raise ConfigError(
                f"would not work: {units.many(len(errors), 'problem')}\n" + "\n".join(errors),
                hint="nothing was written",
            )

    def _asked(self, options: dict[str, Any]) -> CheckConfig:
        return CheckConfig(
            sources=self.config.sources,
            delimiter=self.config.delimiter,
            engine=engine_config(options),
            prompt=prompt_config(options),
            sampling=sampling_config(options),
            run_seed=value_of("seed", options),
            output=self.run_url if "://" in self.run_url else "",
            show=0,
        )

    def refuse_other_options(self, options: dict[str, Any]) -> None:
        """Refuse options that would have given other answers than those of the run that is there.

        Raises:
            RunMismatch: The options differ.
        """
        found = differences(self._open_store(self.run_url), self._asked(options), "")
        if found:
            shown = "; ".join(f"{key} ({there} there, {here} here)" for key, there, here in found)
            raise RunMismatch(
                f"{self.config.work}: its rows were answered with another {shown}",
                hint="use the same options, or name another DEST",
            )

    # -- generate

    def check_hub(self) -> None:
        """Make the repository of a DEST on the Hub if it is missing, so that no rows are answered in vain.

        Raises:
            AccessDenied: The token may not write there.
        """
        if self._hub is not None:
            self._hub.prepare()

    def manifest(self) -> str:
        """Return the URL of the manifest of the chunks to answer now. With --limit it may be a new one."""
        found = load_job(self.job_url, self._open_store)
        assert found is not None
        job, limit = found[0], self.config.limit
        if limit is None or limit >= job.rows:
            return join_url(self.job_url, layout.ALL_MANIFEST)
        wanted = [chunk for chunk in job.chunks if chunk.first_row < limit]
        rows = sum(chunk.rows for chunk in wanted)
        if rows != limit:
            logger.warning(
                "--limit %d: the chunks with these rows have %d, and all of them are answered",
                limit,
                rows,
            )
        return self._write_manifest(job, len(wanted), rows)

    def _write_manifest(self, job: Job, count: int, rows: int) -> str:
        store = self._open_store(self.job_url)
        key = f"{layout.MANIFESTS}first-{rows}.txt"
        lines = [f"{chunk_key(job, chunk)}\n" for chunk in job.chunks[:count]]
        store.create(key, "".join(lines).encode())
        return join_url(self.job_url, key)

    def refuse_errors(self, rate: float, *, at_least: int) -> None:
        """Refuse a run in which a larger share of the rows failed than `rate`.

        The worker judges only rows that it has answered since its start, which may be none.

        Args:
            rate: The value of --max-error-rate.
            at_least: Smallest number of failed rows for which a run is refused.

        Raises:
            ErrorRateExceeded: A larger share failed.
        """
        found = self._select()
        failed, done = sum(marker.rows_error for _, marker in found.sound), found.num_rows
        if failed >= at_least and failed > rate * done:
            raise ErrorRateExceeded(
                f"{failed / done:.1%} of {done} rows failed, --max-error-rate allows {rate:.1%}; DEST was not written",
                hint="raise --max-error-rate to take these answers, or answer the failed rows again: --retry-errors",
            )

    def is_answered(self) -> bool:
        """Whether every chunk that this command is to answer is published, with an answer at least.

        Read-only. False if the run cannot be read.
        """
        found, limit = load_job(self.job_url, self._open_store), self.config.limit
        assert found is not None
        wanted = {
            chunk.name for chunk in found[0].chunks if limit is None or chunk.first_row < limit
        }
        try:
            there = self._select().sound
        except BatchinferError:
            return False
        markers = [marker for ref, marker in there if ref.name in wanted]
        return len(markers) == len(wanted) and any(marker.rows_ok for marker in markers)

    def _select(self) -> Selection:
        store = self._open_store(self.run_url)
        return select(store, self._open_store, now=self._clock.now(), job_url=self.job_url)

    # -- collect

    def claim_dest(self) -> int:
        """Check that DEST is free or this command's own. Returns the number of rows at DEST; 0 if it must be written.

        Raises:
            ConfigError: DEST does not fit its options or the work folder.
            InputError: DEST cannot be made, or something else is there.
        """
        check_options(self._collection())
        self._check_place()
        record = self._record()
        if record is not None and record.dest in (self._dest_from_work(), self.config.dest):
            is_same = record.options == self._options() and self._is_there()
            return record.rows if is_same else 0
        if self._is_there():
            raise InputError(
                f"{self.config.dest}: is there already, and no work of this command is at {self.config.work}",
                hint="name another DEST, or move away what is there",
            )
        return 0

    def _check_place(self) -> None:
        """Refuse a DEST that is a source, is in the job or the run, holds the work folder, or cannot be made."""
        dest, work = self.config.dest, self.config.work
        if any(
            is_inside(source, dest) and is_inside(dest, source) for source in self.config.sources
        ):
            raise ConfigError(
                f"--output {dest}: is a source, expected a place for the answers",
                hint="name another file or folder",
            )
        inside = [place for place in (self.job_url, self.run_url) if is_inside(dest, place)]
        if inside or is_inside(work, dest):
            raise ConfigError(
                f"{dest}: is not apart from the work at {work}", hint="name another DEST or --work"
            )
        if split_url(dest)[0] != "file":
            return
        path = local_path(dest).absolute()
        folder = path.parent if suffix_of(dest) else path
        nearest = next(place for place in (folder, *folder.parents) if place.exists())
        problem = ""
        if not nearest.is_dir():
            problem = f"{nearest} is no folder"
        elif not os.access(nearest, os.W_OK):
            problem = f"{nearest} cannot be written to"
        elif path != folder and path.is_dir():
            problem = "a folder has this name"
        if problem:
            raise InputError(
                f"{dest}: cannot be made: {problem}",
                hint="name another DEST; - writes to standard output",
            )

    def _dest_from_work(self) -> str:
        """Return DEST as `CollectingRecord` has it."""
        dest, work = self.config.dest, self.config.work
        if split_url(dest)[0] != "file":
            return dest
        if split_url(work)[0] != "file":
            return os.path.normpath(local_path(dest))
        return os.path.relpath(local_path(dest).resolve(), local_path(work).resolve())

    def is_current(self) -> bool:
        """Whether DEST was written from the job as it is now, with all appended data."""
        record = self._record()
        return record is not None and (record.generation or 0) == self._generation()

    def _generation(self) -> int:
        found = load_job(self.job_url, self._open_store)
        return (found[0].generation or 0) if found is not None else 0

    def collect(self) -> dict[str, Any]:
        """Write DEST from the run, and return the result of `collect`."""
        self._put_record(0)
        result = run_collect(self._collection(), open_store=self._open_store, clock=self._clock)
        self._put_record(result["rows"])
        return result

    def _collection(self) -> CollectConfig:
        config = self.config
        return CollectConfig(
            run=self.run_url,
            dest=config.dest,
            format=config.format,
            with_source=config.with_source,
            explode=config.explode,
            partial=config.limit is not None,
            overwrite=True,
        )

    def _options(self) -> dict[str, Any]:
        config = self.config
        return {
            name: getattr(config, name) for name in ("limit", "format", "with_source", "explode")
        }

    def _is_there(self) -> bool:
        if self._hub is not None:
            found = self._hub.look()
            return found is not None and bool(data_files(found))
        if not suffix_of(self.config.dest):
            return any(True for _ in self._open_store(self.config.dest).list(""))
        folder, name = split_name(self.config.dest)
        try:
            self._open_store(folder).stat(name)
        except ObjectNotFound:
            return False
        return True

    def _record(self) -> CollectingRecord | None:
        try:
            data = self._store.get(COLLECTING).data
        except ObjectNotFound:
            return None
        return codec.decode(data, CollectingRecord, name=COLLECTING)

    def _put_record(self, rows: int) -> None:
        record = CollectingRecord(
            format_version=FORMAT_VERSION,
            dest=self._dest_from_work(),
            options=self._options(),
            rows=rows,
            generation=self._generation() or msgspec.UNSET,
        )
        data = codec.encode_pretty(record)
        try:
            self._store.create(COLLECTING, data)
        except AlreadyExists:
            self._store.replace(COLLECTING, data, self._store.stat(COLLECTING).etag)
