"""A run, from which answers can be read."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets
    import pandas as pd
    import polars as pl
    import pyarrow as pa

_SHOWN_ROWS = 3
_ROWS_AT_ONCE = 1024


class RunHandle:
    """A run, from which answers can be read.

    Attributes:
        url: Path or URL of the run.
        result: JSON object that `batchinfer run` printed; empty after `open_run`.
    """

    def __init__(self, url: str, result: dict[str, Any], *, is_partial: bool = False) -> None:
        self.url = url
        self.result = result
        self._is_partial = is_partial

    def __repr__(self) -> str:
        """Show the counts and the first rows of a run that `run` has made; else the run's name."""
        name = f"batchinfer.open_run({self.url!r})"
        if not self.result:
            return name
        counts = f"{self.result['rows']} rows, {self.result.get('rows_error', 0)} failed"
        with self._collected() as file:
            rows = (
                next(file.iter_batches(_SHOWN_ROWS)).to_pylist() if file.metadata.num_rows else []
            )
        shown = [json.dumps(row, ensure_ascii=False, default=str)[:200] for row in rows]
        return "\n".join([f"{name}  # {counts}", *(f"  {line}" for line in shown)])

    def status(self) -> dict[str, Any]:
        """Return the figures of `batchinfer status --json`: state, rows, rates, errors, workers."""
        import msgspec

        from batchinfer.runs.status import RunConfig, run_status

        found: dict[str, Any] = msgspec.to_builtins(
            run_status(RunConfig(run=self.url), **_outside())
        )
        return found

    def verify(self, *, deep: bool = False) -> dict[str, Any]:
        """Check that the run is complete and undamaged, and return the result of `batchinfer verify`.

        Args:
            deep: Read every output, not only its marker.

        Raises:
            errors.RunUnsound: The run is incomplete or damaged; the error's `result` says how.
        """
        from batchinfer.runs.verify import VerifyConfig, run_verify

        verdict = run_verify(VerifyConfig(run=self.url, deep=deep), **_outside())
        if not verdict.is_sound:
            error = verdict.error()
            error.attach_result(verdict.result)
            raise error
        return verdict.result

    def rows(self, *, with_source: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the verified answers in input order, a dictionary each, in bounded memory.

        Args:
            with_source: Join the source's columns.

        Raises:
            errors.RunUnsound: The run is damaged, or is unfinished and not the result of `run` with `limit`.
        """
        with self._collected(with_source=with_source) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                yield from batch.to_pylist()

    def to_arrow(self, *, with_source: bool = False) -> pa.Table:
        """Return the verified answers as one table, in input order, with the columns of `batchinfer collect`.

        Raises as `rows`.
        """
        with self._collected(with_source=with_source) as file:
            return file.read()

    def to_polars(self, *, with_source: bool = False) -> pl.DataFrame:
        """As `to_arrow`, as a frame of polars."""
        import polars as pl

        frame = pl.from_arrow(self.to_arrow(with_source=with_source))
        assert isinstance(frame, pl.DataFrame)
        return frame

    def to_pandas(self, *, with_source: bool = False) -> pd.DataFrame:
        """As `to_arrow`, as a frame of pandas."""
        return self.to_arrow(with_source=with_source).to_pandas()

    def to_dataset(self, *, with_source: bool = False) -> datasets.Dataset:
        """As `to_arrow`, as a `datasets.Dataset`."""
        import datasets

        return datasets.Dataset(self.to_arrow(with_source=with_source))

    @contextmanager
    def _collected(self, *, with_source: bool = False) -> Iterator[Any]:
        """Collect the answers to a temporary parquet file, and give it."""
        import pyarrow.parquet as pq

        from batchinfer.collect.collect_config import CollectConfig
        from batchinfer.collect.collecting import run_collect

        with tempfile.TemporaryDirectory(prefix="batchinfer-") as folder:
            path, partial = f"{folder}/answers.parquet", self._is_partial
            config = CollectConfig(
                run=self.url, dest=path, with_source=with_source, partial=partial
            )
            run_collect(config, **_outside())
            with pq.ParquetFile(path) as file:
                yield file


def _outside() -> dict[str, Any]:
    """Return what the functions of commands take beside their options."""
    from batchinfer.core.clock import SystemClock
    from batchinfer.storage.opening import open_store

    return {"open_store": open_store, "clock": SystemClock()}
