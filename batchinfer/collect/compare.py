"""`batchinfer compare`: two runs over one job side by side, row by row. Nothing in the runs is changed."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Any

import click
from msgspec import Meta

from batchinfer.cli.config_commands import config_command
from batchinfer.collect.answers import Answers, connect, select, sql_errors, text_of
from batchinfer.core.clock import Clock
from batchinfer.core.errors import InputError
from batchinfer.core.option_help import FIRST, NO_OPTION, Opt
from batchinfer.core.records import Record
from batchinfer.ledger.jobs import OpenStore
from batchinfer.ledger.runs import differing_keys
from batchinfer.storage.scratch import Scratch


class CompareConfig(Record, frozen=True, kw_only=True):
    """Options of `compare`."""

    run_a: Annotated[str, NO_OPTION]
    run_b: Annotated[str, NO_OPTION]
    rows: Annotated[int, Meta(ge=0, le=1000), FIRST] = 10
    """Rows to show of those that differ most: with the fewest words in common."""
    job: Annotated[str | None, Opt(metavar="URL")] = None
    """The job, where the runs do not lead to it."""
    scratch_dir: Annotated[str | None, Opt(form="folder")] = None
    """Local folder for outputs under way."""


def run_compare(config: CompareConfig, *, open_store: OpenStore, clock: Clock) -> dict[str, Any]:
    """Compare two runs over one job. Runs that still go on are compared by what they have done.

    Two rows are the same if both were answered with the same texts, tool calls and numbers.

    Raises:
        InputError: there is no such run, or the runs are of different jobs.
    """
    runs = config.run_a, config.run_b
    found = [select(url, open_store, clock, job_url=config.job) for url in runs]
    targets = [selection.target for selection in found]
    if targets[0].run.config["job_sha256"] != targets[1].run.config["job_sha256"]:
        raise InputError(
            f"{runs[0]} and {runs[1]}: are not runs over one job, so their rows cannot be matched",
            hint="start the second worker with the first one's job and another --output",
        )
    with closing(Scratch(config.scratch_dir)) as scratch, sql_errors("these runs"):
        sql = connect(scratch.folder)
        for name, selection in zip("ab", found, strict=True):
            Answers(sql, selection, scratch, name)
        sql.execute(text_of("compare.sql"))

        def rows(query: str) -> list[dict[str, Any]]:
            return list(sql.sql(query).to_arrow_table().to_pylist())

        sides = {side.pop("run"): side for side in rows("FROM sides")}
        a, b = (target.run.config for target in targets)
        return {
            "job": targets[0].job_url,
            "figures": rows("FROM figures")[0],
            **sides,
            "errors": rows("FROM errors"),
            "settings": [{"name": name, "A": x, "B": y} for name, x, y in differing_keys(a, b)],
            "changes": rows("FROM changes"),
            "differing": rows(f"FROM differing LIMIT {config.rows}"),
        }


def render(found: dict[str, Any]) -> Any:
    """Lay out the comparison as a table that is no wider than its texts."""
    from rich.table import Table
    from rich.text import Text

    from batchinfer.core.printable import printable

    lines: list[tuple[Any, ...]] = [*found["figures"].items()]
    lines += [(name, value, found["B"][name]) for name, value in found["A"].items()]
    for key, title in (
        ("errors", "{error_code}"),
        ("settings", "{name}"),
        ("changes", "{rows:,} rows"),
        ("differing", "row {id}"),
    ):
        lines += [(title.format(**each), each["A"], each["B"]) for each in found[key]]
    table = Table("", "A", "B", box=None)
    for line in lines:
        cells = ("-" if each in (None, "") else each for each in line)
        texts = [f"{each:,.2f}" if isinstance(each, float) else str(each) for each in cells]
        table.add_row(*(Text(printable(each[:160])) for each in texts))
    return table


@config_command("compare", CompareConfig, click.argument("run_a"), click.argument("run_b"))
def command(config: CompareConfig) -> dict[str, Any]:
    """Compare two runs over one job: rows with the same and different answers, failures, lengths.

    Rows that only one run has done count as missing; runs may still go on. The exit status is 0 also where answers
    differ. The last line is everything as JSON.
    """
    from rich.console import Console

    from batchinfer.storage.opening import open_store

    found = run_compare(config, open_store=open_store, clock=Clock())
    Console(stderr=True, highlight=False).print(render(found))
    return found
