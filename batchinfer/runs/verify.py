"""`batchinfer verify`: prove that a run is complete and sound, or list its problems and how to fix them."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby, islice
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

import msgspec

from batchinfer.cli.run_commands import run_command
from batchinfer.cli.terminal import say
from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.errors import InputError, ObjectNotFound, RunUnsound
from batchinfer.core.option_help import NO_OPTION, Opt
from batchinfer.core.printable import one_line
from batchinfer.core.records import Marker, Record
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
from batchinfer.runs.overview import add_up
from batchinfer.runs.pairs import MAX_PROBLEMS, pair_of_files, problems_of, prompt_of
from batchinfer.runs.resume_command import worker_command

NUM_COMPARISONS = 4
"""Number of chunks that --deep compares with their outputs at the same time."""
_ORDER_OF_FIXES = ("run", "job", "chunk", "clean", "resume", "redo", "worker", "hand")
"""Names of fixes, in the order in which the user should apply them: a fix may need an earlier one."""
_SHOWN = 10
"""Number of findings of one kind and one fix that are shown in full; the others are only counted."""


class VerifyConfig(Record, frozen=True, kw_only=True):
    """What to verify."""

    run: Annotated[str, NO_OPTION]
    job: Annotated[str, Opt(metavar="URL")] = ""
    """The job, where run.json and the run's place do not tell."""
    deep: bool = False
    """Read every byte: sha256, and each line's row, order and id."""
    as_json: Annotated[bool, Opt(flag="--json")] = False
    """All findings in the result, none as text."""
    scratch_dir: Annotated[str | None, Opt(form="folder")] = None
    """Local folder for the chunks and outputs that --deep reads."""


class Verdict(NamedTuple):
    """What `verify` found. `result` is the summary that is printed to stdout; it has only the numbers of findings."""

    result: dict[str, Any]
    findings: list[Finding]
    """In the order in which they should be fixed."""
    run: str
    worker: str
    """The worker command that does the missing chunks."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is missing, corrupt or foreign. Leftovers do not matter."""
        return bool(self.result["status"] == "SOUND")

    def lines(self) -> Iterator[str]:
        """Yield lines of text: findings by fix and kind, a few of each, and after them how to fix them."""
        for (fix, kind), group in groupby(self.findings, key=attrgetter("fix", "kind")):
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
        first = next(it.fix for it in self.findings if it.kind != LEFTOVER or it.fix == "resume")
        return RunUnsound(
            f"{self.run}: {sound} of {total} chunks are done and sound; {', '.join(counts)}",
            hint=self.command(first, [it.subject for it in self.findings if it.fix == first]),
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
    target = find_target(store, inventory, open_store, job_url=config.job)
    audit = Audit(target, inventory)
    sound = audit.check_all()
    if config.deep:
        show(f"reading {len(sound)} chunks and their outputs")
        prompt = prompt_of(target.run)

        def compare(pair: tuple[ChunkRef, Marker]) -> tuple[str, list[str]]:
            """Compare a chunk with its output. Return how to fix what is wrong, and the problems."""
            ref, marker = pair
            try:
                with pair_of_files(
                    ref, marker, store, open_store(ref.root), config.scratch_dir
                ) as files:
                    found = problems_of(*files, ref, marker, prompt)
                    return "redo", list(islice(found, MAX_PROBLEMS))
            except ObjectNotFound:
                return "redo", [f"{marker.output}: vanished"]
            except InputError as error:
                return "chunk", [f"the chunk itself: {error.message}"]

        compared = in_parallel(compare, sound, NUM_COMPARISONS)
        passed = []
        for (fix, problems), (ref, marker) in zip(compared, sound, strict=True):
            passed += [] if problems else [marker]
            for problem in problems:
                audit.add(CORRUPT, ref.name, problem, fix)
    else:
        passed = [marker for _, marker in sound]
    worker = worker_command(target.run, store.url, target.job_url)
    kinds = Counter(finding.kind for finding in audit.findings)
    result = {
        "status": "SOUND" if set(kinds) <= {LEFTOVER} else "UNSOUND",
        "run": store.url,
        "job": target.job_url,
        "fingerprint": target.run.fingerprint,
        "is_deep": config.deep,
        "chunks_total": len(target.expected),
        "chunks_sound": len(passed),
        **{kind: kinds[kind] for kind in KINDS},
        "output_bytes": sum(marker.output_bytes for marker in passed),
        **msgspec.structs.asdict(add_up(passed)),
    }
    findings = sorted(
        audit.findings, key=lambda it: (_ORDER_OF_FIXES.index(it.fix), KINDS.index(it.kind))
    )
    return Verdict(result, findings, store.url, worker)


@run_command("verify", VerifyConfig)
def command(config: VerifyConfig) -> dict[str, Any]:
    """Prove that a run is complete and sound, or say what is missing, corrupt, foreign or left over.

    Exit status 0: every chunk is done and sound (leftovers are named, but do no harm); 1: it is not, and each finding
    comes with the command that fixes it.
    """
    from batchinfer.storage.opening import open_store

    verdict = run_verify(config, open_store=open_store, clock=SystemClock(), show=say)
    result = verdict.as_json() if config.as_json else verdict.result
    for line in () if config.as_json else verdict.lines():
        for part in line.split("\n"):  # a command to copy may have several lines
            say(part)
    if not verdict.is_sound:
        error = verdict.error()
        error.attach_result(result)
        raise error
    say(f"{verdict.run}: complete and sound, {result['chunks_total']} chunks")
    return result
