"""Compare the answers of two runs over one job, row by row. Nothing in the runs is changed.

Both runs are read chunk by chunk. At any time, memory holds a block of lines of each run and the sampled rows, and the
scratch folder holds the outputs of a few chunks.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError, ObjectNotFound
from batchinfer.core.records import Marker, Record
from batchinfer.formats import OutputLine, find_format
from batchinfer.formats.vectors import OutputVectors
from batchinfer.ledger.inventory import in_parallel
from batchinfer.runs.samples import cut
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch, remove_quietly

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BLOCK_BYTES = 1 << 20
_FETCHERS = 2
_MAX_LABEL = 60
"""Largest number of characters of an answer that is counted as a label."""
_MAX_LABEL_PAIRS = 2000
"""Largest number of different pairs of labels that are counted. With more, the answers do not count as labels."""
_MOST_NUMBERS = 200
"""Largest number of a vector's numbers that are shown."""
_MAX_TEXTS = 8
"""Largest number of a row's answers that are shown."""
_SEED = 0
"""Seed of the sample of rows. It is fixed, so that the same runs give the same page."""


class ChunkToCompare(NamedTuple):
    """A chunk that at least one of the two runs has to do. Without a job.json: that at least one of them has done.

    `rows` is the number of its rows that at least one run has to do; `first_row` is the number of its first row in the
    job. Both are None without a job.json.
    """

    name: str
    rows: int | None
    first_row: int | None


class DoneRun(NamedTuple):
    """One of the two runs: its store, the name of its output format, and its markers by chunk."""

    store: Store
    output_format: str
    markers: Mapping[str, Marker]


class Outcomes(Record, frozen=True, kw_only=True):
    """How many rows of the job had which outcome. Each row counts once.

    Rows are missing in a run if their chunk is not done, is damaged, or lies beyond the run's --limit.
    """

    total: int = 0
    equal: int = 0
    differing: int = 0
    error_in_a: int = 0
    """Number of rows that failed in A and not in B."""
    error_in_b: int = 0
    error_in_both: int = 0
    missing_in_a: int = 0
    """Number of rows that only B has done."""
    missing_in_b: int = 0
    missing_in_both: int = 0


class AnswerLengths(Record, frozen=True, kw_only=True):
    """Lengths of one run's answers, summed over the `rows` rows that both runs have answered."""

    rows: int
    characters: int
    prompt_tokens: int
    completion_tokens: int


class Change(Record, frozen=True, kw_only=True):
    """A short answer of A, B's answer to the same rows, and the number of these rows."""

    a: str
    b: str
    rows: int


class ShownAnswer(Record, frozen=True, kw_only=True):
    """One run's answer to a sampled row. Long texts are cut. `error` is empty for an answered row."""

    texts: list[str]
    finish_reasons: list[str]
    completion_tokens: int | None
    error: str


class RowPair(Record, frozen=True, kw_only=True):
    """A sampled row and both answers. `line` is its line in its chunk, from 0; `row` is None without a job.json."""

    row: int | None
    id: str
    chunk: str
    line: int
    a: ShownAnswer
    b: ShownAnswer


