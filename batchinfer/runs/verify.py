"""`batchinfer verify`: prove that a run is complete and sound, or list its problems and how to fix them.

Outputs and chunks are read line by line, so the memory used does not grow with their size.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from batchinfer.cli.config_commands import config_command
from batchinfer.cli.options import read_recorded, words_of
from batchinfer.cli.terminal import say
from batchinfer.core import codec, layout
from batchinfer.core.clock import Clock
from batchinfer.core.errors import InputError, ObjectNotFound, RunUnsound
from batchinfer.core.option_help import NO_OPTION, Opt
from batchinfer.core.printable import one_line
from batchinfer.core.records import Marker, Record, Run
from batchinfer.core.shell import quote
from batchinfer.formats.lines import read_line
from batchinfer.ledger.audit import CORRUPT, KINDS, LEFTOVER, Finding, audit, find_target
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.inventory import in_parallel, take_inventory
from batchinfer.ledger.jobs import ChunkRef, OpenStore
from batchinfer.prompts import json_lines
from batchinfer.prompts.types import PromptConfig, RowError
from batchinfer.runs.overview import add_up
from batchinfer.storage.scratch import Scratch, remove_quietly
from batchinfer.worker.worker_config import WorkerConfig

logger = logging.getLogger(__name__)

NUM_COMPARISONS = 4
"""Number of chunks that --deep compares with their outputs at the same time."""
MAX_PROBLEMS = 5
"""Largest number of problems that are reported of one output. That of another chunk would have one in each line."""
_ORDER_OF_FIXES = ("chunk", "clean", "resume", "redo", "worker")
"""Names of fixes, in the order in which the user should apply them: a fix may need an earlier one."""
_SHOWN = 10
"""Number of findings of one kind and one fix that are shown in full; the others are only counted."""


_RUN_CODE = (
    *("trust-remote-code", "middleware", "worker-cls", "worker-extension-cls", "scheduler-cls"),
    *("distributed-executor-backend", "kv-transfer-config", "ec-transfer-config"),
    *("tool-parser-plugin", "reasoning-parser-plugin", "io-processor-plugin", "plugin"),
    *("logits-processors", "processors", "server-command"),
)
"""Names of options that make a worker run code which they name, and parts of such names."""


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
        place = quote(self.run)
        redo = " ".join(f"--redo {quote(name)}" for name in dict.fromkeys(subjects))
        return {
            "worker": self.worker,
            "redo": f"batchinfer clean {place} {redo} --yes",
            "clean": f"batchinfer clean {place} --yes",
            "resume": f"batchinfer stop --resume {place}",
            "chunk": "restore the chunk as job.json describes it, or split again into another job",
        }[fix]


def run_verify(config: VerifyConfig, *, open_store: OpenStore, clock: Clock) -> Verdict:
    """Verify one run. Nothing in the run is changed.

    Args:
        config: What to verify.
        open_store: Opens stores by URL.
        clock: The clock that decides which workers count as alive.

    Raises:
        InputError: there is no run, or the run's job cannot be found.
    """
    store = open_store(config.run)
    inventory = take_inventory(store, now=clock.now())
    target = find_target(store, open_store, job_url=config.job)
    sound, findings = audit(target, inventory)
    prompt = prompt_of(target.run)
    passed = [] if config.deep else [marker for _, marker in sound]
    with ExitStack() as stack:
        if config.deep:
            logger.info("reading %d chunks and their outputs", len(sound))
            scratch = stack.enter_context(closing(Scratch(config.scratch_dir)))

        def compare(pair: tuple[ChunkRef, Marker]) -> tuple[str, list[str]]:
            """Compare a chunk with its output. Return how to fix what is wrong, and the problems."""
            ref, marker = pair
            output = scratch.new_path("output")
            with ExitStack() as copies:
                copies.callback(remove_quietly, output)
                try:
                    store.download(layout.output_key(marker.output), output)
                    chunk = fetch(open_store(ref.root), ref, scratch).path
                    copies.callback(remove_quietly, chunk)
                    found = _problems_of(output, chunk, ref, marker, prompt)
                    return "redo", list(islice(found, MAX_PROBLEMS))
                except ObjectNotFound:
                    return "redo", [f"{marker.output}: vanished"]
                except InputError as error:
                    return "chunk", [f"the chunk itself: {error.message}"]

        compared = in_parallel(compare, sound if config.deep else (), NUM_COMPARISONS)
        for (fix, problems), (ref, marker) in zip(compared, sound, strict=config.deep):
            passed += [] if problems else [marker]
            for problem in problems:
                findings.append(Finding(CORRUPT, ref.name, problem, fix))
    worker = worker_command(target.run, store.url, target.job_url)
    kinds = Counter(finding.kind for finding in findings)
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
    findings.sort(key=lambda it: (_ORDER_OF_FIXES.index(it.fix), KINDS.index(it.kind)))
    return Verdict(result, findings, store.url, worker)


# --------------------------------------------------------------------------- an output and its chunk, line by line


def _problems_of(
    output: Path, chunk: Path, ref: ChunkRef, marker: Marker, prompt: PromptConfig
) -> Iterator[str]:
    """Yield what is wrong with an output.

    Args:
        output: The file of the output.
        chunk: The file of the chunk's lines.
        ref: The chunk.
        marker: The chunk's newest marker.
        prompt: The run's options about prompts, which name the column of ids.
    """
    digest = hashlib.sha256()
    codes: Counter[str] = Counter()
    num_lines, wanted = 0, ref.rows_to_do
    with output.open("rb") as lines, chunk.open("rb") as rows:
        for line in lines:
            digest.update(line)
            if num_lines < wanted:
                row = ref.first_row + num_lines
                code, problems = _check_line(line, rows.readline(), row, prompt)
                yield from (f"line {num_lines}: {problem}" for problem in problems)
                codes.update(() if code is None else (code,))
            num_lines += 1
    if digest.hexdigest() != marker.output_sha256:
        yield f"sha256 {digest.hexdigest()[:12]}…, the marker says {marker.output_sha256[:12]}…"
    if num_lines != wanted:
        yield f"{num_lines} lines, the chunk has {wanted} rows"
    num_ok = codes.pop("", 0)
    if (num_ok, codes.total()) != (marker.rows_ok, marker.rows_error):
        says = f"the marker says {marker.rows_ok} and {marker.rows_error}"
        yield f"{num_ok} rows ok and {codes.total()} errors, {says}"
    if marker.errors and dict(codes) != marker.errors:
        yield f"errors {dict(codes)}, the marker says {marker.errors}"


def _check_line(
    line: bytes, row: bytes, number: int, prompt: PromptConfig
) -> tuple[str | None, list[str]]:
    """Compare an output line with its row. Return its error code, "" for an answer, and the problems found.

    The code is None if the line cannot be read. `number` is the row's number in the job.
    """
    if not line.endswith(b"\n"):
        return None, ["is cut off"]
    try:
        answer = read_line(line[:-1])
    except InputError as error:
        return None, [error.message]
    found = []
    if answer.row != number:
        found.append(f"is of row {answer.row}, expected {number}")
    own = _id_of(row, number, prompt)
    if own is None and answer.is_ok:
        found.append("is an answer to a row that cannot be read")
    # The worker may give an error row its number as id.
    if answer.id != own and (answer.is_ok or answer.id != str(number)):
        found.append(f"has the id {answer.id!r}, expected {own or number!r}")
    return answer.code, found


def _id_of(row: bytes, number: int, prompt: PromptConfig) -> str | None:
    """Return the id that the worker gives to a row; None if the row cannot be read."""
    try:
        columns = json_lines.decode_object(row)
    except RowError:
        return None
    own = columns.get(prompt.column("id") or json_lines.ID_FIELD)
    if prompt.request_format == "openai-batch":
        own = columns.get("custom_id") or own
    return str(number) if own is None else json_lines.as_id(own)


# --------------------------------------------------------------------------- the command that goes on with a run


def prompt_of(run: Run) -> PromptConfig:
    """Return the run's options about prompts; the defaults if somebody has made them unreadable in run.json."""
    try:
        return codec.convert(run.config.get("prompt") or {}, PromptConfig)
    except msgspec.ValidationError:
        return PromptConfig()


