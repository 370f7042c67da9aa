"""Makes the job of a data set for `run` and `launch`, or appends new files of the data set to a job that is there."""

from __future__ import annotations

import logging

import msgspec

from batchinfer.core import units
from batchinfer.core.records import Job
from batchinfer.ledger.jobs import OpenStore, load_job
from batchinfer.split.append import (
    complete_manifests,
    has_files_of,
    new_files,
    refuse_other_columns,
)
from batchinfer.split.command import SplitConfig, run_split
from batchinfer.split.sources import ColumnChoice, CountedSources, count_sources

logger = logging.getLogger(__name__)


def split_or_append(config: SplitConfig, counted: CountedSources, open_store: OpenStore) -> None:
    """Make the job if there is none. If the sources still have all of its files, append those that it lacks.

    A job that is there keeps its number of manifests. After a kill, the same call goes on.

    Raises:
        InputError: The sources cannot be read, or are not those of the job that is there. Nothing was changed then.
    """
    found = load_job(config.output, open_store)
    store = open_store(config.output)
    if found is not None:
        config = msgspec.structs.replace(config, num_workers=found[0].num_workers)
        if has_files_of(found[0], counted):
            new = new_files(counted, found[0])
            if new.rows:
                logger.info(
                    "%s of new files: appended to the %d that are there",
                    *(units.many(new.rows, "row"), found[0].rows),
                )
                config = msgspec.structs.replace(config, append=True, first_rows=None)
            elif found[0].appends:
                refuse_other_columns(found[0], counted)
                complete_manifests(store)
                return
    run_split(config, store=store)


class DataSet:
    """A data set that is launched in place of a job: read and checked first, split when all else was checked.

    Args:
        sources: Files, folders, globs or URLs.
        job: URL of the place for its job.
        open_store: Opens the store of that place.

    Raises:
        InputError: The sources cannot be read, or the job's place is not apart from them.
    """

    def __init__(self, sources: list[str], job: str, open_store: OpenStore) -> None:
        self.sources = sources
        self.counted = count_sources(sources, choice=ColumnChoice(), with_checksums=True)
        self.counted.check_apart(job)
        self._job = job
        self._open_store = open_store

    def has_new_rows(self, job: Job) -> bool:
        """Whether the data set has files with rows that its job lacks."""
        return has_files_of(job, self.counted) and new_files(self.counted, job).rows > 0

    def refuse_other_job(self, job: Job) -> None:
        """Raise InputError if the job at the place was made of another data set. Changes nothing."""
        if not has_files_of(job, self.counted):
            # A job is there, so this raises, or does nothing.
            run_split(self._config(job.num_workers), store=self._open_store(self._job))
        elif job.appends and not self.has_new_rows(job):
            refuse_other_columns(job, self.counted)

    def split(self, workers: int) -> None:
        """Make the job with a manifest for each of so many workers; see `split_or_append`."""
        split_or_append(self._config(workers), self.counted, self._open_store)

    def _config(self, workers: int) -> SplitConfig:
        return SplitConfig(sources=self.sources, output=self._job, num_workers=workers)
