"""The command `batchinfer generate`: a few prompts over a grid of sampling values, with latencies and rates."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from threading import Event
from typing import Any

import click
import msgspec

from batchinfer.cli.server_args import ServerCommand
from batchinfer.cli.settings import common_options
from batchinfer.cli.terminal import say, write
from batchinfer.cli.values import FORMS, read_pairs
from batchinfer.core import units
from batchinfer.core.errors import BatchinferError, ConfigError
from batchinfer.core.printable import one_line
from batchinfer.core.records import Call, Reply
from batchinfer.engines import Calls
from batchinfer.engines.replies import failure_of
from batchinfer.formats.lines import answer_of, encode_row, read_line
from batchinfer.playground.session import Session, play_options
from batchinfer.prompts.types import Prepared
from batchinfer.worker.command import look_options


@click.command("generate", cls=ServerCommand)
@click.option("-p", "--prompt", "prompts", multiple=True, required=True, help="A prompt, or @FILE.")
@click.option("--grid", multiple=True, metavar="NAME=A,B", help="Values to try; may be repeated.")
@click.option("--plain", "is_plain", is_flag=True, help="Send the prompts as they are, as no chat.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with all figures.")
@play_options()
@look_options
@common_options
def command(
    prompts: tuple[str, ...], grid: tuple[str, ...], **options: Any
) -> dict[str, Any] | None:
    """Answer a few prompts, over a grid of sampling values, and show how fast it went.

    \b
      batchinfer generate --model Qwen/Qwen3-8B --prompt "Why is the sky blue?" \\
          --grid temperature=0.3,0.7,1 --n 2

    Every prompt is answered with every combination of the grid's values. A model with a chat template is sent each
    prompt as a user's message. Answers go to stdout; the table of tokens, latencies and rates comes last, on stderr.
    All requests run together. Exit 1: a request has no answer.
    """  # noqa: D301 - \b keeps click from wrapping the example
    from batchinfer.check.model import has_chat_template

    is_plain, as_json = options.pop("is_plain"), options.pop("as_json")
    texts = [FORMS["text"].read("--prompt", text).removesuffix("\n") for text in prompts]
    session = Session(options, prompt_column="prompt")
    if not all(texts):
        raise ConfigError("--prompt: is empty", hint="say something: --prompt 'Where is Lima?'")
    values = points(grid)
    is_chat = not is_plain and (session.prompt.system_prompt or has_chat_template(session.config))
    try:
        load_seconds = session.open().load_seconds
        tried = trials(session, texts, values, as_chat=bool(is_chat))
        if session.config.engine == "vllm":  # an engine's first step is slower than the others
            session.engine.ask(msgspec.structs.replace(tried[0]["call"], key=("warm-up", 0)))
        start = time.perf_counter()
        answer(session, tried)
        seconds = time.perf_counter() - start
    finally:
        session.close()
    if not as_json:
        show(tried)
    return conclude(tried, seconds, load_seconds, as_json=as_json)


def points(grid: Sequence[str]) -> list[dict[str, Any]]:
    """Return every combination of the values of --grid.

    Raises:
        ConfigError: an option is not NAME=A,B.

    >>> points(["temperature=0,1", "top_p=0.5"])
    [{'temperature': 0, 'top_p': 0.5}, {'temperature': 1, 'top_p': 0.5}]
    """
    lists = []
    for name, equals, values in (each.partition("=") for each in grid):
        if not equals:
            raise ConfigError(f"--grid {name}: expected NAME=A,B", hint="--grid temperature=0,0.7")
        lists.append([read_pairs("--grid", [f"{name}={value}"]) for value in values.split(",")])
    return [dict(itertools.chain(*map(dict.items, found))) for found in itertools.product(*lists)]


def trials(
    session: Session, texts: list[str], grid: list[dict[str, Any]], *, as_chat: bool
) -> list[dict[str, Any]]:
    """Return a record for each request: all prompts with the first values, then with the next."""
    found: list[dict[str, Any]] = []
    for values in grid:
        rows = [{"prompt": text} for text in texts]
        changes = {"body": session.prompt.body | values, "as_chat": as_chat}
        for text, prepared in zip(texts, session.prepare(0, rows, **changes), strict=True):
            assert prepared.call is not None
            call = msgspec.structs.replace(prepared.call, key=("generate", len(found)))
            found.append({"prompt": text, "sampling": values, "call": call, "prepared": prepared})
    return found


def _begun(tried: list[dict[str, Any]]) -> Iterator[Call]:
    """Yield the calls of trials, and note when the engine takes each."""
    for trial in tried:
        trial["start"] = time.perf_counter()
        yield trial["call"]


def answer(session: Session, tried: list[dict[str, Any]]) -> None:
    """Answer trials together, and put answers and figures into their records."""
    by_key = {trial["call"].key: trial for trial in tried}
    for replies in session.engine.generate(Calls(_begun(tried)), Event()):
        for reply in replies:
            trial = by_key[reply.key]
            trial |= _figures(trial.pop("prepared"), reply)
            trial["seconds"] = round(time.perf_counter() - trial.pop("start"), 6)
            trial["tokens_per_second"] = round(trial["output_tokens"] / trial["seconds"], 3)
            del trial["call"]


def _figures(prepared: Prepared, reply: Reply) -> dict[str, Any]:
    """Return the answers and figures of a reply, read as from a run's output line."""
    row, _ = encode_row(prepared, failure_of(reply) or reply)
    line = read_line(bytes(row.output))
    found = answer_of(line)
    return {
        "answers": found.texts,
        "finish_reason": found.finish_reason,
        "error": line.error and {"code": line.error.code, "message": line.error.message},
        "input_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "output_tokens": row.completion_tokens,
    }