def worker_command(run: Run, url: str, job_url: str) -> str:
    """Return a bash command that starts a worker for the run at `url`.

    The command has the options that decide answers, and the server's as the run's first worker had them. Other options
    (about the machine, or how often to checkpoint) are not in run.json and may differ from worker to worker. Some
    options take a file. run.json holds only the file's text, so the command passes the text as `<(printf …)`.

    Anybody who can write to the bucket can change run.json, so every value is quoted, and options that make a worker
    run code, such as --trust-remote-code, are left out. A comment after the command names them; the user decides.
    """
    try:
        prompt = codec.convert(run.config.get("prompt") or {}, PromptConfig)
        values = msgspec.structs.asdict(prompt) | {"sampling": prompt.body}
        values |= read_recorded(WorkerConfig, run.recorded.get("options") or {})
        typed = codec.convert(run.recorded.get("server_args") or [], list[str])
        parts = [*words_of(WorkerConfig, values), *((word, quote(word)) for word in typed)]
    except msgspec.ValidationError:  # somebody has edited run.json
        parts = [("…", "…")]
    words = ["batchinfer worker", "--job", quote(job_url), "--output", quote(url)]
    left_out, is_unsafe = list[str](), False
    for word, text in parts:
        if word.startswith("-"):
            name = word.partition("=")[0].replace("_", "-")
            is_unsafe = _runs_code(name)
            left_out += [one_line(name)] * is_unsafe
        if not is_unsafe:
            words.append(text)
    if left_out:
        shown = ", ".join(left_out)
        words.append(f"# {shown} left out: add it only if you trust the code that it runs")
    return " ".join(words)


def _runs_code(option: str) -> bool:
    """Whether an option makes a worker run code. vLLM takes the beginnings of names, and --name.member, too."""
    name = option.removeprefix("--").partition(".")[0]
    is_cut = option != name and name not in ("", "reasoning-parser")
    return any(each in option or (is_cut and each.startswith(name)) for each in _RUN_CODE)


# --------------------------------------------------------------------------- the command line


@config_command("verify", VerifyConfig)
def command(config: VerifyConfig) -> dict[str, Any]:
    """Prove that a run is complete and sound, or say what is missing, corrupt, foreign or left over.

    Exit status 0: every chunk is done and sound (leftovers are named, but do no harm); 1: it is not, and each finding
    comes with the command that fixes it.
    """
    from batchinfer.storage.opening import open_store

    verdict = run_verify(config, open_store=open_store, clock=Clock())
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
