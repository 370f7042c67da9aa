"""`batchinfer verify`: prove that a run is complete and sound, or list its problems and how to fix them.

Outputs and chunks are read line by line, so the memory used does not grow with their size.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from batchinfer.cli.config_commands import config_command
from batchinfer.cli.options import read_recorded, words_of
from batchinfer.cli.terminal import say
from batchinfer.core import codec, layout
from batchinfer.core.clock import Clock
from batchinfer.core.counts import OTHER
from batchinfer.core.errors import InputError, RunUnsound
from batchinfer.core.option_help import NO_OPTION, Opt
from batchinfer.core.printable import one_line
from batchinfer.core.records import Marker, Record, Run
from batchinfer.core.shell import quote
from batchinfer.engines.engine_config import grouped
from batchinfer.formats.lines import read_line
from batchinfer.ledger.audit import CORRUPT, KINDS, LEFTOVER, Finding, RunTarget, audit, find_target
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
_SHOWN = 10
"""Number of findings with one fix that are shown in full; the others are only counted."""


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
    mends: dict[str, str]
    """The commands, or sentences, that say how to fix the findings, by their `fix`: in the order to apply them."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is missing, corrupt or foreign. Leftovers do not matter."""
        return bool(self.result["status"] == "SOUND")

    def lines(self) -> Iterator[str]:
        """Yield lines of text: the findings of each fix, the first ones in full, and after them how to fix them."""
        for fix, mend in self.mends.items():
            found = [finding for finding in self.findings if finding.fix == fix]
            for finding in found[:_SHOWN]:
                yield one_line(f"{finding.kind}: {finding.subject}: {finding.problem}")
            if len(found) > _SHOWN:
                yield f"… and {len(found) - _SHOWN} more (--json lists them all)"
            yield f"  fix: {mend}"

    def as_json(self) -> dict[str, Any]:
        """The summary with all findings added, and how to fix them."""
        findings = msgspec.to_builtins(self.findings)
        return {**self.result, "findings": findings, "mends": self.mends}

    def error(self) -> RunUnsound:
        """The error for a run that is not sound. The error's hint says what the user should do first."""
        counts = [f"{self.result[kind]} {kind}" for kind in KINDS if self.result[kind]]
        sound, total = self.result["chunks_sound"], self.result["chunks_total"]
        return RunUnsound(
            f"{self.result['run']}: {sound} of {total} chunks are done and sound; {', '.join(counts)}",
            hint=next(iter(self.mends.values())),
        )


def run_verify(config: VerifyConfig, *, open_store: OpenStore, clock: Clock) -> Verdict:
    """Verify one run. Nothing in the run is changed.

    Args:
        config: What to verify.
        open_store: Opens stores by URL.
        clock: The clock that decides which workers count as alive.

    Raises:
        InputError: there is no run, or the run's job cannot be found.
    """
    # A client for each chunk would reach no connection again.
    open_store = functools.cache(open_store)
    store = open_store(config.run)
    inventory = take_inventory(store, now=clock.now())
    target = find_target(store, open_store, job_url=config.job)
    sound, findings = audit(target, inventory)
    prompt = prompt_of(target.run)

    def compare(pair: tuple[ChunkRef, Marker]) -> list[Finding]:
        """Read a chunk and its output, and return what is wrong with them."""
        ref, marker = pair
        output = scratch.new_path("output")
        fix, problems = "redo", list[str]()
        with ExitStack() as copies:
            copies.callback(remove_quietly, output)
            try:
                store.download(layout.output_key(marker.output), output)
                chunk = fetch(open_store(ref.root), ref, scratch).path
                copies.callback(remove_quietly, chunk)
                found = _problems_of(output, chunk, ref, marker, prompt)
                problems += islice(found, MAX_PROBLEMS)
            except InputError as error:
                fix, problems = "chunk", [f"the chunk itself: {error.message}"]
        return [Finding(CORRUPT, ref.name, problem, fix) for problem in problems]

    if config.deep:
        logger.info("reading %d chunks and their outputs", len(sound))
        with closing(Scratch(config.scratch_dir)) as scratch:
            for found in in_parallel(compare, sound, NUM_COMPARISONS):
                findings += found
    broken = {finding.subject for finding in findings}
    passed = [marker for ref, marker in sound if ref.name not in broken]
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
    return Verdict(result, findings, _mends(target, store.url, findings))


def _mends(target: RunTarget, url: str, findings: list[Finding]) -> dict[str, str]:
    """Return how to fix findings, by their `fix`, in the order to apply them: a fix may need an earlier one."""
    place, again = quote(url), dict.fromkeys(it.subject for it in findings if it.fix == "redo")
    redo = "".join(f" --redo={quote(name)}" for name in again)
    mends = {
        "chunk": "restore the chunk as job.json describes it, or split again into another job",
        "resume": f"batchinfer stop --resume {place}",
        "redo": f"batchinfer clean {place}{redo} --yes",
        "worker": worker_command(target.run, url, target.job_url),
        "clean": f"batchinfer clean {place} --yes",
    }
    wanted = {finding.fix for finding in findings} | ({"worker"} if again else set())
    return {fix: mend for fix, mend in mends.items() if fix in wanted}


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
        for num_lines, line in enumerate(lines, 1):
            digest.update(line)
            if num_lines > wanted:
                continue
            number = ref.first_row + num_lines - 1
            own = _id_of(rows.readline(), number, prompt)
            if not line.endswith(b"\n"):
                yield f"line {num_lines - 1}: is cut off"
                continue
            try:
                answer = read_line(line)
            except InputError as error:
                yield f"line {num_lines - 1}: {error.message}"
                continue
            codes[answer.code] += 1
            # The worker may give an error row its number as id.
            is_own = answer.id == own or (not answer.is_ok and answer.id == str(number))
            if answer.row != number or not is_own:
                found = f"row {answer.row} with the id {answer.id!r}"
                yield f"line {num_lines - 1}: is of {found}, expected row {number} with {own!r}"
    if digest.hexdigest() != marker.output_sha256:
        yield f"sha256 {digest.hexdigest()[:12]}…, the marker says {marker.output_sha256[:12]}…"
    if num_lines != wanted:
        yield f"{num_lines} lines, the chunk has {wanted} rows"
    num_ok = codes.pop("", 0)
    # A marker may have no codes. It counts what comes after many together, in the order in which rows were finished.
    by_code = dict(codes) if marker.errors and OTHER not in marker.errors else marker.errors
    counted = (num_ok, codes.total(), by_code)
    if counted != (said := (marker.rows_ok, marker.rows_error, marker.errors)):
        yield "rows ok, errors and their codes: {} {} {}, the marker says {} {} {}".format(
            *counted, *said
        )


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
        parts = [*words_of(WorkerConfig, values)]
        for option, more in grouped(typed):
            name = option.partition("=")[0].replace("_", "-")
            parts.append((name, " ".join(map(quote, (option, *more)))))
    except msgspec.ValidationError:  # somebody has edited run.json
        parts = [("…", "…")]
    words = ["batchinfer worker", "--job", quote(job_url), "--output", quote(url)]
    words += [text for name, text in parts if not _runs_code(name)]
    if left_out := ", ".join(one_line(name) for name, _ in parts if _runs_code(name)):
        words.append(f"# {left_out} left out: add it only if you trust the code that it runs")
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
    say(f"{result['run']}: complete and sound, {result['chunks_total']} chunks")
    return result
