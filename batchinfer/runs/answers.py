"""What a run keeps, by its markers and checkpoints: sums over the answers, and when which worker finished them.

The workers' records cannot tell this. A record lacks what a start did between its last heartbeat and a kill, and it
counts rows that were lost with a kill or done twice. A marker counts the rows of its output, neither more nor less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

import msgspec

from batchinfer.core.records import Marker, Span
from batchinfer.ledger.audit import Totals
from batchinfer.ledger.claims import ENDED_STATES, HEARTBEATS_PER_LEASE
from batchinfer.ledger.inventory import SeenWorker, Snapshot, read_newest_markers
from batchinfer.runs.overview import Overview, clock_offset, rate_of, rows_by_chunk, rows_saved
from batchinfer.storage import Store


class DoneChunk(NamedTuple):
    """A chunk with a marker. `start` and `end` are Unix seconds by the clock of the worker that wrote the marker.

    `resumed` of the rows were finished by earlier starts or other workers, or by an earlier generation.
    """

    name: str
    worker: str
    epoch: int
    start: float
    end: float
    rows: int
    resumed: int
    errors: int
    tokens: int
    """Number of output tokens."""
    is_repair: bool


class Answers:
    """Sums over a run's newest markers."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.finish_reasons: Counter[str] = Counter()
        self.prompt_lengths: Counter[str] = Counter()
        self.completion_lengths: Counter[str] = Counter()
        self.chunks: list[DoneChunk] = []

    def add(self, name: str, marker: Marker, modified: float) -> None:
        """Add a chunk's newest marker. `modified` is the time at which storage received it."""
        self.totals.add(marker)
        self.finish_reasons.update(marker.finish_reasons)
        self.prompt_lengths.update(marker.prompt_lengths)
        self.completion_lengths.update(marker.completion_lengths)
        rows = max(0, marker.rows_ok + marker.rows_error)
        start, end = _moment(marker.start, modified), _moment(marker.end, modified)
        self.chunks.append(
            DoneChunk(
                name=name,
                worker=marker.worker,
                epoch=marker.epoch,
                start=min(start, end),
                end=end,
                rows=rows,
                resumed=min(rows, max(0, marker.rows_resumed)),
                errors=max(0, marker.rows_error),
                tokens=max(0, marker.completion_tokens),
                is_repair=marker.generation > 0,
            )
        )

    @property
    def has_shapes(self) -> bool:
        """Whether there are as many finish reasons as rows that did not fail. Markers of earlier versions have none."""
        return self.finish_reasons.total() >= self.totals.rows_ok > 0

    @property
    def tokens_per_row(self) -> float:
        """Average number of output tokens of a row."""
        rows = self.totals.rows_ok + self.totals.rows_error
        return self.totals.completion_tokens / rows if rows > 0 else 0.0


def _moment(text: str, default: float) -> float:
    """Convert ISO 8601 to Unix seconds. Damaged texts give `default`."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return default


def read_answers(store: Store, snapshot: Snapshot) -> Answers:
    """Read every chunk's newest marker, with one request for each. Chunks that are not in the job are left out."""
    answers = Answers()
    known = None if snapshot.job is None else rows_by_chunk(snapshot.job, snapshot.run)
    wanted = {
        name: seen for name, seen in snapshot.markers.items() if known is None or name in known
    }
    for name, marker in read_newest_markers(store, wanted):
        answers.add(name, marker, wanted[name].modified)
    return answers


def with_answers(seen: Overview, answers: Answers) -> Overview:
    """Return an overview with the sums of the markers in place of those of the workers' records.

    Until the run is done, a larger sum of the records stays, because records also count rows of open chunks.
    """
    totals, is_done = answers.totals, seen.state == "done"

    def number(by_markers: int, by_records: int) -> int:
        return by_markers if is_done else max(by_markers, by_records)

    errors = most(answers.totals.errors, {} if is_done else seen.errors)
    reasons: Mapping[str, int] = seen.finish_reasons
    if answers.has_shapes:
        reasons = most(answers.finish_reasons, {} if is_done else reasons)
    prompt = number(totals.prompt_tokens, seen.prompt_tokens)
    completion = number(totals.completion_tokens, seen.completion_tokens)
    cost = seen.cost
    if cost.so_far is not None and not cost.unpriced_workers:
        cost = msgspec.structs.replace(
            cost,
            per_million_tokens=_per_million(cost.so_far, prompt + completion),
            per_million_output_tokens=_per_million(cost.so_far, completion),
        )
    rows = seen.rows.done + seen.rows.in_progress
    return msgspec.structs.replace(
        seen,
        prompt_tokens=prompt,
        completion_tokens=completion,
        reasoning_tokens=number(totals.reasoning_tokens, seen.reasoning_tokens),
        rows_error=number(totals.rows_error, seen.rows_error),
        errors=_largest_first(errors),
        finish_reasons=_largest_first(reasons),
        overall=rate_of(seen.overall.seconds, rows, prompt, completion),
        cost=cost,
    )


def most(*counts: Mapping[str, int]) -> dict[str, int]:
    """Return the larger number for each key.

    >>> most({"a": 1, "b": 5}, {"a": 2})
    {'a': 2, 'b': 5}
    """
    found: Counter[str] = Counter()
    for each in counts:
        found |= Counter(each)
    return dict(found)


