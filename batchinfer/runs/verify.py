"""`batchinfer verify`: prove that a run is complete and sound, or list its problems and how to fix them."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from batchinfer.cli.settings import common_options
from batchinfer.cli.terminal import say
from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.errors import RunUnsound
from batchinfer.core.printable import one_line
from batchinfer.core.records import Marker, Record, Run
from batchinfer.ledger.audit import (
    CORRUPT,
    KINDS,
    LEFTOVER,
    Audit,
    Finding,
    find_target,
)
from batchinfer.ledger.inventory import in_parallel, take_inventory
from batchinfer.ledger.jobs import ChunkRef, OpenStore
from batchinfer.runs.alignment import Alignment
from batchinfer.runs.overview import add_up
from batchinfer.runs.resume_command import worker_command
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch

NUM_COMPARISONS = 4
"""Number of chunks that --deep compares with their outputs at the same time."""
_ORDER_OF_FIXES = ("run", "job", "chunk", "clean", "resume", "redo", "worker", "hand")
"""Names of fixes, in the order in which the user should apply them: a fix may need an earlier one."""
_SHOWN = 10
"""Number of findings of one kind and one fix that are shown in full; the others are only counted."""


class VerifyConfig(Record, frozen=True, kw_only=True):
    """What to verify. `job` is needed only if the job is not found by the run's URL and run.json."""

    run: str
    job: str | None = None
    is_deep: bool = False
    scratch_dir: str | None = None


class Verdict(NamedTuple):
    """What `verify` found. `result` is the summary that is printed to stdout; it has only the numbers of findings."""

    result: dict[str, Any]
    findings: list[Finding]
    run: str
    worker: str
    """The worker command that does the missing chunks."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is missing, corrupt or foreign. Leftovers do not matter."""
        return all(finding.kind == LEFTOVER for finding in self.findings)

    def lines(self) -> Iterator[str]:
        """Yield lines of text: findings by fix and kind, a few of each, and after them how to fix them."""
        order = sorted(
            self.findings, key=lambda it: (_ORDER_OF_FIXES.index(it.fix), KINDS.index(it.kind))
        )
        for (fix, kind), group in groupby(order, key=attrgetter("fix", "kind")):
            found = list(group)
            for finding in found[:_SHOWN]:
                yield one_line(f"{kind}: {finding.subject}: {finding.problem}")
            if len(found) > _SHOWN:
                yield f"{kind}: … and {len(found) - _SHOWN} more (--json lists them all)"
            yield f"  fix: {self.command(fix, [finding.subject for finding in found])}"
            if fix == "redo":
                yield f"  then: {self.worker}"

    def as_json(self) -> dict[str, Any]:
        """The summary with all findings added, each with the command or sentence that says how to fix it."""
        findings = [
            {**msgspec.to_builtins(found), "mend": self.command(found.fix, [found.subject])}
            for found in self.findings
        ]
        return {**self.result, "findings": findings}

    def error(self) -> RunUnsound:
        """The error for a run that is not sound. The error's hint says what the user should do first."""
        counts = [f"{self.result[kind]} {kind}" for kind in KINDS if self.result[kind]]
        sound, total = self.result["chunks_sound"], self.result["chunks_total"]
        # No worker starts while the run is stopped, so that request comes first, though it does no harm.
        grave = [it for it in self.findings if it.kind != LEFTOVER or it.fix == "resume"]
        first = min((it.fix for it in grave), key=_ORDER_OF_FIXES.index)
        return RunUnsound(
            f"{self.run}: {sound} of {total} chunks are done and sound; {', '.join(counts)}",
            hint=self.command(first, [it.subject for it in grave if it.fix == first]),
        )

    def command(self, fix: str, subjects: list[str]) -> str:
        """Return the command that fixes findings, or a sentence if no command does.

        `fix` is the name of the fix, and `subjects` are the chunks or keys of the findings.
        """
        names, place = list(dict.fromkeys(subjects)), shlex.quote(self.run)
        scheme = self.run.partition("://")[0] if "://" in self.run else ""
        remove = {"": "rm", "s3": "aws s3 rm", "gs": "gcloud storage rm"}.get(scheme, "remove")
        redo = " ".join(f"--redo {shlex.quote(name)}" for name in names)
        keys = " ".join(shlex.quote(f"{self.run}/{name}") for name in names)
        return {
            "worker": self.worker,
            "redo": f"batchinfer clean {place} {redo} --yes",
            "clean": f"batchinfer clean {place} --yes",
            "resume": f"batchinfer stop --resume {place}",
            "run": "put run.json back as the run's first worker wrote it; else nothing tells how the answers were made",
            "job": f"batchinfer verify --job JOB {place}  # with the job that the run is of",
            "chunk": "restore the chunk as job.json describes it, or split again into another job",
            "hand": f"{remove} {keys}",
        }[fix]


