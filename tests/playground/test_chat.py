"""`chat` in a real terminal, and what becomes a turn; test_playground_vllm.py has contexts that are too small."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from batchinfer.core.errors import InputError
from batchinfer.playground.chat import Chat
from batchinfer.prompts.types import PromptConfig
from terminal import ALT_ENTER, CTRL_C, SIGTERM, UP, Terminal
from web_server import raw

ECHO = ["chat", "--engine", "echo"]


@pytest.fixture
def chat(tmp_path):
    with Terminal(*ECHO, state=tmp_path) as terminal:
        terminal.expect("/help lists the commands")
        terminal.expect(">>>")
        yield terminal


def test_a_conversation_with_its_commands(chat):
    chat.talk(
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
    )
    chat.type("/quit\r")
    assert chat.end() == 0


def test_the_last_prompt_is_shown_after_an_answer_that_broke_off_and_the_chat_goes_on(
    tmp_path, endpoint
):
    """It ended with "engine: closed", and the conversation was lost."""
    begun = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 99\r\n\r\n"
    endpoint.rule = lambda text, _body: raw(begun) if "break" in text else None
    options = ("--engine", "openai", "--base-url", endpoint.url, "--model", "echo-model")
    with Terminal("chat", *options, state=tmp_path) as chat:
        chat.talk(
            ("", "commands"),
            ("please break", "Not enough data"),
            ("/prompt", '"content":"please break"'),
            ("go on", "\ngo on\n"),
        )
        chat.leave()


def test_ctrl_c_at_the_prompt_clears_the_line_and_ctrl_d_ends(chat):
    chat.type("never sent" + CTRL_C)
    chat.expect("Ctrl-D or /quit ends the chat")
    chat.type("sent\r")
    chat.expect("\nsent\n")
    chat.type("/history\r")
    assert "never" not in chat.expect("assistant: sent")
    chat.expect(">>>")
    chat.leave()


def test_sigterm_at_the_prompt_leaves_the_terminal_as_it_was(chat):
    assert chat.settings_now() != chat.settings  # the line editor has its own
    chat.kill(SIGTERM)
    assert chat.end() == 75
    assert chat.settings_now() == chat.settings


def test_typed_lines_are_there_in_the_next_chat(chat, tmp_path):
    chat.type("remember this\r")
    chat.expect("\nremember this\n")
    chat.type("/quit\r")
    assert chat.end() == 0
    assert (tmp_path / "batchinfer/chat-history").stat().st_mode & 0o777 == 0o600
    with Terminal(*ECHO, state=tmp_path, stdout=tmp_path / "out") as second:
        second.expect(">>>")
        second.type(UP + UP + "\r")
        second.expect("remember this")
        second.expect("\n>>>")
        second.leave()
    assert (tmp_path / "out").read_text() == "remember this\n"


def test_an_answer_that_is_stopped_is_a_turn_and_an_empty_one_is_none(capfd):
    asked: list[list[str]] = []

    def prepare(_number: int, rows: Any, **_changes: Any) -> list[Any]:
        texts = [each["content"] for each in rows[0]["messages"]]
        return [SimpleNamespace(call=SimpleNamespace(key=("c", 0), texts=texts))]

    def stream(call: Any) -> Iterator[bytes]:
        asked.append(texts := call.texts)
        if texts == ["stop"]:
            yield b'{"choices":[{"message":{"content":"half"}}]}'  # from a server that does not stream
            raise KeyboardInterrupt
        if texts[-1] == "proxy":
            yield b"<html>Bad Gateway</html>"
        if texts == ["fails"]:
            raise InputError("refused")
        if texts[-1] in ("too long", "fails"):
            yield b'{"error":{"message":"too long","param":"input_tokens"}}'

    own = {"info": "there", "prompt": PromptConfig(messages_column="m"), "prepare": prepare}
    session: Any = SimpleNamespace(engine=SimpleNamespace(stream=stream), **own)
    with pytest.raises(StopIteration):
        Chat(session, iter(["stop", "empty", "too long", "fails", "proxy", "on"]).__next__).run()
    texts = [each[-1] for each in asked]
    assert texts == ["stop", "empty", *["too long"] * 2, *["fails"] * 2, "proxy", "on"]
    assert asked[-1] == ["stop", "half", "on"], "a refusal costs no earlier turn"
    assert "stopped: the model sees what it has said" in capfd.readouterr().err