def _largest_first(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _per_million(dollars: float, tokens: int) -> float | None:
    return 1e6 * dollars / tokens if tokens else None


# --------------------------------------------------------------------------- who finished which rows, and when


class Piece(NamedTuple):
    """Rows that a worker finished between two moments, in Unix seconds by storage's clock.

    `worker` is "" for rows that are in no worker's record. A start that was killed finished them after its last
    heartbeat.
    """

    worker: str
    begin: float
    end: float
    rows: int
    tokens: float


class _Part(NamedTuple):
    """What a worker's record tells of one chunk that it did not publish."""

    seen: SeenWorker
    span: Span


def pieces_of(answers: Answers, snapshot: Snapshot, gone: Collection[str]) -> list[Piece]:
    """Return when which worker finished the rows that are in outputs or in checkpoints: each row in one piece.

    Args:
        answers: The sums over the markers.
        snapshot: The run's workers and checkpoints.
        gone: Ids of the workers without a heartbeat for so long that they count as gone.
    """
    offsets = {seen.record.id: clock_offset(seen) for seen in snapshot.workers}
    parts: dict[str, list[_Part]] = {}
    for seen in snapshot.workers:
        for span in (*seen.record.spans, *seen.record.open_spans):
            if span.outcome != "done":
                parts.setdefault(span.chunk, []).append(_Part(seen, span))
    kills = _kills(snapshot.workers, gone)
    pieces: list[Piece] = []
    for chunk in answers.chunks:
        offset = offsets.get(chunk.worker, 0.0)
        begin, end = chunk.start + offset, chunk.end + offset
        per_row = chunk.tokens / chunk.rows if chunk.rows else 0.0
        fresh = chunk.rows - chunk.resumed
        pieces.append(Piece(chunk.worker, begin, end, fresh, fresh * per_row))
        earlier = [
            part
            for part in parts.get(chunk.name, ())
            if (part.seen.record.id, part.span.epoch) != (chunk.worker, chunk.epoch)
        ]
        owner = chunk.worker if chunk.is_repair else ""
        pieces += _shared_out(chunk.resumed, earlier, kills, begin, per_row, owner)
    now = max(
        (seen.record.heartbeat + clock_offset(seen) for seen in snapshot.workers), default=0.0
    )
    for name, number in _saved(snapshot).items():
        found = parts.get(name, [])
        alive = [part.seen.record.id for part in found if _is_live(part, gone)]
        owner = alive[0] if alive else ""
        pieces += _shared_out(number, found, kills, now, answers.tokens_per_row, owner)
    return [piece for piece in pieces if piece.rows]


def _saved(snapshot: Snapshot) -> dict[str, int]:
    saved = rows_saved(snapshot)
    if snapshot.job is None:
        return saved
    rows = rows_by_chunk(snapshot.job, snapshot.run)
    return {name: min(number, rows[name]) for name, number in saved.items() if name in rows}


def _is_live(part: _Part, gone: Collection[str]) -> bool:
    record = part.seen.record
    return (
        part.span.outcome == "open" and record.id not in gone and record.state not in ENDED_STATES
    )


def _shared_out(
    rows: int,
    parts: Iterable[_Part],
    kills: list[tuple[float, float]],
    before: float,
    tokens_per_row: float,
    owner: str,
) -> list[Piece]:
    """Share out a chunk's resumed rows to the starts that finished them, by what their records tell.

    Rows that no record tells of are the last piece, whose worker is `owner`. It lies between the last kill before the
    moment `before` and the heartbeat that was due then. If there was no such kill, it lies at `before`.
    """
    pieces = []
    for seen, span in sorted(parts, key=lambda part: part.span.end):
        offset = clock_offset(seen)
        number = min(rows, max(0, span.rows - span.resumed))
        rows -= number
        begin, end = span.start + offset, span.end + offset
        pieces.append(Piece(seen.record.id, begin, end, number, number * tokens_per_row))
    if rows:
        begin, end = max((kill for kill in kills if kill[0] <= before), default=(before, before))
        end = max(begin, min(end, before))
        pieces.append(Piece(owner, begin, end, rows, rows * tokens_per_row))
    return pieces


def _kills(workers: Iterable[SeenWorker], gone: Collection[str]) -> list[tuple[float, float]]:
    """Return for each killed start the moment of its last heartbeat, and the moment of the next, which never came."""
    found = []
    for seen in workers:
        record, offset = seen.record, clock_offset(seen)
        ends = [*record.ends]
        if record.id in gone:
            ends.append((record.heartbeat, record.state))
        for moment, state in ends:
            if state not in ENDED_STATES:
                begin = moment + offset
                found.append((begin, begin + record.lease_seconds / HEARTBEATS_PER_LEASE))
    return found


class WorkerShare(NamedTuple):
    """What a run keeps of one worker's work."""

    chunks: int = 0
    rows: int = 0
    errors: int = 0
    tokens: float = 0.0


def shares_of(answers: Answers, pieces: Iterable[Piece]) -> dict[str, WorkerShare]:
    """Return what the run keeps of each worker's work, by the worker's id. Chunks and errors are by marker."""
    shares: dict[str, WorkerShare] = {}
    for chunk in answers.chunks:
        share = shares.get(chunk.worker, WorkerShare())
        shares[chunk.worker] = share._replace(
            chunks=share.chunks + 1, errors=share.errors + chunk.errors
        )
    for piece in pieces:
        share = shares.get(piece.worker, WorkerShare())
        shares[piece.worker] = share._replace(
            rows=share.rows + piece.rows, tokens=share.tokens + piece.tokens
        )
    return shares