def run_verify(
    config: VerifyConfig,
    *,
    open_store: OpenStore,
    clock: Clock,
    show: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Verify one run. Nothing in the run is changed.

    Args:
        config: What to verify.
        open_store: Opens stores by URL.
        clock: The clock that decides which workers count as alive.
        show: Called with each line of text about the progress of `verify`.

    Raises:
        InputError: there is no run, or the run's job cannot be found.
    """
    store = open_store(config.run)
    inventory = take_inventory(store, now=clock.now())
    target = find_target(
        store, inventory, open_store, usage="batchinfer verify {}", job_url=config.job
    )
    audit = Audit(target, inventory)
    sound = audit.check_all()
    if config.is_deep:
        show(f"reading {len(sound)} chunks and their outputs")
        compared = _compare(config, target.run, store, sound, open_store)
    else:
        compared = ([] for _ in sound)
    passed = []
    for problems, (ref, marker) in zip(compared, sound, strict=True):
        passed += [] if problems else [marker]
        for problem in problems:
            fix = "chunk" if problem.startswith("the chunk itself") else "redo"
            audit.add(CORRUPT, ref.name, problem, fix)
    worker = worker_command(target.run, store.url, target.job_url)
    kinds = Counter(finding.kind for finding in audit.findings)
    totals = add_up(passed)
    result = {
        "status": "SOUND" if set(kinds) <= {LEFTOVER} else "UNSOUND",
        "run": store.url,
        "job": target.job_url,
        "fingerprint": target.run.fingerprint,
        "is_deep": config.is_deep,
        "chunks_total": len(target.expected),
        "chunks_sound": len(passed),
        **{kind: kinds[kind] for kind in KINDS},
        "rows_ok": totals.rows_ok,
        "rows_error": totals.rows_error,
        "errors": totals.errors,
        "output_bytes": sum(marker.output_bytes for marker in passed),
        "prompt_tokens": totals.prompt_tokens,
        "completion_tokens": totals.completion_tokens,
    }
    return Verdict(result, audit.findings, store.url, worker)


def _compare(
    config: VerifyConfig,
    run: Run,
    store: Store,
    sound: list[tuple[ChunkRef, Marker]],
    open_store: OpenStore,
) -> Iterator[list[str]]:
    """Compare chunks with their outputs, NUM_COMPARISONS at a time. Yield the problems of each, in order."""
    scratch = Scratch(config.scratch_dir)
    sources = {root: open_store(root) for root in {ref.root for ref, _ in sound}}
    alignment = Alignment(run, store, scratch)

    def compare(pair: tuple[ChunkRef, Marker]) -> list[str]:
        ref, marker = pair
        return alignment.problems(ref, marker, sources[ref.root])

    try:
        yield from in_parallel(compare, sound, NUM_COMPARISONS)
    finally:
        scratch.close()


# --------------------------------------------------------------------------- the command


@click.command("verify")
@click.argument("run")
@click.option(
    "--job", metavar="URL", help="The job, where run.json and the run's place do not tell."
)
@click.option(
    "--deep", is_flag=True, help="Read every byte: sha256, and each line's row, order and id."
)
@click.option("--json", "as_json", is_flag=True, help="All findings in the result, none as text.")
@click.option(
    "--scratch-dir",
    type=click.Path(path_type=Path),
    help="Local folder for the chunks and outputs that --deep reads.",
)
@common_options
def command(
    *, run: str, job: str | None, deep: bool, as_json: bool, scratch_dir: Path | None
) -> dict[str, Any]:
    """Prove that a run is complete and sound, or say what is missing, corrupt, foreign or left over.

    Exit status 0: every chunk is done and sound (leftovers are named, but do no harm); 1: it is not, and each finding
    comes with the command that fixes it.
    """
    from batchinfer.storage.opening import open_store

    scratch = str(scratch_dir) if scratch_dir else None
    config = VerifyConfig(run=run, job=job, is_deep=deep, scratch_dir=scratch)
    verdict = run_verify(config, open_store=open_store, clock=SystemClock(), show=say)
    result = verdict.as_json() if as_json else verdict.result
    for line in () if as_json else verdict.lines():
        for part in line.split("\n"):  # a command to copy may have several lines
            say(part)
    if not verdict.is_sound:
        error = verdict.error()
        error.attach_result(result)
        raise error
    say(f"{verdict.run}: complete and sound, {result['chunks_total']} chunks")
    return result
