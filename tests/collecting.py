"""`collect` for tests: called here, its table read back."""

from pathlib import Path
from typing import Any

from batchinfer.collect.collect_config import CollectConfig
from batchinfer.collect.collecting import run_collect
from batchinfer.core.clock import Clock
from batchinfer.storage.opening import open_store


def collect(run: str | Path, dest: str | Path, **options: Any) -> dict[str, Any]:
    """Run `batchinfer collect` in this process, and return its result."""
    config = CollectConfig(run=str(run), dest=str(dest), **options)
    return run_collect(config, open_store=open_store, clock=Clock())


def table_of(run: str | Path, folder: Path, **options: Any) -> Any:
    """Return the table of a run as an Arrow table, from parquet files of a few rows each."""
    import pyarrow as pa
    from pyarrow import parquet

    dest = folder / f"table-{len(list(folder.iterdir()))}"
    collect(run, dest, **{"shard_rows": 7, **options})
    return pa.concat_tables(parquet.read_table(path) for path in sorted(dest.glob("*.parquet")))
