"""The command `batchinfer chat`: a conversation with a model, at a terminal or over the lines of a pipe."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec

from batchinfer.cli.server_args import ServerCommand
from batchinfer.cli.settings import common_options
from batchinfer.cli.terminal import say, write
from batchinfer.cli.values import read_pairs
from batchinfer.core import codec, errors
from batchinfer.core.records import Call, Reply
from batchinfer.core.row_codes import Code
from batchinfer.engines.replies import failure_of
from batchinfer.playground.session import Session, play_options

_OTHER_NAMES = {"?": "help", "exit": "quit", "hyperparameters": "set", "params": "set"}
_PATH = "/v1/chat/completions"
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
_ROOM = 256
"""Tokens of the context that are kept for an answer if ``max_tokens`` is not set."""
_TEMPLATE = """\
{{{{ bos_token }}}}{{% for message in messages %}}{{% if message.role == "user" %}}{{{{ {} + message.content + {} }}}}\
{{% elif message.role == "assistant" %}}{{{{ {} + message.content + {} }}}}{{% else %}}{{{{ message.content }}}}\
{{{{ "" if message.content[-1:] == "\\n" else "\\n" }}}}{{% endif %}}{{% endfor %}}{{{{ {} }}}}"""
"""Chat template that puts each message between the two parts of its side's format."""


@click.command("chat", cls=ServerCommand)
@click.option("--user-msg-fmt", default="", help="In place of the chat template: 'user: {}\\n'.")
@click.option("--assistant-msg-fmt", default="", help="The model's side: 'assistant: {}\\n'.")
@play_options("n")
@common_options
def command(user_msg_fmt: str, assistant_msg_fmt: str, **options: Any) -> None:
    """Talk with a model. Answers stream; Ctrl-C ends an answer, not the chat.

    \b
      batchinfer chat --model Qwen/Qwen3-8B --system-prompt "Answer briefly."

    /help lists the commands. In a message, Alt-Enter begins a new line. When the conversation no longer fits the
    model's context, its first turns are left out, and the chat says so. Where standard input is no terminal, each line
    is a message or a command. Answers and the text of /prompt are written to stdout, everything else to stderr.
    """  # noqa: D301 - \b keeps click from wrapping the example
    session = Session(options, messages_column="messages", turns="all")
    if user_msg_fmt or assistant_msg_fmt:
        use_formats(session, user_msg_fmt, assistant_msg_fmt)
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    # SystemExit, because the line editor swallows ordinary exceptions that a signal raises in its callbacks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(errors.Interrupted.exit_status))
    try:
        session.open()
        say("/help lists the commands" if is_terminal else "each line is a message")
        read = _line_editor() if is_terminal else _read_line
        Chat(session, read, is_terminal=is_terminal).run()
    finally:
        session.close()


def use_formats(session: Session, user: str, assistant: str) -> None:
    """Make the server put each message into its side's format. An answer ends where a format does.

    Raises:
        ConfigError: the server is not ours to start, or a format does not hold {} exactly once.
    """
    formats = [text.replace("\\n", "\n").split("{}") for text in (user, assistant)]
    if any(len(parts) != 2 for parts in formats) or session.config.engine != "vllm":
        raise errors.ConfigError(
            "--user-msg-fmt, --assistant-msg-fmt: expected both, with {} once, for --engine vllm",
            hint="--user-msg-fmt 'user: {}\\n' --assistant-msg-fmt 'assistant: {}\\n'",
        )
    texts = [*formats[0], *formats[1], formats[1][0]]
    template = _TEMPLATE.format(*map(json.dumps, texts))
    arguments = [*session.config.server_args, "--chat-template", template]
    session.config = msgspec.structs.replace(session.config, server_args=arguments)
    ends = [text.strip() for text in (formats[1][1], formats[0][0]) if text.strip()]
    body = {"stop": ends} | session.prompt.body
    session.prompt = msgspec.structs.replace(session.prompt, body=body)


