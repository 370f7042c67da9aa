"""Look at two runs over one job, and put what is found side by side. Nothing in the runs is changed."""

from __future__ import annotations

import logging
from typing import NamedTuple

from batchinfer.core.clock import Clock
from batchinfer.core.errors import InputError
from batchinfer.core.prices import Prices
from batchinfer.core.records import Job, Record
from batchinfer.formats import find_format
from batchinfer.ledger.inventory import RunReader, Snapshot, read_newest_markers
from batchinfer.ledger.jobs import OpenStore
from batchinfer.ledger.runs import differing_keys, job_sha256_of
from batchinfer.runs.answers import Answers, with_answers
from batchinfer.runs.differences import (
    AnswerLengths,
    Change,
    ChunkToCompare,
    Differences,
    DoneRun,
    Outcomes,
    RowPair,
)
from batchinfer.runs.overview import Overview, overview, rows_by_chunk
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch

logger = logging.getLogger(__name__)

_MOST_CHANGES = 50
"""Largest number of pairs of different labels that are listed."""


class Side(Record, frozen=True, kw_only=True):
    """Figures of one run. Rows, errors, tokens and finish reasons are those of all its done chunks."""

    run: str
    model: str
    fingerprint: str
    state: str
    output_format: str
    rows_ok: int
    rows_error: int
    errors: dict[str, int]
    finish_reasons: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    lengths: AnswerLengths
    cost: float | None
    cost_per_million_output_tokens: float | None
    damaged_chunks: list[str]


class Setting(Record, frozen=True, kw_only=True):
    """A setting that differs between the runs, with its values as JSON."""

    name: str
    a: str
    b: str


class Comparison(Record, frozen=True, kw_only=True):
    """Two runs side by side. `compare --json` prints these fields."""

    job: str
    rows: Outcomes
    a: Side
    b: Side
    settings: list[Setting]
    changes: list[Change]
    differing: list[RowPair]
    failed: list[RowPair]


class RunLook(NamedTuple):
    """What was read of one run before its rows: `done` says where the rows are."""

    done: DoneRun
    snapshot: Snapshot
    answers: Answers
    seen: Overview


def look_at(
    urls: tuple[str, str],
    *,
    job: str,
    prices: Prices,
    is_spot: bool | None,
    open_store: OpenStore,
    clock: Clock,
) -> tuple[RunLook, RunLook]:
    """Read what two runs' records and markers tell, and check that the runs are over one job.

    Args:
        urls: URLs of the runs.
        job: URL of the job; empty if the runs lead to it.
        prices: Prices of the workers' machines.
        is_spot: Whether machines are spot machines, where workers do not say.
        open_store: Opens stores by URL.
        clock: Tells the time of the look.

    Raises:
        InputError: there is no such run, nothing of it is done, or the runs are of different jobs.
    """
    a, b = (RunReader(open_store(url), open_store, clock, job).read() for url in urls)
    for snapshot in (a, b):
        if snapshot.run is None:
            raise InputError(
                f"{snapshot.url}: nothing is done yet; no worker's engine has been ready so far",
                hint=f"see how it goes: batchinfer status {snapshot.url}",
            )
        for note in snapshot.notes:
            logger.warning("%s: %s", snapshot.url, note)
    _refuse_other_job(a, b)
    return (
        _look(open_store(urls[0]), a, prices, is_spot=is_spot),
        _look(open_store(urls[1]), b, prices, is_spot=is_spot),
    )


def compare_rows(a: RunLook, b: RunLook, scratch: Scratch, *, num_samples: int) -> Comparison:
    """Read the rows of both runs, and compare them.

    Raises:
        InputError: the runs have answered different rows under one chunk's name, or an output cannot be read.
    """
    found = Differences(a.done, b.done, scratch, num_samples=num_samples)
    found.read(_chunks(a, b))
    return _comparison(a, b, found)


def _refuse_other_job(a: Snapshot, b: Snapshot) -> None:
    """Refuse two runs whose rows are not the same.

    Runs over a list without a job.json are compared by their markers, see `_chunks`.
    """
    sha_a, sha_b = job_sha256_of(a.run), job_sha256_of(b.run)
    if sha_a == sha_b:
        return
    found = "one of them was made from a list of chunks without a job.json"
    if sha_a and sha_b:
        found = "their job.json files differ"
        if a.job is not None and b.job is not None:
            found = "; ".join(_job_differences(a.job, b.job)) or found
    raise InputError(
        f"{a.url} and {b.url}: are runs over different jobs, so their rows cannot be matched ({found})",
        hint="compare runs over one job: start the second worker with the first one's --job and another --output",
    )