def show(tried: list[dict[str, Any]]) -> None:
    """Write the answers to stdout, each under its prompt and values if there are several, and a table to stderr."""
    for trial in tried:
        error = trial["error"] or {"message": "the reply has an unknown shape"}
        for text in trial["answers"] or [f"[no answer: {error['message']}]"]:
            is_alone = len(tried) == len(trial["answers"]) == 1
            write(f"{text}\n" if is_alone else f"--- {_values(trial)}\n{text}\n")
    width = max(len(_values(trial)) for trial in tried)
    say(f"{'':{width}}  {'input':>7} {'cached':>7} {'output':>7} {'seconds':>9} {'tokens/s':>9}")
    for trial in tried:
        counts = " ".join(f"{trial[f'{n}_tokens']:>7}" for n in ("input", "cached", "output"))
        times = f"{trial['seconds']:>9.3f} {trial['tokens_per_second']:>9.1f}"
        say(f"{_values(trial):{width}}  {counts} {times}")


def _values(trial: dict[str, Any]) -> str:
    values = ", ".join(f"{name} {value}" for name, value in trial["sampling"].items())
    return " · ".join([one_line(trial["prompt"])[:40], *([values] if values else [])])


def conclude(
    tried: list[dict[str, Any]], seconds: float, load_seconds: float, *, as_json: bool
) -> dict[str, Any] | None:
    """Say the sums. Returns the JSON object if it is wanted.

    Raises:
        BatchinferError: a request has no answer.
    """
    errors = [trial["error"] for trial in tried if trial["error"]]
    given, made = (sum(trial[f"{name}_tokens"] for trial in tried) for name in ("input", "output"))
    totals = {"requests": len(tried), "errors": len(errors), "load_seconds": round(load_seconds, 3)}
    totals |= {"input_tokens": given, "output_tokens": made, "seconds": round(seconds, 6)}
    say(
        f"{units.many(len(tried), 'request')}: {given} input and {made} output tokens in {seconds:.3g} s, "
        f"{made / seconds:.4g} output tokens/s"
    )
    result = {"status": "PARTIAL" if errors else "SUCCESS", "results": tried, "totals": totals}
    if errors:
        num = units.many(len(errors), "request")
        error = BatchinferError(f"{num} without an answer: {errors[0]['message']}")
        if as_json:
            error.attach_result(result)
        raise error
    return result if as_json else None
