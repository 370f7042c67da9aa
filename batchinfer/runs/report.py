"""`batchinfer report`: write one HTML page about a run, finished or not. The page needs no other files.

Texts from the bucket may be hostile. Jinja escapes them. The page's content security policy also forbids scripts
and requests, so no script could run even if a text were not escaped.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import math
from collections import ChainMap
from collections.abc import Sequence
from contextlib import closing
from itertools import accumulate
from typing import Annotated, Any

from msgspec import Meta

from batchinfer import __version__
from batchinfer.cli.config_commands import config_command
from batchinfer.core import codec, layout, units
from batchinfer.core.clock import Clock
from batchinfer.core.errors import AlreadyExists, BatchinferError, ConfigError
from batchinfer.core.json_text import read_object
from batchinfer.core.option_help import Opt
from batchinfer.core.printable import printable, printable_record
from batchinfer.core.records import Marker, Record
from batchinfer.formats.lines import answer_of, read_line
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.inventory import read_markers
from batchinfer.ledger.jobs import ChunkRef, OpenStore, job_chunks, split_name
from batchinfer.ledger.looks import SeenWorker, Snapshot
from batchinfer.ledger.spending import offset_of
from batchinfer.runs.overview import Overview
from batchinfer.runs.status import COLUMNS, RunConfig, figures_of, look_closely
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch

logger = logging.getLogger(__name__)

MOST_BINS = 180


class ReportConfig(Record, frozen=True, kw_only=True):
    """What to report."""

    look: RunConfig
    output: Annotated[str, Opt(short="-o")] = "report.html"
    """Where to write the page: a path or URL. A page that is there is replaced."""
    num_samples: Annotated[int, Meta(ge=0, le=50)] = 4
    """Rows to show of each of two chunks; 0 for none, where answers should not be seen."""


def run_report(config: ReportConfig, *, open_store: OpenStore, clock: Clock) -> dict[str, Any]:
    """Read a run and write the page about it. An older page at the same place is replaced.

    Raises:
        InputError: there is no such run, or the run cannot be read.
        ConfigError: the output's URL names no file, or names a folder.
    """
    snapshot, seen = look_closely(config.look, open_store=open_store, clock=clock)
    samples = _read_samples(open_store(seen.run), snapshot, open_store, num_rows=config.num_samples)
    page = render_page(snapshot, seen, samples).encode(errors="replace")
    put_page(config.output, page, open_store)
    return {
        "report": config.output,
        "bytes": len(page),
        "run": seen.run,
        "state": seen.state,
        "rows_done": seen.rows.done,
        "rows_total": seen.rows.total,
    }


def render_page(snapshot: Snapshot, seen: Overview, samples: list[dict[str, Any]]) -> str:
    """Return the whole page as HTML."""
    import jinja2

    seen = printable_record(seen)
    loader = jinja2.PackageLoader("batchinfer.runs")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined
    )
    style = environment.get_template("report.css").render()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template("report.html.jinja").render(
        f=units,
        style=style,
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        version=__version__,
        seen=seen,
        figures=list(figures_of(seen)),
        drawings=draw(snapshot.workers, seen),
        columns=COLUMNS,
        examples=ChainMap(*(view.examples for view in seen.workers)),
        samples=samples,
        settings=printable(codec.encode_pretty(snapshot.run).decode()) if snapshot.run else "",
    )


def put_page(url: str, page: bytes, open_store: OpenStore) -> None:
    """Write a page to a path or URL. An older page there is replaced.

    Raises:
        ConfigError: the URL names no file.
        AccessDenied: it names a folder.
    """
    folder, name = split_name(url)
    if not name or name.startswith("."):
        raise ConfigError(f"--output {url!r}: names no file", hint="add a name: -o report.html")
    store = open_store(folder)
    try:
        store.create(name, page)
    except AlreadyExists:
        store.replace(name, page, store.stat(name).etag)


# --------------------------------------------------------------------------- drawings


def draw(workers: Sequence[SeenWorker], seen: Overview) -> list[tuple[str, str, str]]:
    """Draw what workers counted, minute by minute: a title, an SVG path in a box of 1000 by 100, and the largest value.

    A run of less than a minute, or without a finished row, has no drawing.
    """
    begin, length = (seen.started or 0.0) / 60, seen.overall.seconds / 60
    if not 1 < length < math.inf:
        return []
    bins = min(math.ceil(length), MOST_BINS)
    tokens, rows, errors = sums = [[0.0] * bins for _ in range(3)]
    for record, modified in workers:
        shift = offset_of(record, modified) / 60 - begin
        for one in record.minutes:
            parts = min(one.length, MOST_BINS)  # an old record stands for several minutes
            counts = (one.completion_tokens or one.prompt_tokens, one.rows, one.errors)
            for n in range(parts):
                place = one.minute + shift + n * one.length / parts
                index = max(0, min(bins - 1, int(place / length * bins)))
                for numbers, count in zip(sums, counts, strict=True):
                    numbers[index] += count / parts
    if not any(rows):
        return []
    drawings = [
        _drawing("Tokens per second", [each * bins / (60 * length) for each in tokens]),
        _drawing("Finished rows", list(accumulate(rows)), seen.rows.total),
    ]
    return drawings + [_drawing("Failed rows", list(accumulate(errors)))] * any(errors)


def _drawing(title: str, numbers: list[float], top: float = 0.0) -> tuple[str, str, str]:
    top = max(top, *numbers) or 1.0
    corners = [
        f"L{1000 * index / len(numbers):.1f} {100 - 100 * value / top:.1f}"
        for index, value in enumerate(numbers, 1)
    ]
    return title, f"M0 100{''.join(corners)}L1000 100Z", units.short(top)


# --------------------------------------------------------------------------- rows to read


def _read_samples(
    store: Store, snapshot: Snapshot, open_store: OpenStore, *, num_rows: int
) -> list[dict[str, Any]]:
    """Read rows of the first and of the last finished chunk, spread evenly over each, and the first failed row of each.

    A chunk that cannot be read, or whose output cannot, is left out with a warning.

    Args:
        store: The run's store.
        snapshot: What was read of the run: its markers and its job.
        open_store: Opens the job's store.
        num_rows: Largest number of rows of each chunk. A failed row may be added to them.
    """
    refs = job_chunks(snapshot.job, snapshot.job_url)
    names = [name for name in refs if name in snapshot.markers]
    ends = {name: snapshot.markers[name] for name in [*names[:1], *names[-1:]]}
    found: list[dict[str, Any]] = []
    for name, marker in read_markers(store, ends).items() if num_rows else ():
        try:
            found += _read_pair(refs[name], marker, store, open_store(refs[name].root), num_rows)
        except BatchinferError as error:
            logger.warning("%s: no sample of it (%s)", name, error)
    return found


def _read_pair(
    ref: ChunkRef, marker: Marker, store: Store, source: Store, num_rows: int
) -> list[dict[str, Any]]:
    last = marker.rows_done - 1
    wanted = {round(index * last / max(1, num_rows - 1)) for index in range(num_rows)}
    found, has_failed = list[dict[str, Any]](), False
    with closing(Scratch()) as scratch:
        output = scratch.new_path("output")
        store.download(layout.output_key(marker.output), output)
        chunk = fetch(source, ref, scratch).path
        with output.open("rb") as lines, chunk.open("rb") as rows:
            for index, (data, row) in enumerate(zip(codec.lines(lines), rows, strict=False)):
                line = read_line(data)
                if index in wanted or not (line.is_ok or has_failed):
                    sample = {"chunk": ref.name, "line": index, "columns": _columns(row)}
                    found.append(sample | {"output": line, "answer": answer_of(line)})
                has_failed = has_failed or not line.is_ok
    return found


def _columns(line: bytes) -> list[tuple[str, str]]:
    """Return the columns of a row as texts: texts and what is hard to decode as they are, everything else as JSON."""
    row = read_object(line) or {"line": line.decode(errors="replace")}
    return [
        (name, value if isinstance(value, str) else codec.encode(value).decode())
        for name, value in row.items()
        if name not in ("_row", "_id")
    ]


# --------------------------------------------------------------------------- the command line


@config_command("report", ReportConfig, has_prices=True)
def command(config: ReportConfig) -> dict[str, Any]:
    """Write the run at RUN as one HTML page: progress, speed, errors, cost, workers, answers, settings.

    The page needs no network and runs no script; it can be mailed or put into a bucket.
    """
    from batchinfer.storage.opening import open_store

    return run_report(config, open_store=open_store, clock=Clock())
