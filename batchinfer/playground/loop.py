"""The loop of a chat: it reads messages and commands, and shows the answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from batchinfer.cli.terminal import say, write
from batchinfer.cli.values import read_pairs
from batchinfer.core import units
from batchinfer.core.errors import (
    BatchinferError,
    ConfigError,
    EngineError,
    Interrupted,
    UsageError,
    near,
)
from batchinfer.core.records import TextPiece
from batchinfer.playground.dialogue import ChatRequest, Dialogue, Turn
from batchinfer.playground.grid import check_text
from batchinfer.playground.lines import Lines
from batchinfer.playground.session import Answered, Session, stopped_by_interrupt


class ChatCommand(NamedTuple):
    """A command of the chat: the method of `Chat` that carries it out, and its line in ``/help``."""

    method: str
    argument: str
    help: str


COMMANDS = {
    "help": ChatCommand("show_help", "", "show this list"),
    "reset": ChatCommand("reset", "", "begin a new conversation; settings stay"),
    "system": ChatCommand("system", "[TEXT]", "show or change the system prompt; - takes it away"),
    "params": ChatCommand("show_parameters", "", "show the sampling values"),
    "set": ChatCommand(
        "set",
        "NAME=VALUE[,…]",
        "change sampling values, e.g. max_tokens=100,temperature=0; none: the model's own",
    ),
    "prompt": ChatCommand(
        "show_prompt", "", "show the last prompt as the model got it, with its tokens"
    ),
    "history": ChatCommand("show_history", "", "show the conversation"),
    "save": ChatCommand("save", "FILE", "write the conversation as a JSON line to a new file"),
    "retry": ChatCommand("retry", "", "ask the last message again"),
    "quit": ChatCommand("quit", "", "end the chat, as Ctrl-D does"),
}
_OTHER_NAMES = {"?": "help", "exit": "quit", "clear": "reset", "hyperparameters": "params"}


class Chat:
    """A conversation with a person.

    Args:
        session: The open engine.
        dialogue: The conversation.
        lines: Source of messages and commands.
    """

    def __init__(self, session: Session, dialogue: Dialogue, lines: Lines) -> None:
        self._session = session
        self._dialogue = dialogue
        self._lines = lines
        self._last: ChatRequest | None = None
        self._unanswered: str | None = None
        """The last message, if no answer to it was kept."""
        self._num_dropped = 0
        self._is_loaded = True
        self._is_over = False

    def run(self) -> None:
        """Read and answer until the person quits or standard input ends.

        Raises:
            BatchinferError: a message or command was refused, or the engine failed. At a terminal these are shown
                instead, and the chat goes on.
        """
        while not self._is_over:
            try:
                self._take(self._lines.read())
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self._lines.is_terminal:
                    raise
                say("Ctrl-D or /quit ends the chat")
            except UsageError as error:
                if not self._lines.is_terminal:
                    raise
                self._show(error)
            except EngineError as error:
                if not self._lines.is_terminal:
                    raise
                self._show(error)
                self._session.close()
                self._is_loaded = False
                say("the conversation is kept; /retry loads the engine again")

    def _show(self, error: BatchinferError) -> None:
        say(f"{error.message} ({error.hint})" if error.hint else error.message)

    def _take(self, text: str) -> None:
        if not text.strip():
            return
        if not text.startswith("/") or text.startswith("//"):
            self._ask(text.removeprefix("/") if text.startswith("//") else text)
            return
        word, _, argument = text[1:].partition(" ")
        name = _OTHER_NAMES.get(word.strip(), word.strip())
        if name not in COMMANDS:
            raise ConfigError(
                f"/{name}: is not a command{near(name, COMMANDS)}",
                hint="/help lists them; a message that begins with / is written with //",
            )
        command = COMMANDS[name]
        argument = argument.strip()
        if argument and not command.argument:
            raise ConfigError(f"/{name}: takes nothing after it")
        method: Callable[[str], None] = getattr(self, command.method)
        method(argument)

    # ------------------------------------------------------------------ answers

    def _ask(self, message: str) -> None:
        check_text(message, "the message")
        self._unanswered = message
        ready = self._dialogue.prepare(message)
        self._last = ready
        if ready.num_dropped > self._num_dropped:
            num_turns = units.many(len(self._dialogue.turns), "turn")
            say(f"(the context is full: the first {ready.num_dropped} of {num_turns} left out)")
        self._num_dropped = ready.num_dropped
        if not self._is_loaded:
            say("loading …")
            self._session.open()
            self._is_loaded = True
        text, answered = self._stream(ready)
        if answered is None and not self._lines.is_terminal:
            raise Interrupted("chat: interrupted")
        if answered is None:
            if text:
                self._keep(message, text, is_cut=True)
                say("(stopped; the model sees what it has said)")
            else:
                say("(stopped before the first word; /retry asks again)")
            return
        completion = answered.completion
        if completion.failure is not None:
            say(f"(no answer: {completion.failure.message}; /retry asks again)")
            return
        choice = completion.choices[0]
        self._keep(message, choice.text, is_cut=False)
        if choice.finish_reason == "length":
            say("(cut: the answer reached max_tokens or the end of the context)")

    def _keep(self, message: str, answer: str, *, is_cut: bool) -> None:
        self._unanswered = None
        self._dialogue.add(Turn(message=message, answer=answer, is_cut=is_cut))

    def _stream(self, ready: ChatRequest) -> tuple[str, Answered | None]:
        """Show an answer while it comes. Returns its text, and its record, which is None if Ctrl-C ended it."""
        parts: list[str] = []

        def show(piece: TextPiece) -> None:
            parts.append(piece.text)
            write(piece.text)

        done: Answered | None = None
        with stopped_by_interrupt() as stop:
            for answered in self._session.answer([ready.request], stop, show):
                done = answered
                if answered.completion.choices:
                    show(
                        TextPiece(
                            key=ready.request.key,
                            text=answered.completion.choices[0].text[len("".join(parts)) :],
                        )
                    )
        text = "".join(parts)
        if text or done is not None:
            write("\n")
        return text, done

    # ------------------------------------------------------------------ commands

    def show_help(self, _argument: str) -> None:
        """Show the commands."""
        width = max(len(f"/{name} {each.argument}") for name, each in COMMANDS.items())
        for name, each in COMMANDS.items():
            say(f"{f'/{name} {each.argument}':<{width}}  {each.help}")
        say(
            'A message of several lines: """, the lines, """; or Alt-Enter for a new line. Ctrl-C ends an answer.'
        )

    def reset(self, _argument: str) -> None:
        """Begin a new conversation."""
        self._dialogue.reset()
        self._last, self._unanswered, self._num_dropped = None, None, 0
        say("a new conversation begins")

    def system(self, argument: str) -> None:
        """Show or change the system prompt."""
        settings = self._dialogue.settings
        if argument:
            settings.set_system_prompt("" if argument == "-" else argument)
            say("the system prompt is changed, also for the conversation so far")
        else:
            say(f"system prompt: {settings.prompt.system_prompt or '(none)'}")

    def show_parameters(self, _argument: str) -> None:
        """Show the sampling values."""
        for name, value in self._dialogue.settings.shown().items():
            say(f"{name} = {value}")
        say("(everything else: the model's own)")

    def set(self, argument: str) -> None:
        """Change sampling values."""
        if not argument:
            raise ConfigError("/set: expected NAME=VALUE", hint="e.g. /set max_tokens=100")
        self._dialogue.settings.set(read_pairs("/set", [argument]))
        self.show_parameters("")

    def show_prompt(self, _argument: str) -> None:
        """Show the last prompt with its tokens."""
        if self._last is None:
            say("no prompt yet: say something first")
            return
        tokens = self._dialogue.tokens_of(self._last)
        if not tokens:
            for message in self._last.prompt:
                say(f"{message['role']}: {message['content']}")
            say("(this engine gets the messages and makes the prompt itself)")
            return
        write(f"{self._last.prompt}\n")
        say(f"{len(tokens)} tokens: " + " ".join(f"{number}:{text!r}" for number, text in tokens))

    def show_history(self, _argument: str) -> None:
        """Show the conversation."""
        if self._dialogue.settings.prompt.system_prompt:
            self.system("")
        for number, turn in enumerate(self._dialogue.turns):
            note = " (left out: the context is full)" if number < self._num_dropped else ""
            say(f"you{note}: {turn.message}")
            say(f"model{' (stopped)' if turn.is_cut else ''}: {turn.answer}")
        if not self._dialogue.turns:
            say("nothing was said yet")

    def save(self, argument: str) -> None:
        """Write the conversation to a new file."""
        if not argument:
            raise ConfigError(
                "/save: expected the name of a new file", hint="e.g. /save chat.jsonl"
            )
        if not self._dialogue.turns:
            raise ConfigError("/save: nothing was said yet")
        path = Path(argument).expanduser()
        try:
            with path.open("xb") as file:
                file.write(self._dialogue.saved())
        except FileExistsError:
            raise ConfigError(f"/save {path}: is there already", hint="give another name") from None
        except OSError as error:
            raise ConfigError(f"/save {path}: cannot be written ({error.strerror})") from error
        turns = units.many(len(self._dialogue.turns), "turn")
        say(f"saved {turns} to {path}; batchinfer run reads it, too")

    def retry(self, _argument: str) -> None:
        """Ask the last message again."""
        if self._unanswered is not None:
            self._ask(self._unanswered)
            return
        turn = self._dialogue.take_back()
        if turn is None:
            say("nothing to ask again")
            return
        num_turns = len(self._dialogue.turns)
        try:
            self._ask(turn.message)
        finally:
            if len(self._dialogue.turns) == num_turns:  # no new answer, so the old one stays
                self._keep(turn.message, turn.answer, is_cut=turn.is_cut)

    def quit(self, _argument: str) -> None:
        """End the chat."""
        self._is_over = True