class Reservoir(Generic[T]):
    """A uniform sample of up to `size` of the items that are offered. The same items give the same sample."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._random = random.Random(_SEED)
        self._num_offered = 0
        self.items: list[T] = []

    def offer(self, make: Callable[[], T]) -> None:
        """Offer one item. `make` is called only if the item is taken."""
        self._num_offered += 1
        if len(self.items) < self._size:
            self.items.append(make())
            return
        place = self._random.randrange(self._num_offered)
        if place < self._size:
            self.items[place] = make()


class Differences:
    """Compares two runs, and holds what was found.

    Two rows are equal if both were answered with the same texts, tool calls and embedding, in the same order.
    Reasoning, finish reasons, log-probabilities and token counts are not compared.

    Args:
        a: The first run.
        b: The second run.
        scratch: Folder for the outputs of a few chunks at a time.
        num_samples: Largest number of rows to keep of each kind: answered differently, and failed in one run only.
    """

    def __init__(self, a: DoneRun, b: DoneRun, scratch: Scratch, *, num_samples: int) -> None:
        self._runs = {"A": a, "B": b}
        self._scratch = scratch
        self._outcomes: Counter[str] = Counter()
        self._characters = [0, 0]
        self._prompt_tokens = [0, 0]
        self._completion_tokens = [0, 0]
        self._changes: Counter[tuple[str, str]] | None = Counter()
        self._differing: Reservoir[RowPair] = Reservoir(num_samples)
        self._failed: Reservoir[RowPair] = Reservoir(num_samples)
        self.damaged: dict[str, list[str]] = {"A": [], "B": []}
        """Names of the chunks of each run that cannot be read, although the run has a marker for them."""

    @property
    def rows(self) -> Outcomes:
        """The outcomes of the rows."""
        return Outcomes(total=self._outcomes.total(), **self._outcomes)

    @property
    def lengths(self) -> tuple[AnswerLengths, AnswerLengths]:
        """The lengths of A's and of B's answers."""
        rows = self._outcomes["equal"] + self._outcomes["differing"]
        a, b = (
            AnswerLengths(
                rows=rows,
                characters=self._characters[side],
                prompt_tokens=self._prompt_tokens[side],
                completion_tokens=self._completion_tokens[side],
            )
            for side in (0, 1)
        )
        return a, b

    def changes(self, most: int) -> list[Change]:
        """Return the most frequent pairs of different answers.

        The list is empty if no pair occurs twice, if a differing row has a long answer or not exactly one, or if there
        are very many pairs.
        """
        pairs = sorted((self._changes or {}).items(), key=lambda item: (-item[1], item[0]))
        if pairs and pairs[0][1] == 1:
            return []
        return [Change(a=a, b=b, rows=rows) for (a, b), rows in pairs[:most]]

    def differing(self) -> list[RowPair]:
        """Return the sampled rows that were answered differently, in input order."""
        return sorted(self._differing.items, key=_place)

    def failed(self) -> list[RowPair]:
        """Return the sampled rows that failed in one run only, in input order."""
        return sorted(self._failed.items, key=_place)

    def read(self, chunks: list[ChunkToCompare]) -> None:
        """Compare the rows of `chunks`, which are in input order.

        Raises:
            InputError: an output whose checksum is right has a line that cannot be read or too few lines.
        """
        runs = self._runs
        both = [
            chunk for chunk in chunks if all(chunk.name in run.markers for run in runs.values())
        ]
        waiting = in_parallel(self._fetch, both, _FETCHERS)
        for chunk in chunks:
            rows = {
                name: _rows_of(run.markers[chunk.name])
                for name, run in runs.items()
                if chunk.name in run.markers
            }
            if len(rows) == len(runs):
                rows = self._compare_chunk(chunk, rows, next(waiting))
            self._count_missing(chunk, rows.get("A", 0), rows.get("B", 0))

    def _count_missing(self, chunk: ChunkToCompare, in_a: int, in_b: int) -> None:
        total = max(in_a, in_b) if chunk.rows is None else chunk.rows
        self._outcomes["missing_in_a"] += max(0, in_b - in_a)
        self._outcomes["missing_in_b"] += max(0, in_a - in_b)
        self._outcomes["missing_in_both"] += max(0, total - max(in_a, in_b))

    def _fetch(self, chunk: ChunkToCompare) -> dict[str, tuple[Path, str]]:
        """Fetch a chunk's two outputs. Return for each run the local path, and the problem if it cannot be used."""
        return {name: self._fetch_one(run, chunk.name) for name, run in self._runs.items()}

    def _fetch_one(self, run: DoneRun, name: str) -> tuple[Path, str]:
        marker = run.markers[name]
        path = self._scratch.new_path(f"{name}.output")
        if "/" in marker.output:
            return path, f"its marker names {marker.output!r}, expected a file in outputs/"
        key = layout.output_key(marker.output)
        try:
            run.store.download(key, path)
        except ObjectNotFound:
            return path, f"its output {key} is gone"
        with path.open("rb") as file:
            digest = codec.sha256_file(file)
        if digest != marker.output_sha256:
            return (
                path,
                f"{key} has sha256 {digest[:12]}…, its marker says {marker.output_sha256[:12]}…",
            )
        return path, ""

    def _compare_chunk(
        self, chunk: ChunkToCompare, rows: dict[str, int], fetched: dict[str, tuple[Path, str]]
    ) -> dict[str, int]:
        """Compare the two outputs of a chunk. Return `rows`, the number of each run's rows, without damaged outputs."""
        try:
            for name, (_, problem) in fetched.items():
                if problem:
                    logger.warning("run %s: %s: %s", name, chunk.name, problem)
                    self.damaged[name].append(chunk.name)
                    rows = {other: number for other, number in rows.items() if other != name}
            if len(rows) == len(fetched):
                self._compare_lines(chunk, fetched["A"][0], fetched["B"][0], min(rows.values()))
            return rows
        finally:
            for path, _ in fetched.values():
                remove_quietly(path)

    def _compare_lines(self, chunk: ChunkToCompare, a: Path, b: Path, num_rows: int) -> None:
        lines_a = _lines(a, self._runs["A"].output_format)
        lines_b = _lines(b, self._runs["B"].output_format)
        num_lines = 0
        for left, right in zip(lines_a, lines_b, strict=False):  # a --limit may end one run earlier
            self._compare_row(chunk, num_lines, left, right)
            num_lines += 1
        if num_lines != num_rows:
            raise InputError(
                f"{chunk.name}: an output has {num_lines} lines, its marker counts {num_rows} rows",
                hint="`batchinfer verify --deep` says of each run whether it is sound",
            )

    def _compare_row(self, chunk: ChunkToCompare, line: int, a: OutputLine, b: OutputLine) -> None:
        def pair() -> RowPair:
            return _pair(chunk, line, a, b)

        if not (a.is_ok and b.is_ok):
            if not (a.is_ok or b.is_ok):
                self._outcomes["error_in_both"] += 1
                return
            self._outcomes["error_in_b" if a.is_ok else "error_in_a"] += 1
            self._failed.offer(pair)
            return
        for side, each in enumerate((a, b)):
            self._characters[side] += sum(len(choice.text or "") for choice in each.choices)
            self._prompt_tokens[side] += each.usage.prompt_tokens or 0
            self._completion_tokens[side] += each.usage.completion_tokens or 0
        if _answer(a) == _answer(b):
            self._outcomes["equal"] += 1
            return
        self._outcomes["differing"] += 1
        self._differing.offer(pair)
        self._count_change(a.texts, b.texts)

    def _count_change(self, a: list[str], b: list[str]) -> None:
        if self._changes is None:
            return
        if len(a) != 1 or len(b) != 1 or max(len(a[0]), len(b[0])) > _MAX_LABEL:
            self._changes = None
            return
        self._changes[a[0], b[0]] += 1
        if len(self._changes) > _MAX_LABEL_PAIRS:
            self._changes = None