class Chat:
    """A conversation with a person. A method `do_NAME` carries out each command; its docstring is the line in /help.

    Args:
        session: The open engine.
        read: Returns the next message or command; raises EOFError if there is none.
        is_terminal: Whether a person types. If not, the first mistake ends the chat.
    """

    def __init__(self, session: Session, read: Callable[[], str], *, is_terminal: bool) -> None:
        self._session, self._read, self._is_terminal = session, read, is_terminal
        self._body, self._system = dict(session.prompt.body), session.prompt.system_prompt
        self._messages: list[dict[str, str]] = []
        self._start = 0
        """Index of the first message that is still sent."""
        self._num_asked = 0
        self._call: Call | None = None
        names = [name for name in vars(Chat) if name.startswith("do_")]
        self._commands = {name.removeprefix("do_"): getattr(self, name) for name in names}

    def run(self) -> None:
        """Read and answer until the person quits or there is no more to read.

        Raises:
            BatchinferError: a message or command was refused, or the engine failed. At a terminal these are shown
                instead, and the chat goes on.
        """
        while True:
            try:
                self._take(self._read())
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                say("Ctrl-D or /quit ends the chat")
            except (errors.UsageError, errors.EngineError) as error:
                if not self._is_terminal:
                    raise
                say(f"{error.message} ({error.hint})" if error.hint else error.message)
                if isinstance(error, errors.EngineError):
                    self._session.close()  # the next message starts the server again

    def _take(self, text: str) -> None:
        if not text.startswith("/") or text.startswith("//"):
            if text.strip():
                self._ask(text.removeprefix("/"))
            return
        word, _, argument = text[1:].strip().partition(" ")
        name = _OTHER_NAMES.get(word, word)
        if name not in self._commands:
            hint = "/help lists them; a message that begins with / is written with //"
            raise errors.ConfigError(f"/{name}: is not a command", hint=hint)
        self._commands[name](argument.strip())

    def _ask(self, message: str) -> None:
        if self._session.info is None:
            self._session.open()
        asked, before = {"role": "user", "content": message}, self._start
        self._num_asked += 1
        while (answer := self._stream([*self._messages[self._start :], asked])) is None:
            if self._start == len(self._messages):
                raise errors.InputError("the message alone is too long for the model's context")
            self._start += 2
        if answer:
            self._messages += [asked, {"role": "assistant", "content": answer}]
        if self._start > before:
            say(f"(the context is full: the first {self._start // 2} turns are left out)")

    def _stream(self, messages: list[dict[str, str]]) -> str | None:
        """Show an answer while it comes. Returns it, as far as Ctrl-C let it come; None if the prompt is too long."""
        changes = {"body": self._body | _STREAM, "system_prompt": self._system}
        [prepared] = self._session.prepare(self._num_asked, [{"messages": messages}], **changes)
        assert prepared.call is not None
        self._call, answer, reason = prepared.call, "", ""
        try:
            for data in self._session.engine.stream(prepared.call):
                event = msgspec.json.decode(data)
                if "choices" not in event:
                    failure = failure_of(Reply(key=self._call.key, status=400, body=data))
                    if failure is None or failure.code == Code.PROMPT_TOO_LONG:
                        return None
                    raise errors.InputError(f"no answer: {failure.message}")
                for choice in event["choices"]:
                    delta = choice["delta"]
                    write(delta.get("reasoning") or "", to_stderr=True)
                    answer += delta.get("content") or ""
                    write(delta.get("content") or "")
                    reason = choice.get("finish_reason") or reason
                self._leave_room((event.get("usage") or {}).get("total_tokens", 0))
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            reason = "stopped"
        write("\n")
        if reason in ("length", "stopped"):
            say(f"({reason}: the model sees what it has said)")
        return answer

    def _leave_room(self, num_tokens: int) -> None:
        """Leave out one more turn from now on if prompt and answer have filled the context."""
        longest = (self._session.info and self._session.info.max_model_len) or 0
        room = min(self._body.get("max_tokens") or _ROOM, longest // 2)
        if longest and num_tokens + room > longest:
            self._start = min(self._start + 2, len(self._messages))

    # ------------------------------------------------------------------ commands

    def do_help(self, _argument: str) -> None:
        """This list."""
        for name, method in self._commands.items():
            say(f"/{name:<8} {method.__doc__}")

    def do_reset(self, _argument: str) -> None:
        """A new conversation; settings stay."""
        self._messages, self._start, self._call = [], 0, None

    def do_system(self, argument: str) -> None:
        """TEXT: another system prompt, also of the conversation so far; -: none."""
        if argument:
            self._system = "" if argument == "-" else argument
        say(f"system prompt: {self._system or '(none)'}")

    def do_set(self, argument: str) -> None:
        """NAME=VALUE,…: other parameters, e.g. max_tokens=100,temperature=0; none: the model's own."""
        known = self._session.engine.parameters(_PATH)
        pairs = read_pairs("/set", [argument] if argument else [])
        for name in pairs:
            if known and name not in known:
                raise errors.ConfigError(f"/set {name}: is no parameter{errors.near(name, known)}")
        body = self._body | pairs
        self._body = {name: value for name, value in body.items() if value is not None}
        for name, value in self._body.items():
            say(f"{name} = {value}")

    def do_prompt(self, _argument: str) -> None:
        """The last prompt as the model got it, with its tokens; or the messages, if the server does not tell."""
        if self._call is None:
            raise errors.ConfigError("/prompt: nothing was said yet")
        body = msgspec.json.decode(self._call.body)
        wanted = ("model", "messages", "tools", "chat_template_kwargs")
        asked = {name: body[name] for name in wanted if name in body}
        found = self._post("/tokenize", asked | {"return_token_strs": True})
        tokens = found.get("tokens") or []
        text = self._post("/detokenize", {"model": body["model"], "tokens": tokens}).get("prompt")
        write(f"{codec.encode(asked).decode() if text is None else text}\n")
        pairs = zip(tokens, found.get("token_strs") or tokens, strict=True)
        say(f"{len(tokens)} tokens: " + " ".join(f"{number}:{name!r}" for number, name in pairs))

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        call = Call(key=("chat", 0), path=path, body=codec.encode(body))
        reply = self._session.engine.ask(call)
        return msgspec.json.decode(reply.body) if reply.status == 200 else {}

    def do_history(self, _argument: str) -> None:
        """The conversation."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        for message in [*system, *self._messages]:
            say(f"{message['role']}: {message['content']}")

    def do_quit(self, _argument: str) -> NoReturn:
        """The end, as Ctrl-D."""
        raise EOFError


def _read_line() -> str:
    """Return the next line of standard input that is no terminal."""
    try:
        return input()
    except (OSError, UnicodeError, RuntimeError) as error:
        raise errors.InputError(f"standard input: no text in UTF-8 ({error})") from error


def _line_editor() -> Callable[[], str]:
    """Return a line editor whose history is a file that this user alone can read. It needs no terminal at stdout."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    place = state / "batchinfer" / "chat-history"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.touch(0o600)
    output = create_output(always_prefer_tty=True)
    history = FileHistory(str(place))
    return PromptSession(">>> ", history=history, key_bindings=keys, output=output).prompt
