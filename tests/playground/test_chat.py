"""`chat` in a real terminal. What becomes a turn is in test_playground_vllm.py."""

import signal

import pytest

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
