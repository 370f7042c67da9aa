"""What to collect, from where, and in which form."""

from __future__ import annotations

from typing import Annotated, Literal

from batchinfer.core.errors import ConfigError
from batchinfer.core.option_help import FIRST, NO_OPTION, Count, Opt
from batchinfer.core.records import Record

TABLES = {"parquet": ".parquet", "jsonl": ".jsonl", "csv": ".csv"}
"""Forms of a table, with the endings of their files' names."""
FORMATS = TABLES | {"openai-batch": ".jsonl", "completions": ".jsonl", "lines": ".jsonl"}
"""Every form. Those beside the tables have one JSON object a row, made of the output line (see table_files.py)."""
_OTHER_FILES = (".json", ".ndjson", ".txt", ".tsv", ".pq", ".arrow", ".xlsx", ".gz", ".zst", ".zip")
"""Endings of names that look like files, but that `collect` does not write."""


Form = Literal["parquet", "jsonl", "csv", "openai-batch", "completions", "lines"]


class CollectConfig(Record, frozen=True, kw_only=True):
    """Options of `collect`."""

    run: Annotated[str, NO_OPTION]
    dest: Annotated[str, NO_OPTION]
    where: Annotated[str, Opt(metavar="SQL", is_first=True)] = ""
    """Only rows that fulfil a condition over the table's columns, such as 'error_code IS NOT NULL'."""
    sample: Annotated[Count | None, FIRST] = None
    """Only N rows, drawn at random from those that --where leaves."""
    seed: int = 0
    """Other numbers draw other rows."""
    format: Annotated[Form | None, FIRST] = None
    """lines: the output lines byte for byte. Default: by DEST's ending, else parquet."""
    with_source: Annotated[bool, FIRST] = False
    """Join the source's columns: from parquet files that are there unchanged, else from the job's chunks."""
    columns: Annotated[list[str], Opt(form="names", metavar="A,B")] = []
    """With --with-source: only these columns of it."""
    answer_json: bool | None = None
    """Columns answer_… of answers that are JSON. Default: where the run asks the model for JSON."""
    shard_rows: Count = 100_000
    """Rows a file, where DEST is a folder."""
    partial: Annotated[bool, FIRST] = False
    """Collect what there is of an unfinished run."""
    overwrite: Annotated[bool, FIRST] = False
    """Replace what an earlier collect left at DEST."""
    is_public: Annotated[bool, Opt(flag="--public")] = False
    """Everybody sees the data set, if it is made on the Hub."""
    job: Annotated[str | None, Opt(metavar="URL")] = None
    """The job, where run.json and the run's place do not tell."""
    scratch_dir: Annotated[str | None, Opt(form="folder")] = None
    """Local folder for files under way."""

    @property
    def kind(self) -> str:
        """The form to write, a key of FORMATS."""
        return self.format or suffix_of(self.dest).removeprefix(".") or "parquet"


def suffix_of(dest: str) -> str:
    """The file ending of a destination that is one file; empty if the destination is a folder or on the Hub.

    >>> (
    ...     suffix_of("out/answers.csv"),
    ...     suffix_of("s3://bucket/answers"),
    ...     suffix_of("hf://datasets/a/b.csv"),
    ... )
    ('.csv', '', '')
    """
    if dest.startswith("hf://"):
        return ""
    return next((suffix for suffix in TABLES.values() if dest.lower().endswith(suffix)), "")


def check_options(config: CollectConfig) -> None:
    """Check that the options fit together.

    Raises:
        ConfigError: The options contradict each other, or do not fit DEST.
    """
    suffix, is_table = suffix_of(config.dest), config.kind in TABLES
    is_hub = config.dest.startswith("hf://")
    form = f"--format {config.kind}"
    problem = hint = ""
    if not (config.run and config.dest):
        problem, hint = "RUN, DEST: one is empty", "an unset variable of the shell?"
    elif not suffix and not is_hub and config.dest.lower().endswith(_OTHER_FILES):
        problem = f"{config.dest}: is named like a file, expected a name in {', '.join(TABLES.values())}, or a folder"
        hint = "for JSON Lines: answers.jsonl"
    elif suffix and FORMATS[config.kind] != suffix:
        problem, hint = f"{form}: but DEST is named {config.dest}", "name a folder"
    elif is_hub and not is_table:
        problem, hint = f"{form}: {config.dest} takes a table", "leave --format out"
    elif config.columns and not config.with_source:
        problem, hint = "--columns: needs --with-source", "add --with-source"
    elif config.with_source and not is_table:
        problem = f"--with-source: {form} has no columns of the source"
        hint = "choose parquet, jsonl or csv, or leave it out"
    if problem:
        raise ConfigError(problem, hint=hint)
