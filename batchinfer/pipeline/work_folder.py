"""The steps of `run`: check, split, generate, collect. Each can be killed, and the same command goes on from there.

Besides DEST they write the work folder: the job into ``job/``, the run into ``run/``, and the record `COLLECTING`,
which says that DEST is this command's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from pathlib import Path
from typing import Any

from batchinfer.check.examination import ERROR, CheckConfig, Examination
from batchinfer.check.model import has_chat_template
from batchinfer.collect.answers import select
from batchinfer.collect.collect_config import CollectConfig, check_options, suffix_of
from batchinfer.collect.collecting import run_collect
from batchinfer.collect.destinations import HubDestination
from batchinfer.core import codec, layout, units
from batchinfer.core.clock import Clock
from batchinfer.core.errors import (
    AlreadyExists,
    BatchinferError,
    ConfigError,
    ErrorRateExceeded,
    InputError,
    ObjectNotFound,
)
from batchinfer.core.records import FORMAT_VERSION, Job, Marker, Record
from batchinfer.core.tasks import GENERATE
from batchinfer.engines import create_engine, is_remote
from batchinfer.ledger.jobs import ChunkRef, OpenStore, chunk_key, load_job, split_name
from batchinfer.pipeline.pipes import recognise
from batchinfer.pipeline.run import PipelineConfig
from batchinfer.split.sources import Sources, count_sources
from batchinfer.split.splitting import SplitConfig, run_split
from batchinfer.storage.opening import is_inside, join_url, local_path, split_url
from batchinfer.worker.command import engine_config

logger = logging.getLogger(__name__)

COLLECTING = "collecting.json"
"""Key of the `CollectingRecord` in the work folder."""


class CollectingRecord(Record, frozen=True, kw_only=True):
    """Content of `COLLECTING`. It is written before DEST: a DEST without it is not this command's."""

    format_version: int
    dest: str
    """DEST; if it is local and the work folder too, relative to the work folder, so that both can be moved together."""
    options: dict[str, Any]
    """Options on which DEST's content depends, and the generation of the job."""
    rows: int = 0
    """Number of rows at DEST; 0 until DEST is complete."""
    rows_error: int = 0
    """Number of those that failed."""
    bytes: int = 0
    """Size of all files at DEST then."""


