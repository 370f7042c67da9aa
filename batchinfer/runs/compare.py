"""`batchinfer compare`: two runs over one job side by side, for the terminal, as JSON and as an HTML page to read."""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from batchinfer.cli.settings import common_options, price_options
from batchinfer.core import units
from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.prices import Prices
from batchinfer.core.printable import printable_record
from batchinfer.core.records import Record
from batchinfer.ledger.jobs import OpenStore
from batchinfer.runs import charts
from batchinfer.runs.comparison import Comparison, RunLook, Side, compare_rows, look_at
from batchinfer.runs.differences import Outcomes, RowPair
from batchinfer.runs.pages import put_page, render_template
from batchinfer.runs.samples import Cell, SourceReader
from batchinfer.storage.scratch import Scratch

_MAY_HIDE = ("error codes", "damaged chunks")
_SHOWN_ROWS = 3
_SHOWN_CHANGES = 8
_SHOWN_TEXT = 160
_WORDS = re.compile(r"\s*\w+|\s*[^\w\s]|\s+")


class CompareConfig(Record, frozen=True, kw_only=True):
    """What to compare. `output` is the page's path or URL; no page is written if it is empty.

    Up to `num_samples` rows with different answers are shown, and as many that failed in one run only.
    """

    run_a: str
    run_b: str
    output: str = ""
    num_samples: int = 20
    job: str = ""
    price_per_hour: float | None = None
    is_spot: bool | None = None
    scratch_dir: str | None = None


def run_compare(
    config: CompareConfig, *, open_store: OpenStore, clock: Clock
) -> tuple[Comparison, int]:
    """Compare two runs, and write the page if one is asked for. Nothing in the runs is changed.

    Returns:
        What was found, and the page's size in bytes; 0 without a page.

    Raises:
        InputError: there is no such run, the runs are of different jobs, or an output cannot be read.
    """
    a, b = look_at(
        (config.run_a, config.run_b),
        job=config.job,
        prices=Prices(config.price_per_hour),
        is_spot=config.is_spot,
        open_store=open_store,
        clock=clock,
    )
    scratch = Scratch(config.scratch_dir)
    try:
        found = compare_rows(a, b, scratch, num_samples=config.num_samples)
        if not config.output:
            return found, 0
        rows = SourceReader(a.snapshot, open_store, scratch)
        return found, put_page(config.output, _render_page(found, a, b, rows), open_store)
    finally:
        scratch.close()


# --------------------------------------------------------------------------- texts for people


class FigureLine(NamedTuple):
    """One line of the table of figures: its name, and the figure of each run."""

    name: str
    a: str
    b: str


def outcome_lines(rows: Outcomes) -> list[tuple[str, int]]:
    """Return the outcomes that occur, as (words, number of rows). Equal and differing rows are always there."""
    found = [
        ("same answer", rows.equal),
        ("different answers", rows.differing),
        ("failed in A only", rows.error_in_a),
        ("failed in B only", rows.error_in_b),
        ("failed in both", rows.error_in_both),
        ("missing in A", rows.missing_in_a),
        ("missing in B", rows.missing_in_b),
        ("missing in both", rows.missing_in_both),
    ]
    return found[:2] + [each for each in found[2:] if each[1]]


def figure_lines(found: Comparison) -> list[FigureLine]:
    """Return the figures of both runs side by side. Error codes and damage are left out if neither run has any."""
    a, b = _figures(found.a), _figures(found.b)
    lines = [FigureLine(name, a[name], b[name]) for name in a]
    return [
        line for line in lines if not (line.name in _MAY_HIDE and line.a == line.b == units.NONE)
    ]


def _figures(side: Side) -> dict[str, str]:
    lengths, damaged = side.lengths, len(side.damaged_chunks)
    return {
        "model": side.model,
        "state": side.state,
        "rows answered": units.count(side.rows_ok),
        "rows failed": units.count(side.rows_error),
        "error codes": _counts(side.errors),
        "finish reasons": _counts(side.finish_reasons),
        "tokens in": units.count(side.prompt_tokens),
        "tokens out": units.count(side.completion_tokens),
        "tokens an answer": _mean(lengths.completion_tokens, lengths.rows),
        "characters an answer": _mean(lengths.characters, lengths.rows),
        "cost": units.money(side.cost),
        "cost per million tokens out": units.money(side.cost_per_million_output_tokens),
        "damaged chunks": units.count(damaged or None),
    }


def _counts(counts: dict[str, int]) -> str:
    parts = [f"{name or '(none)'} {number:,}" for name, number in counts.items()]
    return ", ".join(parts) or units.NONE


def _mean(total: int, number: int) -> str:
    return f"{total / number:,.1f}" if number else units.NONE


def render(found: Comparison) -> Group:
    """Lay out the comparison for a terminal."""
    found = printable_record(found)
    outcomes = Table.grid(padding=(0, 2))
    for words, number in outcome_lines(found.rows):
        share = units.percent(number, found.rows.total)
        outcomes.add_row(
            Text(words, style="dim"), Text(units.count(number), justify="right"), share
        )
    figures = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "A", "B"):
        figures.add_column(name, overflow="fold")
    for line in figure_lines(found):
        figures.add_row(Text(line.name, style="dim"), Text(line.a), Text(line.b))
    for setting in found.settings:
        figures.add_row(
            Text(setting.name, style="dim"),
            *(Text(_short(text)) for text in (setting.a, setting.b)),
        )
    parts: list[Any] = [
        Text.assemble(("A ", "bold"), found.a.run),
        Text.assemble(("B ", "bold"), found.b.run),
        outcomes,
        figures,
    ]
    parts += [
        Text(f"{units.many(change.rows, 'row')}: {change.a!r} in A, {change.b!r} in B")
        for change in found.changes[:_SHOWN_CHANGES]
    ]
    if not found.changes:
        for pair in found.differing[:_SHOWN_ROWS]:
            parts += [
                Text(f"row {pair.id}", style="bold"),
                Text(f"  A: {_short(' | '.join(pair.a.texts))}"),
                Text(f"  B: {_short(' | '.join(pair.b.texts))}"),
            ]
    return Group(*parts)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]}…"


