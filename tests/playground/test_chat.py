"""`chat`: in a real terminal, with an endpoint, and with a context that is too small."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchinfer.core.records import Call
from batchinfer.playground.chat import Chat
from batchinfer.prompts.types import PromptConfig
from terminal import ALT_ENTER, CTRL_C, CTRL_D, SIGTERM, UP, Terminal

ECHO = ["chat", "--engine", "echo"]


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Terminal]:
    with Terminal(*ECHO, state=tmp_path) as terminal:
        terminal.expect("/help lists the commands")
        terminal.expect(">>>")
        yield terminal


def test_a_conversation_with_its_commands(chat: Terminal) -> None:
    for typed, shown in (
        ("good morning to you", "\ngood morning to you\n"),
        ("/set max_tokens=2,temperature=0.5", "temperature = 0.5\n"),
        ("one two three", "\none two\n"),
        ("/system Be brief.", "system prompt: Be brief."),
        ("/history", "user: one two three\nassistant: one two\n"),
        ("/prompt", '{"role":"user","content":"one two three"}'),
        ("/sett", "/sett: is not a command"),
        ("/set max_tokens=0", "max_tokens = 0"),
        ("refused", "no answer: "),
        ("/set max_tokens=2", "max_tokens = 2"),
        ("/help", "/quit     The end, as Ctrl-D."),
        (f"three{ALT_ENTER}four", "\nthree\nfour\n"),
        ("//not a command", "\n/not a\n"),
        ("/reset", "\n"),
        ("/history", "system: Be brief.\n"),
    ):
        chat.type(f"{typed}\r")
        chat.expect(shown)
        chat.expect(">>>")
    chat.type("/quit\r")
    assert chat.end() == 0


def test_ctrl_c_at_the_prompt_clears_the_line_and_ctrl_d_ends(chat: Terminal) -> None:
    chat.type("never sent" + CTRL_C)
    chat.expect("Ctrl-D or /quit ends the chat")
    chat.type("sent\r")
    chat.expect("\nsent\n")
    chat.type("/history\r")
    assert "never" not in chat.expect("assistant: sent")
    chat.expect(">>>")
    chat.type(CTRL_D)
    assert chat.end() == 0


def test_sigterm_at_the_prompt_leaves_the_terminal_as_it_was(chat: Terminal) -> None:
    assert chat.settings_now() != chat.settings  # the line editor has its own
    chat.send_signal(SIGTERM)
    assert chat.end() == 75
    assert chat.settings_now() == chat.settings


def test_typed_lines_are_there_in_the_next_chat(chat: Terminal, tmp_path: Path) -> None:
    chat.type("remember this\r")
    chat.expect("\nremember this\n")
    chat.type("/quit\r")
    assert chat.end() == 0
    assert (tmp_path / "batchinfer/chat-history").stat().st_mode & 0o777 == 0o600
    with Terminal(*ECHO, state=tmp_path, stdout=tmp_path / "out") as second:
        second.expect(">>>")
        second.type(UP + UP + "\r")
        second.expect("remember this")
        second.expect(">>>")
        second.type(CTRL_D)
        assert second.end() == 0
    assert (tmp_path / "out").read_text() == "remember this\n"


# --------------------------------------------------------------------------- context and interruptions


class SmallEngine:
    """Answers `answer N`, and refuses more than `most` messages as a server refuses a prompt that is too long."""

    def __init__(self, most: int) -> None:
        self.most, self.asked = most, []

    def stream(self, call: Call) -> Iterator[bytes]:
        messages = json.loads(call.body)
        if len(messages) > self.most:
            yield b'{"error":{"message":"too long","param":"input_tokens","code":400}}'
            return
        self.asked.append(messages)
        for word in ("answer ", f"{len(self.asked)}"):
            yield json.dumps({"choices": [{"delta": {"content": word}}]}).encode()
            if messages[-1] == "stop":
                raise KeyboardInterrupt


def chat_with(engine: SmallEngine, lines: list[str]) -> Chat:
    def prepare(number: int, rows: list, **_changes: object) -> list:
        texts = [message["content"] for message in rows[0]["messages"]]
        call = Call(key=("", number), path="", body=json.dumps(texts).encode())
        return [SimpleNamespace(call=call)]

    prompt = PromptConfig(messages_column="messages")
    session = SimpleNamespace(engine=engine, info="there", prompt=prompt, prepare=prepare)
    left = iter(lines)

    def read() -> str:
        return next(left, None) or (_ for _ in ()).throw(EOFError)

    return Chat(session, read)


def test_whole_turns_are_left_out_from_the_first_on(capfd) -> None:
    engine = SmallEngine(most=3)
    chat_with(engine, ["one", "two", "three", "four"]).run()
    assert engine.asked[2:] == [["two", "answer 2", "three"], ["three", "answer 3", "four"]]
    assert "the context is full: the first 1 turns are left out" in capfd.readouterr().err


def test_ctrl_c_ends_an_answer_and_what_was_shown_stays(capfd) -> None:
    engine = SmallEngine(most=9)
    chat_with(engine, ["stop", "two"]).run()
    assert engine.asked[1] == ["stop", "answer ", "two"]
    assert "stopped: the model sees what it has said" in capfd.readouterr().err
