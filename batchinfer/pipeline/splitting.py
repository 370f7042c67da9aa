"""Makes the job of a data set for `run` and `launch`, or appends new files of the data set to a job that is there."""

from __future__ import annotations

import logging

import msgspec

from batchinfer.core import units
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


def split_for(sources: list[str], job: str, workers: int, open_store: OpenStore) -> None:
    """Split a data set into a job with a manifest for each of so many workers; see `split_or_append`."""
    counted = count_sources(sources, choice=ColumnChoice(), with_checksums=True)
    counted.check_apart(job)
    split_or_append(
        SplitConfig(sources=sources, output=job, num_workers=workers), counted, open_store
    )
