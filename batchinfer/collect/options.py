"""What to collect, from where, and in which form."""

from __future__ import annotations

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Record

SHARD_ROWS = 100_000
TABLES = {"parquet": ".parquet", "jsonl": ".jsonl", "csv": ".csv"}
"""Forms of a table, with the endings of their files' names."""
FORMATS = TABLES | {"openai-batch": ".jsonl", "completions": ".jsonl", "lines": ".jsonl"}
"""Every form. Those beside the tables have one JSON object a row, made of the output line (see line_formats.py)."""
_OTHER_FILES = (".json", ".ndjson", ".txt", ".tsv", ".pq", ".arrow", ".xlsx", ".gz", ".zst", ".zip")
"""Endings of names that look like files, but that `collect` does not write."""


class CollectConfig(Record, frozen=True, kw_only=True):
    """Options of `collect`. If `format` is empty, DEST's ending decides; without an ending the format is parquet."""

    run: str
    dest: str
    format: str = ""
    where: str = ""
    """SQL condition over the table's columns; empty takes every row."""
    sample: int | None = None
    """Number of rows to draw from those that fulfil the condition; None takes them all."""
    seed: int = 0
    with_source: bool = False
    columns: list[str] | None = None
    """Columns of the source to join; None for all."""
    answer_json: bool | None = None
    """Whether answers are parsed as JSON; None: where the run asks the model for JSON."""
    shard_rows: int = SHARD_ROWS
    partial: bool = False
    overwrite: bool = False
    is_private: bool = True
    job: str | None = None
    scratch_dir: str | None = None

    @property
    def kind(self) -> str:
        """The form to write, a key of FORMATS."""
        suffix = suffix_of(self.dest)
        by_name = next((name for name, ending in TABLES.items() if ending == suffix), "parquet")
        return self.format or by_name


def suffix_of(dest: str) -> str:
    """The file ending of a destination that is one file; empty if the destination is a folder.

    >>> suffix_of("out/answers.csv"), suffix_of("s3://bucket/answers")
    ('.csv', '')
    """
    return next((suffix for suffix in TABLES.values() if dest.lower().endswith(suffix)), "")


def check_options(config: CollectConfig) -> None:
    """Check that the options fit together.

    Raises:
        ConfigError: The options contradict each other, or do not fit DEST.
    """
    suffix, is_table = suffix_of(config.dest), config.kind in TABLES
    if not suffix and config.dest.lower().endswith(_OTHER_FILES):
        raise ConfigError(
            f"{config.dest}: is named like a file, expected a name in {', '.join(TABLES.values())}, or a folder",
            hint="for JSON Lines: answers.jsonl",
        )
    if suffix and FORMATS[config.kind] != suffix:
        raise ConfigError(
            f"--format {config.format}: but DEST is named {config.dest}",
            hint="leave --format out, or name a folder",
        )
    if config.dest.startswith("hf://") and not is_table:
        raise ConfigError(
            f"--format {config.format}: {config.dest} takes a table", hint="leave --format out"
        )
    if config.columns is not None and not config.with_source:
        raise ConfigError("--columns: needs --with-source", hint="add --with-source")
    if config.with_source and not is_table:
        raise ConfigError(
            f"--with-source: --format {config.kind} has no columns of the source",
            hint="choose parquet, jsonl or csv, or leave it out",
        )
