"""The command `batchinfer generate`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from batchinfer.cli.options import FIRST, SectionCommand, SectionOption
from batchinfer.cli.settings import common_options
from batchinfer.cli.terminal import say
from batchinfer.core import units
from batchinfer.core.errors import BatchinferError, ConfigError, InputError, Interrupted
from batchinfer.core.records import EngineInfo, Request
from batchinfer.engines import find_engine, longest_sequence
from batchinfer.playground import results
from batchinfer.playground.grid import Point, Trial, check_text, points, trials, varying
from batchinfer.playground.options import (
    check_model,
    play_options,
    quieten,
    refuse_template,
    with_defaults,
)
from batchinfer.playground.session import Answered, Session, StopSignal, stopped_by_interrupt

STDIN = "-"


@click.command("generate", cls=SectionCommand)
@click.option(
    "-p",
    "--prompt",
    "prompts",
    cls=SectionOption,
    section=FIRST,
    multiple=True,
    metavar="TEXT",
    help="A prompt; may be repeated.",
)
@click.option(
    "--prompt-file",
    "prompt_files",
    cls=SectionOption,
    section=FIRST,
    multiple=True,
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Text file that is one prompt, or several with --prompt-delimiter between them; - for standard input; may be "
    "repeated. For a file with a prompt on each line: batchinfer run FILE.",
)
@click.option(
    "--prompt-delimiter",
    cls=SectionOption,
    section="prompt",
    metavar="TEXT",
    help=r"Text between the prompts of a --prompt-file, e.g. '\n---\n'; \n is a line break.",
)
@click.option(
    "--plain",
    "is_plain",
    cls=SectionOption,
    section="prompt",
    is_flag=True,
    help="Send the prompts as they are, also to a model with a chat template.",
)
@click.option(
    "--one-at-a-time",
    "is_serial",
    cls=SectionOption,
    section="engine",
    is_flag=True,
    help="Begin each request when the one before is answered, so that latencies are those of an idle engine.",
)
@click.option(
    "--json",
    "as_json",
    cls=SectionOption,
    section="output",
    is_flag=True,
    help="Print one JSON object with all answers and figures to stdout; everything else goes to stderr.",
)
@play_options(has_lists=True)
@common_options
def command(**options: Any) -> dict[str, Any] | None:
    """Answer a few prompts, over a grid of sampling values, and show how fast it went.

    \b
      batchinfer generate --model Qwen/Qwen3-8B --prompt "Why is the sky blue?" \\
          --temperature 0,0.7,1 --n 2

    Options with A,B,… take lists: every prompt is answered with every combination of their values. A model with a chat
    template is sent each prompt as a user's message. Answers stream to stdout; the table of tokens, latencies and rates
    comes last, on stderr. All requests run together unless --one-at-a-time is given. Exit 1: a request has no answer.
    """  # noqa: D301 - \b keeps click from wrapping the example
    quieten()
    prompts = read_prompts(
        options.pop("prompts"), options.pop("prompt_files"), options.pop("prompt_delimiter")
    )
    as_json, is_serial, is_plain = (options.pop(n) for n in ("as_json", "is_serial", "is_plain"))
    return Generation(prompts, options, is_plain=is_plain, is_serial=is_serial).run(as_json=as_json)


def read_prompts(texts: Sequence[str], files: Sequence[Path], delimiter: str | None) -> list[str]:
    r"""Return the prompts of the command line, then those of the files. A line break at the end of a file is removed.

    Raises:
        ConfigError: there is no prompt.
        InputError: a file cannot be read, or a prompt is not UTF-8.
    """
    found = list(texts)
    for path in files:
        text = _read(path).removesuffix("\n")
        parts = text.split(delimiter.replace("\\n", "\n")) if delimiter else [text]
        found += [part for part in parts if part.strip() or not delimiter]
    if not found:
        raise ConfigError(
            "no prompt: expected --prompt TEXT or --prompt-file FILE",
            hint='e.g. --prompt "Why is the sky blue?"; `batchinfer chat` asks for prompts one by one',
        )
    for number, prompt in enumerate(found, 1):
        check_text(prompt, f"prompt {number} of {len(found)}")
    return found


def _read(path: Path) -> str:
    try:
        if str(path) == STDIN:
            return sys.stdin.read() if sys.stdin else ""
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"--prompt-file {path}: cannot be read ({reason})",
            hint="expected a text file in UTF-8",
        ) from error


class Generation:
    """One call of `generate`."""

    def __init__(
        self, prompts: list[str], options: dict[str, Any], *, is_plain: bool, is_serial: bool
    ) -> None:
        self._prompts = prompts
        self._is_serial = is_serial
        self._is_plain = is_plain
        self._options = with_defaults(options | {"prompt_column": "prompt"})
        self._answered: dict[int, Answered] = {}

    def run(self, *, as_json: bool) -> dict[str, Any] | None:
        """Check everything, load the engine, answer, and show the table.

        Returns:
            The JSON object if `as_json`; else None, and the answers are written to stdout as they come.

        Raises:
            BatchinferError: an option or a prompt cannot work, the engine failed, or a request has no answer.
        """
        from batchinfer.engines.tokenizers import tokenizer_for

        first = points(self._options)[0].choices.engine  # `points` checks all options
        refuse_template(first, "--chat-template" if self._options["chat_template"] else "")
        check_model(first)
        tokenizer = tokenizer_for(first)
        is_chat = not self._is_plain and (tokenizer is None or tokenizer.has_chat_template)
        is_chat = is_chat or bool(self._options["system_prompt"] or self._options["chat_template"])
        grid = points(self._options | {"as_chat": is_chat})
        # Checks the prompts before the model is loaded.
        trials(self._prompts, grid, tokenizer, longest_sequence(first))
        session = Session(first)
        say(f"loading {first.model or first.engine} …")
        try:
            info = session.open()
            say(f"ready after {units.duration(info.load_seconds)}: {described(info)}")
            tried = trials(self._prompts, grid, tokenizer, info.max_model_len)
            seconds = self._generate(session, tried, varying(grid), as_json=as_json)
        finally:
            session.close()
        return self._conclude(tried, info, grid, seconds, as_json=as_json)

    def _generate(
        self, session: Session, tried: list[Trial], names: list[str], *, as_json: bool
    ) -> float:
        """Answer all trials, or those until Ctrl-C. Returns how many seconds that took, without the warm-up."""
        live = None if as_json else results.LiveText(tried, names)
        with stopped_by_interrupt() as stop:
            if find_engine(self._options["engine"]).needs_model:
                _warm_up(session, tried[0].request, stop)
            start = time.perf_counter()
            requests = [trial.request for trial in tried]
            groups = [[request] for request in requests] if self._is_serial else [requests]
            for group in groups:
                for answered in session.answer(group, stop, *([live.add] if live else [])):
                    self._answered[answered.completion.key[1]] = answered
                    if live is not None:
                        live.finish(answered)
                    else:
                        say(f"{len(self._answered)} of {units.many(len(tried), 'request')}")
            seconds = time.perf_counter() - start
        if live is not None and stop.is_set():
            live.end()
        return seconds

    def _conclude(
        self,
        tried: list[Trial],
        info: EngineInfo,
        grid: list[Point],
        seconds: float,
        *,
        as_json: bool,
    ) -> dict[str, Any] | None:
        from rich.console import Console

        done = [results.result_of(tried[n], each) for n, each in sorted(self._answered.items())]
        totals = results.totals_of(done, seconds)
        console = Console(stderr=True)
        if not console.is_terminal:
            console = Console(stderr=True, width=160)
        if done:
            console.print(results.table_of(done, totals, varying(grid)))
            say(self._summary(totals))
        result = {
            "status": "SUCCESS" if len(done) == len(tried) and not totals["errors"] else "PARTIAL",
            "engine": info.name,
            "model": info.model,
            "is_one_at_a_time": self._is_serial,
            "results": done,
            "totals": totals | {"load_seconds": round(info.load_seconds, 3)},
        }
        self._refuse_gaps(tried, done, result if as_json else None)
        return result if as_json else None

    def _summary(self, totals: dict[str, Any]) -> str:
        how = "one at a time" if self._is_serial else "together"
        per_token = totals["milliseconds_per_output_token"]
        rate = "" if per_token is None else f", {per_token:.3g} ms per output token"
        return (
            f"{units.many(totals['requests'], 'request')}, {how}: {totals['input_tokens']} input and "
            f"{totals['output_tokens']} output tokens in {totals['seconds']:.3g} s{rate}"
        )

    def _refuse_gaps(
        self, tried: list[Trial], done: list[dict[str, Any]], result: dict[str, Any] | None
    ) -> None:
        error: BatchinferError | None = None
        errors = [each["error"] for each in done if each["error"]]
        if len(done) < len(tried):
            error = Interrupted(f"stopped after {len(done)} of {len(tried)} requests")
        elif errors:
            error = BatchinferError(
                f"{units.many(len(errors), 'request')} without an answer: {errors[0]['message']}"
            )
        if error is not None:
            if result is not None:
                error.attach_result(result)
            raise error


def described(info: EngineInfo) -> str:
    """Describe an engine that has loaded, for a person."""
    parts = [f"{info.name} {info.version}"]
    if info.dtype not in ("", "none"):
        parts += [info.dtype, f"on {info.device}", f"up to {info.max_model_len:,} tokens"]
    return ", ".join(parts)


def _warm_up(session: Session, request: Request, stop: StopSignal) -> None:
    """Answer a request that is not measured, because an engine's first step is slower than the others.

    Its prompt is none of the user's, so it puts none of theirs into the prefix cache.
    """
    sampling = msgspec.structs.replace(request.sampling, max_tokens=2, min_tokens=None)
    warm = Request(key=("warm-up", 0), token_ids=[0, 0, 0, 0], sampling=sampling)
    for _ in session.answer([warm], stop):
        pass
