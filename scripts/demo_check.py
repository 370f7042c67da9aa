"""Check every row of a demo run against the one right answer to its prompt. Read-only.

Outputs are read as any reader should read them: only what a marker names, and only after its
checksum was compared.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from demo_data import example_of

from batchinfer.core import codec, layout
from batchinfer.core.errors import BatchinferError
from batchinfer.core.records import Chunk, Job, Marker

REQUIRED_ACCURACY = 0.99


class DamagedOutput(Exception):
    """An output is not what its marker vouches for."""


@dataclass(slots=True, kw_only=True)
class WorkerTotals:
    """What the markers of one worker (or of all) add up to."""

    chunks: int = 0
    rows: int = 0
    rows_resumed: int = 0
    chunks_resumed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    start: str = ""
    end: str = ""

    def add(self, marker: Marker) -> None:
        """Count one published chunk."""
        self.chunks += 1
        self.rows += marker.rows_ok + marker.rows_error
        self.rows_resumed += marker.rows_resumed
        self.chunks_resumed += marker.rows_resumed > 0
        self.prompt_tokens += marker.prompt_tokens
        self.completion_tokens += marker.completion_tokens
        self.start = min(filter(None, (self.start, marker.start)))
        self.end = max(self.end, marker.end)

    @property
    def tokens_per_second(self) -> float:
        """Tokens, read and written, from the first chunk's start to the last chunk's end."""
        if not self.end:
            return 0.0
        seconds = (
            datetime.fromisoformat(self.end) - datetime.fromisoformat(self.start)
        ).total_seconds()
        return (self.prompt_tokens + self.completion_tokens) / max(seconds, 1e-3)


@dataclass(slots=True, kw_only=True)
class Findings:
    """What a check of a run found.

    Attributes:
        problems: One line for each thing missing, misaligned or damaged.
        asked: Rows by task.
        right: Exact matches by task.
        workers: Totals by worker id.
        chunk_workers: Who published each chunk.
        total: The same over all workers.
    """

    problems: list[str] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    workers: dict[str, WorkerTotals] = field(default_factory=dict)
    chunk_workers: dict[str, str] = field(default_factory=dict)
    total: WorkerTotals = field(default_factory=WorkerTotals)

    @property
    def accuracy(self) -> dict[str, float]:
        """Task to share of exact matches, 0 to 1; a missing row is a wrong one."""
        return {task: self.right[task] / self.asked[task] for task in sorted(self.asked)}

    @property
    def passed(self) -> bool:
        """No problem, and every task accurate enough."""
        return not self.problems and min(self.accuracy.values(), default=0) >= REQUIRED_ACCURACY


def read_markers(run: Path) -> dict[str, Marker]:
    """Read the valid marker of every published chunk: the one of the highest generation.

    Raises:
        BatchinferError: A marker is empty or damaged.
    """
    newest: dict[str, tuple[int, str]] = {}
    for path in sorted((run / layout.OUTPUTS).glob("*")):
        parsed = layout.parse_marker(path.name)
        if parsed is not None:
            name, generation = parsed
            newest[name] = max(newest.get(name, (-1, "")), (generation, path.name))
    return {
        name: codec.decode((run / layout.OUTPUTS / file).read_bytes(), Marker, name=file)
        for name, (_, file) in newest.items()
    }


def _read_output(run: Path, chunk: Chunk, marker: Marker) -> list[dict[str, Any]]:
    """Read the output that a marker vouches for, or raise DamagedOutput."""
    path = run / layout.OUTPUTS / marker.output
    if not path.is_file():
        raise DamagedOutput(f"output {marker.output} is gone, though its marker names it")
    data = path.read_bytes()
    if codec.sha256(data) != marker.output_sha256:
        raise DamagedOutput(f"output {marker.output} is not what its marker vouches for (sha256)")
    if marker.chunk_sha256 != chunk.sha256:
        raise DamagedOutput(f"output {marker.output} was made from another chunk (sha256)")
    lines = data.split(b"\n")
    if lines.pop() != b"":
        raise DamagedOutput(f"output {marker.output} does not end with a newline")
    if len(lines) != chunk.rows:
        raise DamagedOutput(f"output {marker.output} has {len(lines)} rows, expected {chunk.rows}")
    if marker.rows_ok + marker.rows_error != chunk.rows:
        raise DamagedOutput(f"marker of {marker.output} counts other rows than its chunk has")
    return [json.loads(line) for line in lines]


def check_run(job_folder: Path, run: Path, prompts: list[str]) -> Findings:
    """Compare every row of a run with the prompt that it must answer. Read-only.

    Args:
        job_folder: Of the job; only its job.json is read.
        run: The run's folder; outputs are found through their markers alone.
        prompts: Of the whole data set, by row number: what the demo wrote before the split, so
            that a mistake of the splitter is found too.
    """
    findings = Findings()
    findings.asked.update(example_of(prompt).task for prompt in prompts)
    job = codec.decode((job_folder / layout.JOB_KEY).read_bytes(), Job, name=layout.JOB_KEY)
    try:
        markers = read_markers(run)
    except BatchinferError as error:
        findings.problems.append(error.message)
        return findings
    next_row = 0
    for chunk in job.chunks:
        if chunk.first_row != next_row:
            findings.problems.append(f"chunk {chunk.name} starts at row {chunk.first_row}")
        next_row = chunk.first_row + chunk.rows
        marker = markers.get(chunk.name)
        if marker is None:
            findings.problems.append(f"chunk {chunk.name} has no marker")
            continue
        findings.workers.setdefault(marker.worker, WorkerTotals()).add(marker)
        findings.total.add(marker)
        findings.chunk_workers[chunk.name] = marker.worker
        try:
            lines = _read_output(run, chunk, marker)
        except (DamagedOutput, json.JSONDecodeError) as error:
            findings.problems.append(str(error))
            continue
        for index, line in enumerate(lines):
            _check_row(findings, line, chunk.first_row + index, prompts)
    if next_row != len(prompts):
        findings.problems.append(f"the job has {next_row} rows, expected {len(prompts)}")
    return findings


def _check_row(findings: Findings, line: dict[str, Any], row: int, prompts: list[str]) -> None:
    if line.get("_row") != row or line.get("_id") != str(row) or row >= len(prompts):
        findings.problems.append(
            f"row {row}: its place holds _row {line.get('_row')!r}, _id {line.get('_id')!r}"
        )
        return
    if line.get("status") != 200:
        findings.problems.append(f"row {row}: {line.get('error')}")
        return
    example = example_of(prompts[row])
    if line["body"]["choices"][0]["message"]["content"] == example.answer:
        findings.right[example.task] += 1
