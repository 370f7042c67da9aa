"""The command `batchinfer chat`: a conversation with a model at a terminal."""

from __future__ import annotations

import contextlib
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
from batchinfer.worker.command import look_options


@click.command("chat", cls=ServerCommand)
@play_options("n")
@look_options
@common_options
def command(**options: Any) -> None:
    """Talk with a model. Answers stream; Ctrl-C ends an answer, not the chat.

    \b
      batchinfer chat --model Qwen/Qwen3-8B --system-prompt "Answer briefly."

    /help lists the commands. In a message, Alt-Enter begins a new line. When the conversation no longer fits the
    model's context, its first turns are left out, and the chat says so. Answers and the text of /prompt are written to
    stdout, everything else to stderr.
    """  # noqa: D301 - \b keeps click from wrapping the example
    if sys.stdin is None or not sys.stdin.isatty():
        hint = "`batchinfer generate` answers prompts, and `batchinfer run` those of a pipe"
        raise errors.ConfigError("chat: standard input is no terminal", hint=hint)
    session = Session(options, messages_column="messages", turns="all")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(errors.Interrupted.exit_status))
    try:
        session.open()
        say("/help lists the commands")
        Chat(session, _line_editor()).run()
    finally:
        session.close()


class Chat:
    """A conversation with a person. A method `do_NAME` carries out each command; its docstring is the line in /help.

    Args:
        session: The open engine.
        read: Returns the next message or command; raises EOFError if there is none.
    """

    def __init__(self, session: Session, read: Callable[[], str]) -> None:
        self._session, self._read = session, read
        self._body, self._system = dict(session.prompt.body), session.prompt.system_prompt
        self._messages: list[dict[str, str]] = []
        self._start = 0
        """Index of the first message that is still sent."""
        self._num_asked = 0
        self._call: Call | None = None
        names = [name for name in vars(Chat) if name.startswith("do_")]
        self._commands = {name.removeprefix("do_"): getattr(self, name) for name in names}

    def run(self) -> None:
        """Read and answer until the person quits. What is refused is shown, and the chat goes on."""
        while True:
            try:
                self._take(self._read())
            except EOFError:
                return
            except KeyboardInterrupt:
                say("Ctrl-D or /quit ends the chat")
            except (errors.UsageError, errors.EngineError) as error:
                say(f"{error.message} ({error.hint})" if error.hint else error.message)
                if isinstance(error, errors.EngineError):
                    self._session.close()  # the next message starts the server again

    def _take(self, text: str) -> None:
        if not text.startswith("/") or text.startswith("//"):
            if text.strip():
                self._ask(text.removeprefix("/"))
            return
        name, _, argument = text[1:].strip().partition(" ")
        if name not in self._commands:
            hint = "/help lists them; a message that begins with / is written with //"
            raise errors.ConfigError(f"/{name}: is not a command", hint=hint)
        self._commands[name](argument.strip())

    def _ask(self, message: str) -> None:
        if self._session.info is None:
            self._session.open()
        asked, before = {"role": "user", "content": message}, self._start
        self._num_asked += 1
        try:
            while (answer := self._stream([*self._messages[self._start :], asked])) is None:
                if self._start == len(self._messages):
                    raise errors.InputError("the message alone is too long for the model's context")
                self._start += 2
        except errors.BatchinferError:
            self._start = before  # no turn is forgotten for a message without an answer
            raise
        if answer:
            self._messages += [asked, {"role": "assistant", "content": answer}]
        if self._start > before:
            say(f"(the context is full: the first {self._start // 2} turns are left out)")

    def _stream(self, messages: list[dict[str, str]]) -> str | None:
        """Show an answer while it comes. Returns it, as far as Ctrl-C let it come; None if the prompt is too long."""
        changes = {"body": self._body | {"stream": True}, "system_prompt": self._system}
        [prepared] = self._session.prepare(self._num_asked, [{"messages": messages}], **changes)
        assert prepared.call is not None
        self._call, answer, reason = prepared.call, "", ""
        try:
            for data in self._session.engine.stream(prepared.call):
                event: Any = None
                with contextlib.suppress(msgspec.DecodeError):  # a proxy's page
                    event = msgspec.json.decode(data)
                if not isinstance(event, dict) or "choices" not in event:
                    failure = failure_of(Reply(key=self._call.key, status=400, body=data))
                    if failure is None or failure.code == Code.PROMPT_TOO_LONG:
                        return None
                    raise errors.InputError(f"no answer: {failure.message}")
                for choice in event["choices"] or ():
                    delta = choice.get("delta") or choice.get("message") or {}
                    write(delta.get("reasoning") or "", to_stderr=True)
                    answer += delta.get("content") or ""
                    write(delta.get("content") or "")
                    reason = choice.get("finish_reason") or reason
        except KeyboardInterrupt:
            reason = "stopped"
        write("\n")
        if reason in ("length", "stopped"):
            say(f"({reason}: the model sees what it has said)")
        return answer

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
        known = self._session.engine.parameters("/v1/chat/completions")
        pairs = read_pairs("/set", [argument] if argument else [])
        for name in pairs:
            if known and name not in known:
                raise errors.ConfigError(f"/set {name}: is no parameter{errors.near(name, known)}")
        body = self._body | pairs
        self._body = {name: value for name, value in body.items() if value is not None}
        for name, value in self._body.items():
            say(f"{name} = {value}")

    def do_prompt(self, _argument: str) -> None:
        """The last prompt as the model got it; or the messages, if the server does not tell."""
        if self._call is None:
            raise errors.ConfigError("/prompt: nothing was said yet")
        body = msgspec.json.decode(self._call.body)
        wanted = ("model", "messages", "tools", "chat_template_kwargs")
        asked = {name: body[name] for name in wanted if name in body}
        tokens = self._post("/tokenize", asked).get("tokens") or []
        text = self._post("/detokenize", {"model": body["model"], "tokens": tokens}).get("prompt")
        write(f"{codec.encode(asked).decode() if text is None else text}\n")
        say(f"{len(tokens)} tokens")

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._session.info is None:  # the server has died, and the next message starts it again
            return {}
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


def _line_editor() -> Callable[[], str]:
    """Return a line editor whose history is a file that this user alone can read. It needs no terminal at stdout.

    SIGTERM ends it, too.
    """
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
    output, history = create_output(always_prefer_tty=True), FileHistory(str(place))
    session: PromptSession[str] = PromptSession(
        ">>> ", history=history, key_bindings=keys, output=output
    )
    app = session.app

    end = SystemExit(errors.Interrupted.exit_status)

    def leave() -> None:
        if not app.is_done:  # a second signal, or a line that was just entered
            app.exit(exception=end)

    def stop(*_: Any) -> None:
        if app.loop is None or not app.is_running:
            raise end
        # An exception that a signal raises within the editor's loop may keep the loop from its end.
        app.loop.call_soon_threadsafe(leave)

    signal.signal(signal.SIGTERM, stop)
    return session.prompt
