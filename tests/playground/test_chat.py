"""`chat` in a real terminal, and what becomes a turn."""

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from batchinfer.core.errors import InputError
from batchinfer.playground.chat import Chat
from batchinfer.prompts.types import PromptConfig
from terminal import ALT_ENTER, Terminal


@pytest.fixture
def chat(tmp_path):
    with Terminal("chat", "--engine", "echo", state=tmp_path) as terminal:
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
    chat.send("/quit\r")
    assert chat.end() == 0


def test_sigterm_at_the_prompt_leaves_the_terminal_as_it_was(chat):
    assert chat.settings_now() != chat.settings  # the line editor has its own
    chat.kill(signal.SIGTERM)
    assert chat.end() == 75
    assert chat.settings_now() == chat.settings


def test_typed_lines_are_kept_where_only_their_owner_reads_them(chat, tmp_path):
    chat.send("remember this\r")
    chat.expect("\nremember this\n")
    chat.expect(">>>")
    chat.leave()
    history = tmp_path / "batchinfer/chat-history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "remember this" in history.read_text()


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
        if texts[-1] in ("too long", "fails") or texts == ["stop", "half", "long"]:
            yield b'{"error":{"message":"too long","param":"input_tokens"}}'

    own = {"info": "there", "prompt": PromptConfig(messages_column="m"), "prepare": prepare}
    session: Any = SimpleNamespace(engine=SimpleNamespace(stream=stream), **own)
    typed = ["stop", "empty", "too long", "fails", "proxy", "on", "long"]
    with pytest.raises(StopIteration):
        Chat(session, iter(typed).__next__).run()
    texts = [each[-1] for each in asked[:-2]]
    assert texts == ["stop", "empty", *["too long"] * 2, *["fails"] * 2, "proxy", "on"]
    assert asked[-3] == ["stop", "half", "on"], "a refusal costs no earlier turn"
    assert asked[-2:] == [["stop", "half", "long"], ["long"]]
    said = capfd.readouterr().err
    assert "stopped: the model sees what it has said" in said
    assert "the context is full: the first 1 turns are left out" in said
