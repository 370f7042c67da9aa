"""Makes the job of a data set for `run` and `launch`, or appends new files of the data set to a job that is there."""

from __future__ import annotations

import msgspec

from batchinfer.ledger.jobs import OpenStore, load_job
from batchinfer.split.append import is_part_of
from batchinfer.split.command import SplitConfig, run_split
from batchinfer.split.sources import Sources, count_sources


def split_or_append(config: SplitConfig, counted: Sources, open_store: OpenStore) -> None:
    """Make the job if there is none. If the sources have all of its files and others, append those.

    A job that is there keeps its number of manifests. After a kill, the same call goes on.

    Raises:
        InputError: The sources cannot be read, or are not those of the job that is there. Nothing was changed then.
    """
    found = load_job(config.output, open_store)
    if found is not None:
        grows = is_part_of(found[0], counted)
        config = msgspec.structs.replace(
            config, num_workers=found[0].num_workers, append=grows, border=0
        )
    run_split(config, store=open_store(config.output), counted=counted)


def split_for(sources: list[str], job: str, workers: int, open_store: OpenStore) -> None:
    """Split a data set into a job with a manifest for each of so many workers; see `split_or_append`."""
    config = SplitConfig(sources=sources, output=job, num_workers=workers)
    split_or_append(config, count_sources(sources), open_store)