def summary(found: Comparison) -> dict[str, Any]:
    """The most important figures. `compare` prints them as its result; with --json it prints everything."""
    return {
        "rows": found.rows,
        "completion_tokens": {"a": found.a.completion_tokens, "b": found.b.completion_tokens},
        "cost": {"a": found.a.cost, "b": found.b.cost},
    }


# --------------------------------------------------------------------------- the page


class MarkedText(NamedTuple):
    """A part of a text, and whether the other run's text lacks it."""

    text: str
    is_changed: bool


def marked(a: str, b: str) -> tuple[list[MarkedText], list[MarkedText]]:
    """Cut two texts into pieces that are in both, and pieces that are in one of them.

    If B's text has 200 words or more, words that are frequent in it do not begin a common piece, which saves much time.

    >>> [piece.text for piece in marked("It is red.", "It is blue.")[0] if piece.is_changed]
    [' red']
    """
    words_a, words_b = _WORDS.findall(a), _WORDS.findall(b)
    left, right = [], []
    matcher = difflib.SequenceMatcher(None, words_a, words_b)
    for kind, start_a, end_a, start_b, end_b in matcher.get_opcodes():
        is_changed = kind != "equal"
        if end_a > start_a:
            left.append(MarkedText("".join(words_a[start_a:end_a]), is_changed))
        if end_b > start_b:
            right.append(MarkedText("".join(words_b[start_b:end_b]), is_changed))
    return left, right


class _PairView(NamedTuple):
    """A row on the page: its columns in the source, and for each answer the pieces of A's and of B's text."""

    pair: RowPair
    source: list[Cell]
    answers: list[tuple[list[MarkedText], list[MarkedText]]]


def _views(pairs: list[RowPair], sources: dict[tuple[str, int], list[Cell]]) -> list[_PairView]:
    views = []
    for pair in pairs:
        num = max(len(pair.a.texts), len(pair.b.texts))
        texts_a, texts_b = ([*side.texts, *[""] * num][:num] for side in (pair.a, pair.b))
        answers = [marked(a, b) for a, b in zip(texts_a, texts_b, strict=True)]
        views.append(_PairView(pair, sources.get((pair.chunk, pair.line), []), answers))
    return views


def _render_page(found: Comparison, a: RunLook, b: RunLook, reader: SourceReader) -> str:
    """Return the page as HTML. The columns of the sampled rows are read from the job's chunks."""
    wanted: dict[str, set[int]] = {}
    for pair in (*found.differing, *found.failed):
        wanted.setdefault(pair.chunk, set()).add(pair.line)
    sources = {
        (name, line): cells
        for name, lines in wanted.items()
        for line, cells in reader.rows(name, lines).items()
    }
    return render_template(
        "compare.html.jinja",
        found=found,
        outcomes=outcome_lines(found.rows),
        figures=figure_lines(found),
        lengths=[
            (
                f"Answer lengths of {name}",
                charts.histogram([look.answers.completion_lengths]),
                style,
            )
            for name, look, style in (("A", a, "s1"), ("B", b, "s2"))
        ],
        differing=_views(found.differing, sources),
        failed=_views(found.failed, sources),
    )


# --------------------------------------------------------------------------- the command


@click.command("compare")
@click.argument("run_a")
@click.argument("run_b")
@click.option(
    "-o",
    "--output",
    default="",
    help="Also write an HTML page with rows to read: a path or URL. A page that is there is replaced.",
)
@click.option(
    "--samples",
    "num_samples",
    type=click.IntRange(0, 1000),
    default=20,
    show_default=True,
    help="Rows with different answers to show, and as many that failed in one run only; 0 for none.",
)
@click.option("--json", "is_json", is_flag=True, help="Everything as JSON on stdout, no table.")
@click.option("--job", default="", help="URL of the job, where run.json does not lead to it.")
@click.option(
    "--scratch-dir", type=click.Path(path_type=Path), help="Local folder for outputs under way."
)
@price_options
@common_options
def command(*, is_json: bool, **options: Any) -> Any:
    """Compare two runs over one job: rows with equal and different answers, failures, lengths, tokens, cost.

    Only rows that both runs have done are compared; runs may still go on. The exit status is 0 also where answers
    differ.
    """
    from batchinfer.storage.opening import open_store

    scratch_dir = options.pop("scratch_dir")
    config = CompareConfig(**options, scratch_dir=str(scratch_dir) if scratch_dir else None)
    found, num_bytes = run_compare(config, open_store=open_store, clock=SystemClock())
    page = {"report": config.output, "bytes": num_bytes} if config.output else {}
    if is_json:
        import msgspec

        return {**msgspec.structs.asdict(found), **page}
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 160)
    console.print(render(found))
    return {**summary(found), **page}
