"""`batchinfer verify`: prove that a run is complete and sound, or list its problems and how to fix them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
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
    RunTarget,
    counts_by_kind,
    find_target,
)
from batchinfer.ledger.inventory import in_parallel, take_inventory
from batchinfer.ledger.jobs import ChunkRef, OpenStore
from batchinfer.runs.alignment import Alignment
from batchinfer.runs.resume_command import worker_command
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch

NUM_COMPARISONS = 4
"""Number of chunks that --deep compares with their outputs at the same time."""
_ORDER_OF_FIXES = ("run", "job", "chunk", "redo", "clean", "resume", "worker", "hand")
"""Names of fixes, in the order in which the user should apply them: a fix may need an earlier one."""
_SHOWN = 10
"""Number of findings of one kind and one fix that are shown in full; the others are only counted."""


class VerifyConfig(Record, frozen=True, kw_only=True):
    """What to verify.

    `job` and `manifests` are needed only if the job is not found by the run's URL and run.json.
    """

    run: str
    job: str | None = None
    manifests: list[str] = []
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
        """Yield lines of text about the findings, grouped by kind and fix.

        Each group has its first few findings, then a line that says how to fix the group.
        """
        # `stop --resume` comes first, because no worker can start while the run is stopped.
        order = sorted(
            self.findings,
            key=lambda found: (found.fix != "resume", KINDS.index(found.kind), found.fix),
        )
        for (kind, fix), group in groupby(order, key=attrgetter("kind", "fix")):
            found = list(group)
            for finding in found[:_SHOWN]:
                yield one_line(f"{kind}: {finding.subject}: {finding.problem}")
            if len(found) > _SHOWN:
                yield f"{kind}: … and {len(found) - _SHOWN} more (--json lists them all)"
            yield f"  fix: {fix_command(fix, (f.subject for f in found), self.run, self.worker)}"
            if fix == "redo":
                yield f"  then: {self.worker}"

    def as_json(self) -> dict[str, Any]:
        """The summary with all findings added, each with the command or sentence that says how to fix it."""
        return {
            **self.result,
            "findings": [
                {
                    **msgspec.to_builtins(finding),
                    "mend": fix_command(finding.fix, [finding.subject], self.run, self.worker),
                }
                for finding in self.findings
            ],
        }

    def error(self) -> RunUnsound:
        """The error for a run that is not sound. The error's hint says what the user should do first."""
        counts = [f"{self.result[kind]} {kind}" for kind in KINDS if self.result[kind]]
        done = f"{self.result['chunks_sound']} of {self.result['chunks_total']} chunks are done and sound"
        grave = [finding for finding in self.findings if finding.kind != LEFTOVER]
        if any(finding.fix in ("redo", "worker") for finding in grave):
            grave += [finding for finding in self.findings if finding.fix == "resume"]
        first = min((finding.fix for finding in grave), key=_ORDER_OF_FIXES.index)
        subjects = (finding.subject for finding in grave if finding.fix == first)
        return RunUnsound(
            f"{self.run}: {done}; {', '.join(counts)}",
            hint=fix_command(first, subjects, self.run, self.worker),
        )


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
        store,
        inventory,
        open_store,
        usage="batchinfer verify {}",
        job_url=config.job,
        manifests=config.manifests,
    )
    audit = target.audit(inventory)
    sound = audit.check_all()
    if config.is_deep:
        show(f"reading {len(sound)} chunks and their outputs")
        with_problems = _compare(config, target.run, store, sound, open_store)
    else:
        with_problems = ((ref, marker, []) for ref, marker in sound)
    for ref, marker, problems in with_problems:
        if not problems:
            audit.count(marker)
        for problem in problems:
            fix = "chunk" if problem.startswith("the chunk itself") else "redo"
            audit.add(CORRUPT, ref.name, problem, fix)
    result = _result(config, store.url, target, audit)
    worker = worker_command(target.run, store.url, target.job_url, config.manifests)
    return Verdict(result, audit.findings, store.url, worker)