class WorkFolder:
    """The work folder of one command, and the steps that lead from its sources to DEST."""

    def __init__(self, config: PipelineConfig, open_store: OpenStore, clock: Clock) -> None:
        self.config = config
        self.job_url = join_url(config.work, "job")
        self.run_url = join_url(config.work, "run")
        self._store = open_store(config.work)
        self._open_store = open_store
        self._clock = clock

    @property
    def folder(self) -> Path | None:
        """The work folder on this machine; None if it is in a bucket."""
        work = self.config.work
        return local_path(work) if split_url(work)[0] == "file" else None

    def _job(self) -> Job | None:
        found = load_job(self.job_url, self._open_store)
        return found[0] if found else None

    # -- split

    def look(self, options: dict[str, Any]) -> tuple[Sources, dict[str, Any]]:
        """Count the rows of the sources, and choose options by the data. If there is no job yet, check everything.

        Returns:
            The sources, and the options with those that were chosen.

        Raises:
            ConfigError: the options and the sources would not work together.
            InputError: the sources cannot be read.
        """
        config = self.config
        counted = count_sources(config.sources, delimiter=config.delimiter)
        counted.check_apart(config.dest)
        options = options | recognise(counted.columns, options)
        try:
            options |= self._as_chat(options)
        except BatchinferError:
            self._check(options)  # says all that is wrong, with the model and else
            raise
        if self._job() is None:
            self._check(options)
        return counted, options

    def _as_chat(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return ``as_chat`` as an option if each prompt is to be sent as a user's message, else no option."""
        is_asked = options["as_chat"] or self.config.is_plain or not options["prompt_column"]
        if is_asked or options["task"] != GENERATE:
            return {}
        engine = engine_config(options)
        reason = "--system-prompt" if options["system_prompt"] else ""
        if not reason and has_chat_template(engine):
            reason = f"{'an endpoint answers' if is_remote(engine) else 'the model has a template for'} chats"
        if not reason:
            return {}
        logger.info(
            "each prompt is sent as a user's message: %s (--plain sends it as it is)", reason
        )
        return {"as_chat": True}

    def _check(self, options: dict[str, Any]) -> None:
        """Refuse options that would not work, with all problems at once."""
        output = self.run_url if self.folder is None else ""
        given = options | {"job": None, "manifests": (), "limit": None, "output": output}
        asked = CheckConfig(
            options=given,
            sources=self.config.sources,
            delimiter=self.config.delimiter,
            counts_tokens=False,
        )
        errors = []
        for problem in Examination(asked).run()["problems"]:
            hint = f" ({problem['hint']})" if problem["hint"] else ""
            if problem["level"] == ERROR:
                errors.append(f"{problem['message']}{hint}")
            else:
                logger.warning("%s%s", problem["message"], hint)
        if errors:
            raise ConfigError(
                f"would not work: {units.many(len(errors), 'problem')}\n" + "\n".join(errors),
                hint="nothing was written",
            )
        create_engine(engine_config(options))  # refuses what is not installed here

    def split(self, counted: Sources) -> None:
        """Make the job if there is none. If the sources still have all of its files, append those that it lacks.

        With --limit, a chunk of a new job ends at the limit, so that these rows can be answered alone.

        Raises:
            InputError: the sources are not those of the job that is there.
        """
        config, limit, job = self.config, self.config.limit, self._job()
        split = SplitConfig(
            sources=config.sources,
            output=self.job_url,
            delimiter=config.delimiter,
            border=limit if job is None and limit is not None and limit < counted.rows else 0,
            append=job is not None and counted.extend(job),
        )
        try:
            run_split(split, store=self._open_store(self.job_url), counted=counted)
        except InputError as error:
            if job is not None and "--" in error.hint:  # it names options of `split`
                error.hint = f"name another DEST, or remove {config.work}"
            raise

    # -- generate

    def prepare_dest(self) -> None:
        """See that DEST can be written, so that no rows are answered in vain. A repository on the Hub is made.

        Raises:
            AccessDenied: the token or the credentials do not allow writing there.
        """
        dest = self.config.dest
        if dest.startswith("hf://"):
            HubDestination(self._collection()).make()
        elif split_url(dest)[0] != "file":
            store = self._open_store(split_name(dest)[0] if suffix_of(dest) else dest)
            store.create(key := f"_probe-{secrets.token_hex(8)}", b"run: may DEST be written\n")
            store.delete([key])

    def asked_of_worker(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return a worker's options for this work folder. With --limit, a manifest of the first chunks is written."""
        job, limit = self._job(), self.config.limit
        assert job is not None
        key = layout.ALL_MANIFEST
        if limit is not None and limit < job.rows:
            wanted = [chunk for chunk in job.chunks if chunk.first_row < limit]
            rows = sum(chunk.rows for chunk in wanted)
            if rows != limit:
                text = (
                    "--limit %d: the chunks with these rows have %d, and all of them are answered"
                )
                logger.warning(text, limit, rows)
            key = f"{layout.MANIFESTS}first-{rows}.txt"
            lines = [f"{chunk_key(job, chunk)}\n" for chunk in wanted]
            self._open_store(self.job_url).create(key, "".join(lines).encode())
        places = {"job": self.job_url, "output": self.run_url}
        manifest = join_url(self.job_url, key)
        return options | places | {"manifests": (manifest,), "limit": None}

    def refuse_errors(self, rate: float, *, at_least: int) -> None:
        """Refuse a run in which a larger share of the rows failed than `rate`: earlier starts count, too.

        Raises:
            ErrorRateExceeded: a larger share failed, and `at_least` so many.
        """
        markers = [marker for _, marker in self._sound()]
        failed = sum(marker.rows_error for marker in markers)
        done = failed + sum(marker.rows_ok for marker in markers)
        if failed >= at_least and failed > rate * done:
            raise ErrorRateExceeded(
                f"{failed / done:.1%} of {done} rows failed, --max-error-rate allows {rate:.1%}; DEST was not written",
                hint="raise --max-error-rate to take these answers, or answer the failed rows again: --retry-errors",
            )

    def is_answered(self) -> bool:
        """Whether every chunk that this command is to answer is done, and one of them has an answer."""
        job, limit = self._job(), self.config.limit
        assert job is not None
        wanted = {chunk.name for chunk in job.chunks if limit is None or chunk.first_row < limit}
        done: dict[str, Marker] = {}
        with contextlib.suppress(BatchinferError):  # no run.json, for example
            done = {ref.name: marker for ref, marker in self._sound()}
        return wanted <= done.keys() and any(marker.rows_ok for marker in done.values())

    def _sound(self) -> list[tuple[ChunkRef, Marker]]:
        """Return the chunks that are done, with their markers."""
        return select(self.run_url, self._open_store, self._clock, job_url=self.job_url).sound

    # -- collect

    def claim_dest(self) -> CollectingRecord | None:
        """Check that DEST is free or this command's own. Returns the record of DEST; None if it must be written.

        Raises:
            ConfigError: DEST is in the work folder or a source, or can only be read.
            InputError: DEST cannot be made, or something else is there, or it was changed since.
        """
        config, record = self.config, self._record()
        check_options(self._collection())
        self._check_place()
        if record is not None and record.dest in (self._dest_from_work(), config.dest):
            there, left = self._bytes_there(), record.bytes
            if there is None or not record.rows:
                return None
            # To a folder, others may have added files.
            if there < left or (there > left and suffix_of(config.dest)):
                raise InputError(
                    f"{config.dest}: has {there:,} bytes, and this command left {left:,}",
                    hint="move away what is there, and the same command writes the answers again",
                )
            return record if record.options == self._options() else None
        if self._bytes_there() is not None:
            raise InputError(
                f"{config.dest}: is there already, and no work of this command is at {config.work}",
                hint="name another DEST, or move away what is there",
            )
        return None

    def _check_place(self) -> None:
        """Refuse a DEST that is a source, is in the job or the run, holds the work folder, or cannot be made."""
        dest, work = self.config.dest, self.config.work
        if any(is_inside(each, dest) and is_inside(dest, each) for each in self.config.sources):
            raise ConfigError(f"--output {dest}: is a source", hint="name another file or folder")
        inside = [each for each in (self.job_url, self.run_url) if is_inside(dest, each)]
        if inside or is_inside(work, dest):
            raise ConfigError(
                f"--output {dest}: is not apart from the work at {work}",
                hint="name another DEST or --work",
            )
        if split_url(dest)[0] != "file":
            return
        path = local_path(dest).absolute()
        folder = path.parent if suffix_of(dest) else path
        nearest = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
        problem = "" if os.access(nearest, os.W_OK) else f"{nearest} cannot be written to"
        if not nearest.is_dir():
            problem = f"{nearest} is no folder"
        elif path != folder and path.is_dir():
            problem = "a folder has this name"
        elif path != folder and path.name.startswith("."):
            problem = "its name starts with a dot"
        if problem:
            raise InputError(f"{dest}: cannot be made: {problem}", hint="name another DEST")

    def _dest_from_work(self) -> str:
        """Return DEST as `CollectingRecord` has it."""
        dest = self.config.dest
        if split_url(dest)[0] != "file":
            return dest
        start = self.folder.resolve() if self.folder else Path()
        return os.path.relpath(os.path.realpath(local_path(dest)), start)

    def _bytes_there(self) -> int | None:
        """Return the size of what is at DEST; None if nothing is there."""
        dest = self.config.dest
        if dest.startswith("hf://"):
            return None  # `collect` refuses other data there
        if not suffix_of(dest):
            sizes = [info.bytes for info in self._open_store(dest).list("")]
            return sum(sizes) if sizes else None
        folder, name = split_name(dest)
        try:
            return self._open_store(folder).stat(name).bytes
        except ObjectNotFound:
            return None

    def collect(self) -> dict[str, Any]:
        """Write DEST from the run, and return the result of `collect`."""
        self._put_record(0, 0)
        result = run_collect(self._collection(), open_store=self._open_store, clock=self._clock)
        self._put_record(result["rows"], result["rows_error"])
        return result

    def _collection(self) -> CollectConfig:
        config = self.config
        return CollectConfig(
            run=self.run_url,
            dest=config.dest,
            format=config.format,
            with_source=config.with_source,
            partial=config.limit is not None,
            overwrite=True,
        )

    def _options(self) -> dict[str, Any]:
        names = ("limit", "format", "with_source")
        job = self._job()
        generation = job.generation if job else 0
        return {name: getattr(self.config, name) for name in names} | {"generation": generation}

    def _record(self) -> CollectingRecord | None:
        try:
            data = self._store.get(COLLECTING).data
        except ObjectNotFound:
            return None
        name = join_url(self.config.work, COLLECTING)
        hint = f"remove it, and {self.config.dest} if that is there"
        return codec.decode(data, CollectingRecord, name=name, hint=hint)

    def _put_record(self, rows: int, rows_error: int) -> None:
        record = CollectingRecord(
            format_version=FORMAT_VERSION,
            dest=self._dest_from_work(),
            options=self._options(),
            rows=rows,
            rows_error=rows_error,
            bytes=(self._bytes_there() or 0) if rows else 0,
        )
        data = codec.encode_pretty(record)
        try:
            self._store.create(COLLECTING, data)
        except AlreadyExists:
            self._store.replace(COLLECTING, data, self._store.stat(COLLECTING).etag)
