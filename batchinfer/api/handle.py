"""A run, from which answers can be read."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from batchinfer.core.errors import ConfigError

if TYPE_CHECKING:
    import datasets
    import pandas as pd
    import polars as pl
    import pyarrow as pa

_ROWS_AT_ONCE = 1024


class Selection(TypedDict, total=False):
    """Which rows and columns of a run's answers."""

    with_source: bool
    """Join the source's columns."""
    where: str
    """Only rows that fulfil a condition of SQL, such as "error_code IS NULL"."""
    columns: Sequence[str] | Mapping[str, str] | None
    """Only these columns of the whole table. {"summary": "text"} gives its column `text` the name `summary`."""


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
        """Show the run's name, and the counts of one that `run` has made. Reads nothing."""
        name = f"batchinfer.open_run({self.url!r})"
        if not self.result:
            return name
        return f"{name}  # {self.result.get('rows')} rows, {self.result.get('rows_error')} failed"

    def status(self) -> dict[str, Any]:
        """Return the figures of `batchinfer status --json`: state, rows, rates, errors, workers."""
        import msgspec

        from batchinfer.runs.status import RunConfig, run_status

        seen = run_status(RunConfig(run=self.url), **_outside())
        return dict(msgspec.to_builtins(seen))

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

    def rows(self, **selection: Unpack[Selection]) -> Iterator[dict[str, Any]]:
        """As `to_arrow`, a dictionary a row, in bounded memory."""
        with self._collected(**selection) as (file, names):
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=list(names.values())):
                yield from _named(batch, names).to_pylist()

    def to_arrow(self, **selection: Unpack[Selection]) -> pa.Table:
        """Return the verified answers as one table, in input order, with the columns of `batchinfer collect`.

        Args:
            selection: Which rows and columns, as `Selection` says.

        Raises:
            errors.RunUnsound: The run is damaged, or is unfinished and not the result of `run` with `limit`.
            errors.UsageError: The condition or a column is wrong.
        """
        with self._collected(**selection) as (file, names):
            return _named(file.read(list(names.values())), names)

    def to_polars(self, **selection: Unpack[Selection]) -> pl.DataFrame:
        """As `to_arrow`, as a frame of polars."""
        import polars as pl

        return pl.DataFrame(self.to_arrow(**selection))

    def to_pandas(self, **selection: Unpack[Selection]) -> pd.DataFrame:
        """As `to_arrow`, as a frame of pandas."""
        if importlib.util.find_spec("pandas") is None:
            hint = "pip install pandas, or read with .rows(), .to_arrow() or .to_polars()"
            raise ConfigError("pandas is not installed", hint=hint)
        return self.to_arrow(**selection).to_pandas()

    def to_dataset(self, **selection: Unpack[Selection]) -> datasets.Dataset:
        """As `to_arrow`, as a `datasets.Dataset`."""
        import datasets

        return datasets.Dataset(self.to_arrow(**selection))

    @contextmanager
    def _collected(
        self,
        *,
        with_source: bool = False,
        where: str = "",
        columns: Sequence[str] | Mapping[str, str] | None = None,
    ) -> Iterator[tuple[Any, Mapping[str, str]]]:
        """Collect the answers to a temporary parquet file, and give it with the names of its wanted columns."""
        import pyarrow.parquet as pq

        from batchinfer.collect.collect_config import CollectConfig
        from batchinfer.collect.collecting import run_collect

        with tempfile.TemporaryDirectory(prefix="batchinfer-") as folder:
            config = CollectConfig(
                run=self.url,
                dest=f"{folder}/answers.parquet",
                with_source=with_source,
                where=where,
                partial=self._is_partial,
            )
            run_collect(config, **_outside())
            with pq.ParquetFile(config.dest) as file:
                there = file.schema_arrow.names
                wanted = columns or there
                wanted = [wanted] if isinstance(wanted, str) else wanted
                names = wanted if isinstance(wanted, Mapping) else {name: name for name in wanted}
                if missing := set(names.values()) - set(there):
                    raise ConfigError(
                        f"columns: no {', '.join(sorted(missing))}",
                        hint=f"there are {', '.join(there)}",
                    )
                yield file, names


def _named(table: Any, names: Mapping[str, str]) -> Any:
    return table.select(list(names.values())).rename_columns(list(names))


def _outside() -> dict[str, Any]:
    """Return what the functions of commands take beside their options."""
    from batchinfer.core.clock import Clock
    from batchinfer.storage.opening import open_store

    return {"open_store": open_store, "clock": Clock()}