def _job_differences(a: Job, b: Job) -> list[str]:
    found = []
    if a.rows != b.rows:
        found.append(f"{a.rows:,} rows against {b.rows:,}")
    urls = [[source.url for source in job.sources] for job in (a, b)]
    if urls[0] != urls[1]:
        found.append(f"the sources {', '.join(urls[0])} against {', '.join(urls[1])}")
    elif a.sources != b.sources:
        found.append("files of the source have changed in between")
    missing = [", ".join(sorted({*x.columns} - {*y.columns})) for x, y in ((a, b), (b, a))]
    if any(missing):
        found.append(
            f"columns only in the first: {missing[0] or 'none'}, only in the second: {missing[1] or 'none'}"
        )
    if len(a.chunks) != len(b.chunks):
        found.append(f"{len(a.chunks):,} chunks against {len(b.chunks):,}")
    return found


def _look(store: Store, snapshot: Snapshot, prices: Prices, *, is_spot: bool | None) -> RunLook:
    """Read a run's markers. Markers of another run are left out, as `collect` leaves them out."""
    run = snapshot.run
    assert run is not None
    known = None if snapshot.job is None else rows_by_chunk(snapshot.job, run)
    wanted = {
        name: seen for name, seen in snapshot.markers.items() if known is None or name in known
    }
    answers, markers = Answers(), {}
    for name, marker in read_newest_markers(store, wanted):
        if marker.fingerprint == run.fingerprint:
            answers.add(name, marker, wanted[name].modified)
            markers[name] = marker
    prompt = run.config.get("prompt") or {}
    output_format = find_format(str(prompt.get("output_format") or "")).name
    seen = with_answers(overview(snapshot, prices, is_spot=is_spot), answers)
    return RunLook(DoneRun(store, output_format, markers), snapshot, answers, seen)


def _chunks(a: RunLook, b: RunLook) -> list[ChunkToCompare]:
    """Return the chunks that either run has to do or has done, in input order.

    Raises:
        InputError: the runs have answered different rows under one chunk's name.
    """
    for name in a.done.markers.keys() & b.done.markers.keys():
        if a.done.markers[name].chunk_sha256 != b.done.markers[name].chunk_sha256:
            raise InputError(
                f"{name}: the two runs have answered different rows under this name",
                hint="compare runs over one job; `batchinfer verify` says which run is not of its job",
            )
    jobs = [look.snapshot.job for look in (a, b) if look.snapshot.job is not None]
    job = max(jobs, key=lambda job: job.rows, default=None)  # rows may have been appended meanwhile
    if job is None:
        names = sorted(a.done.markers.keys() | b.done.markers.keys())
        return [ChunkToCompare(name, None, None) for name in names]
    rows_a, rows_b = (rows_by_chunk(job, look.snapshot.run) for look in (a, b))
    return [
        ChunkToCompare(chunk.name, rows, chunk.first_row)
        for chunk in job.chunks
        if (rows := max(rows_a.get(chunk.name, 0), rows_b.get(chunk.name, 0)))
    ]


def _comparison(a: RunLook, b: RunLook, differences: Differences) -> Comparison:
    run_a, run_b = a.snapshot.run, b.snapshot.run
    assert run_a is not None
    assert run_b is not None
    lengths = differences.lengths
    return Comparison(
        job=a.snapshot.job_url or b.snapshot.job_url,
        rows=differences.rows,
        a=_side(a, lengths[0], differences.damaged["A"]),
        b=_side(b, lengths[1], differences.damaged["B"]),
        settings=[
            Setting(name=name, a=left, b=right)
            for name, left, right in differing_keys(run_a.config, run_b.config)
        ],
        changes=differences.changes(_MOST_CHANGES),
        differing=differences.differing(),
        failed=differences.failed(),
    )


def _side(look: RunLook, lengths: AnswerLengths, damaged: list[str]) -> Side:
    seen, totals = look.seen, look.answers.totals
    return Side(
        run=seen.run,
        model=seen.model,
        fingerprint=seen.fingerprint,
        state=seen.state,
        output_format=look.done.output_format,
        rows_ok=totals.rows_ok,
        rows_error=totals.rows_error,
        errors=totals.errors,
        finish_reasons=dict(look.answers.finish_reasons.most_common()),
        prompt_tokens=totals.prompt_tokens,
        completion_tokens=totals.completion_tokens,
        lengths=lengths,
        cost=seen.cost.so_far,
        cost_per_million_output_tokens=seen.cost.per_million_output_tokens,
        damaged_chunks=damaged,
    )