def _compare(
    config: VerifyConfig,
    run: Run,
    store: Store,
    sound: list[tuple[ChunkRef, Marker]],
    open_store: OpenStore,
) -> Iterator[tuple[ChunkRef, Marker, list[str]]]:
    """Compare chunks with their outputs, NUM_COMPARISONS at a time. Yield each chunk, its marker and its problems."""
    scratch = Scratch(config.scratch_dir)
    sources = {root: open_store(root) for root in {ref.root for ref, _ in sound}}
    alignment = Alignment(run, store, scratch)

    def compare(pair: tuple[ChunkRef, Marker]) -> list[str]:
        ref, marker = pair
        return alignment.problems(ref, marker, sources[ref.root])

    try:
        compared = in_parallel(compare, sound, NUM_COMPARISONS)
        for (ref, marker), problems in zip(sound, compared, strict=True):
            yield ref, marker, problems
    finally:
        scratch.close()


def _result(config: VerifyConfig, url: str, target: RunTarget, audit: Audit) -> dict[str, Any]:
    counts = counts_by_kind(audit.findings)
    return {
        "status": "SOUND" if not sum(counts[kind] for kind in KINDS[:-1]) else "UNSOUND",
        "run": url,
        "job": target.job_url,
        "fingerprint": target.run.fingerprint,
        "is_deep": config.is_deep,
        "chunks_total": len(target.expected),
        "chunks_sound": audit.totals.chunks,
        **counts,
        "rows_ok": audit.totals.rows_ok,
        "rows_error": audit.totals.rows_error,
        "errors": audit.totals.errors,
        "output_bytes": audit.totals.output_bytes,
        "prompt_tokens": audit.totals.prompt_tokens,
        "completion_tokens": audit.totals.completion_tokens,
    }


# --------------------------------------------------------------------------- fixes


def fix_command(fix: str, subjects: Iterable[str], run: str, worker: str) -> str:
    """Return the command that fixes findings, or a sentence if no command does.

    `fix` is the name of the fix, and `subjects` are the chunks or keys of the findings. `run` is the run's URL.
    `worker` is the command that does missing chunks.

    >>> fix_command("redo", ["part-00001"], "s3://b/run", "batchinfer worker …")
    'batchinfer clean s3://b/run --redo part-00001 --yes'
    """
    names = list(dict.fromkeys(subjects))
    place = shlex.quote(run)
    if fix == "worker":
        return worker
    if fix == "redo":
        flags = " ".join(f"--redo {shlex.quote(name)}" for name in names)
        return f"batchinfer clean {place} {flags} --yes"
    if fix == "clean":
        return f"batchinfer clean {place} --yes"
    if fix == "resume":
        return f"batchinfer stop --resume {place}"
    if fix == "run":
        return "put run.json back as the run's first worker wrote it; else nothing tells how the answers were made"
    if fix == "job":
        return f"batchinfer verify --job JOB {place}  # with the job that the run is of"
    if fix == "chunk":
        return "restore the chunk as job.json describes it, or split again into another job"
    return _remove_by_hand(run, names)


def _remove_by_hand(run: str, keys: list[str]) -> str:
    scheme = run.partition("://")[0] if "://" in run else ""
    remove = {"": "rm", "s3": "aws s3 rm", "gs": "gcloud storage rm"}.get(scheme, "remove")
    return f"{remove} {' '.join(shlex.quote(f'{run}/{key}') for key in keys)}"


# --------------------------------------------------------------------------- the command


@click.command("verify")
@click.argument("run")
@click.option(
    "--job", metavar="URL", help="The job, where run.json and the run's place do not tell."
)
@click.option(
    "--manifest",
    "manifests",
    multiple=True,
    help="Verify the chunks of this manifest only; needed for lists without a job.json.",
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
def command(**options: Any) -> dict[str, Any]:
    """Prove that a run is complete and sound, or say what is missing, corrupt, foreign or left over.

    Exit status 0: every chunk is done and sound (leftovers are named, but do no harm); 1: it is not, and each finding
    comes with the command that fixes it.
    """
    from batchinfer.storage.opening import open_store

    config = VerifyConfig(
        run=options["run"],
        job=options["job"],
        manifests=list(options["manifests"]),
        is_deep=options["deep"],
        scratch_dir=str(options["scratch_dir"]) if options["scratch_dir"] else None,
    )
    verdict = run_verify(config, open_store=open_store, clock=SystemClock(), show=say)
    result = verdict.as_json() if options["as_json"] else verdict.result
    if not options["as_json"]:
        for line in verdict.lines():
            for part in line.split("\n"):  # a command to copy may have several lines
                say(part)
    if not verdict.is_sound:
        error = verdict.error()
        error.attach_result(result)
        raise error
    say(f"{verdict.run}: complete and sound, {result['chunks_total']} chunks")
    return result