def _rows_of(marker: Marker) -> int:
    return max(0, marker.rows_ok + marker.rows_error)


def _place(pair: RowPair) -> tuple[int, str, int]:
    return (pair.row or 0, pair.chunk, pair.line)


def _lines(path: Path, output_format: str) -> Iterator[OutputLine]:
    """Yield the lines of an output. A block of them is in memory at a time."""
    read_lines = find_format(output_format).read_lines
    with path.open("rb") as file:
        while data := file.read(_BLOCK_BYTES) + file.readline():
            yield from read_lines(data)


def _answer(line: OutputLine) -> tuple[list[tuple[str, bytes]], list[OutputVectors]]:
    """Return the parts of an answered line that two runs are compared by."""
    return [(choice.text or "", bytes(choice.tool_calls)) for choice in line.choices], line.vectors


def _pair(chunk: ChunkToCompare, line: int, a: OutputLine, b: OutputLine) -> RowPair:
    row = None if chunk.first_row is None else chunk.first_row + line
    name = a.id if a.id is not None else b.id
    return RowPair(
        row=row,
        id=cut(str(line if row is None else row) if name is None else name, 200),
        chunk=chunk.name,
        line=line,
        a=_shown(a),
        b=_shown(b),
    )


def _shown(line: OutputLine) -> ShownAnswer:
    texts = [
        choice.text or bytes(choice.tool_calls).decode(errors="replace") for choice in line.choices
    ]
    if line.vectors:
        texts = [each.shown(_MOST_NUMBERS) for each in line.vectors]
    return ShownAnswer(
        texts=list(map(cut, texts[:_MAX_TEXTS])),
        finish_reasons=line.finish_reasons,
        completion_tokens=line.usage.completion_tokens,
        error="" if line.is_ok else cut(f"{line.code}: {line.message}"),
    )
