"""The command `batchinfer chat`."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

import click

from batchinfer.cli.options import FIRST, SectionCommand, SectionOption
from batchinfer.cli.settings import common_options
from batchinfer.cli.terminal import say
from batchinfer.core import units
from batchinfer.core.errors import ConfigError, Interrupted
from batchinfer.engines import UNLIMITED_LENGTH
from batchinfer.playground.dialogue import Dialogue, Formats, Settings, make_builder, read_format
from batchinfer.playground.options import (
    check_model,
    choices,
    play_options,
    quieten,
    refuse_template,
    with_defaults,
)
from batchinfer.playground.session import Session


@click.command("chat", cls=SectionCommand)
@click.option(
    "--user-msg-fmt",
    cls=SectionOption,
    section="prompt",
    metavar="TEXT",
    help=r"Format of the user's messages in place of the chat template, e.g. 'user: {}\n'; \n is a line break.",
)
@click.option(
    "--assistant-msg-fmt",
    cls=SectionOption,
    section="prompt",
    metavar="TEXT",
    help=r"Format of the model's messages, e.g. 'assistant: {}\n'. The prompt ends with its part before the {}.",
)
@click.option(
    "--input-history",
    cls=SectionOption,
    section=FIRST,
    metavar="FILE",
    help="File for the lines that were typed, for the arrow keys; an empty name keeps none.  "
    "[default: batchinfer/chat-history in XDG_STATE_HOME or ~/.local/state]",
)
@play_options(has_lists=False, without=["n"])
@common_options
def command(**options: Any) -> None:
    """Talk with a model. Answers stream; Ctrl-C ends an answer, not the chat.

    \b
      batchinfer chat --model Qwen/Qwen3-8B --system-prompt "Answer briefly." --temperature 0.7

    /help lists the commands. In a message, Alt-Enter begins a new line; a message that begins with three double quotes
    goes on, line by line, up to three more. When the conversation no longer fits the model's context, its first turns
    are left out, and the chat says so. Where standard input is no terminal, each line is a message or a command.
    Answers and the text of /prompt are written to stdout, everything else to stderr.
    """  # noqa: D301 - \b keeps click from wrapping the example
    from batchinfer.engines.tokenizers import tokenizer_for
    from batchinfer.playground.lines import lines_of
    from batchinfer.playground.loop import COMMANDS, Chat

    quieten()
    formats = _formats(options.pop("user_msg_fmt"), options.pop("assistant_msg_fmt"))
    history = options.pop("input_history")
    options = with_defaults(options | {"messages_column": "messages", "turns": "all"})
    settings = Settings(options, choices(options), formats)
    if formats is not None and settings.prompt.chat_template:
        raise ConfigError(
            "--chat-template with --user-msg-fmt: are two ways to make the prompt, expected one",
            hint="leave one of them out",
        )
    template = "--chat-template" if settings.prompt.chat_template else ""
    refuse_template(settings.engine, "--user-msg-fmt" if formats else template)
    check_model(settings.engine)
    tokenizer = tokenizer_for(settings.engine)
    make_builder(  # checks the values before the model is loaded
        settings.prompt, settings.sampling, settings.run_seed, tokenizer, formats
    )
    lines = lines_of(sys.stdin, history, [f"/{name}" for name in COMMANDS])
    session = Session(settings.engine)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        say(f"loading {settings.engine.model or settings.engine.engine} …")
        info = session.open()
        length = None if info.max_model_len >= UNLIMITED_LENGTH else info.max_model_len
        context = "" if length is None else f", context {length:,} tokens"
        say(
            f"ready after {units.duration(info.load_seconds)}: {info.name} {info.version}{context}. "
            + lines.welcome
        )
        Chat(session, Dialogue(settings, tokenizer, length), lines).run()
    except SystemExit:
        raise Interrupted("chat: ended by SIGTERM") from None
    finally:
        signal.signal(signal.SIGTERM, before)
        session.close()


def _formats(user: str | None, assistant: str | None) -> Formats | None:
    if not user and not assistant:
        return None
    if not user or not assistant:
        missing = "--assistant-msg-fmt" if user else "--user-msg-fmt"
        raise ConfigError(
            f"{missing}: is missing, expected the formats of both sides",
            hint="e.g. --user-msg-fmt 'user: {}\\n' --assistant-msg-fmt 'assistant: {}\\n'",
        )
    return Formats(
        user=read_format("--user-msg-fmt", user),
        assistant=read_format("--assistant-msg-fmt", assistant),
    )


def _end(_number: int, _frame: FrameType | None) -> None:
    # Not an ordinary exception: the line editor's event loop swallows those that a signal raises in its callbacks.
    raise SystemExit
