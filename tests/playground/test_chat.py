"""`chat`: in a real terminal, through a pipe, with an endpoint, and with a context that is too small."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest

from batchinfer.cli.main import main
from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Call
from batchinfer.engines.config import EngineConfig
from batchinfer.playground.chat import Chat, use_formats
from batchinfer.prompts import PromptConfig
from fake_endpoint import fake_endpoint
from terminal import ALT_ENTER, CTRL_C, CTRL_D, SIGTERM, UP, Terminal

ECHO = ["chat", "--engine", "echo"]


def pipe(text: str, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "batchinfer", *ECHO, *options]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)


class TestTerminal:
    @pytest.fixture
    def chat(self, tmp_path: Path) -> Iterator[Terminal]:
        with Terminal(*ECHO, state=tmp_path) as terminal:
            terminal.expect("/help lists the commands")
            terminal.expect(">>>")
            yield terminal

    def test_a_conversation_with_its_commands(self, chat: Terminal) -> None:
        for typed, shown in (
            ("good morning to you", "\ngood morning to you\n"),
            ("/set max_tokens=2,temperature=0.5", "temperature = 0.5\n"),
            ("one two three", "\none two\n"),
            ("/system Be brief.", "system prompt: Be brief."),
            ("/history", "user: one two three\nassistant: one two\n"),
            ("/prompt", '{"role":"user","content":"one two three"}'),
            ("/sett", "/sett: is not a command"),
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

    def test_ctrl_c_at_the_prompt_clears_the_line_and_ctrl_d_ends(self, chat: Terminal) -> None:
        chat.type("never sent" + CTRL_C)
        chat.expect("Ctrl-D or /quit ends the chat")
        chat.type("sent\r")
        chat.expect("\nsent\n")
        chat.type("/history\r")
        assert "never" not in chat.expect("assistant: sent")
        chat.expect(">>>")
        chat.type(CTRL_D)
        assert chat.end() == 0

    def test_sigterm_at_the_prompt_leaves_the_terminal_as_it_was(self, chat: Terminal) -> None:
        assert chat.settings_now() != chat.settings  # the line editor has its own
        chat.send_signal(SIGTERM)
        assert chat.end() == 75
        assert chat.settings_now() == chat.settings

    def test_typed_lines_are_there_in_the_next_chat(self, chat: Terminal, tmp_path: Path) -> None:
        chat.type("remember this\r")
        chat.expect("\nremember this\n")
        chat.type("/quit\r")
        assert chat.end() == 0
        assert (tmp_path / "batchinfer/chat-history").stat().st_mode & 0o777 == 0o600
        with Terminal(*ECHO, state=tmp_path, stdout=tmp_path / "out") as second:
            second.expect(">>>")
            second.type(UP + UP + "\r")
            second.expect(">>>")
            second.type(CTRL_D)
            assert second.end() == 0
        assert (tmp_path / "out").read_text() == "remember this\n"


class TestPipe:
    def test_each_line_is_a_message(self) -> None:
        done = pipe("hello you\n\n/set max_tokens=1\nhello you\n")
        assert (done.returncode, done.stdout) == (0, "hello you\nhello\n")
        assert ">>>" not in done.stdout + done.stderr

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("/unknown\nnever\n", "/unknown: is not a command"),
            ("/set max_tokens\nnever\n", "/set"),
            ("/set max_tokens=0\nx\nnever\n", "no answer: "),
        ],
    )
    def test_a_mistake_ends_it(self, text: str, message: str) -> None:
        done = pipe("first\n" + text)
        assert (done.returncode, done.stdout.strip()) == (2, "first")
        assert message in done.stderr
        assert "Traceback" not in done.stderr

    def test_bytes_that_are_no_text_are_refused_and_standard_input_may_be_closed(self) -> None:
        command = [sys.executable, "-m", "batchinfer", *ECHO]
        done = subprocess.run(command, input=b"a\xff\n", capture_output=True, timeout=120)
        assert (done.returncode, done.stdout) == (2, b"")
        assert b"UTF-8" in done.stderr
        closed = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
        done = subprocess.run(closed, capture_output=True, text=True, timeout=120)
        assert done.stdout == ""
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm"], "--model: is missing"),
        (["--engine", "vllm", "--model", "./nowhere"], "is no folder on this machine"),
        (["--user-msg-fmt", "user: {}"], "expected both"),
        (["--temperature", "x"], "'x' is not a valid float"),
        (["--lora", "a=/a", "--lora", "b=/b"], "--lora: is given 2 times, expected one adapter"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_loaded(capfd, arguments, message) -> None:
    assert main([*ECHO, *arguments]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert "loading" not in err


class TestEndpoint:
    def test_the_conversation_is_kept_and_the_prompt_shown(self, capfd, monkeypatch) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("hello there\nand again\n/prompt\n"))
        with fake_endpoint() as endpoint:
            options = ["--engine", "openai", "--base-url", endpoint.url, "--model", "echo-model"]
            assert main(["chat", *options, "--system-prompt", "s"]) == 0
        shown = capfd.readouterr().out.splitlines()
        assert shown[:2] == ["hello there", "and again"]
        roles = [message["role"] for message in json.loads(shown[2])["messages"]]
        assert roles == ["system", "user", "assistant", "user"]

    def test_one_that_is_away_is_said(self, capfd, monkeypatch) -> None:
        with fake_endpoint() as gone:
            pass
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        options = ["--engine", "openai", "--base-url", gone.url, "--model", "m"]
        assert main(["chat", *options]) != 0
        assert gone.url.removeprefix("http://").partition("/")[0] in capfd.readouterr().err


# --------------------------------------------------------------------------- context, interruptions, formats


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
        yield b'{"choices":[],"usage":{"total_tokens":3}}'


def chat_with(engine: SmallEngine, lines: list[str], *, is_terminal: bool = False) -> Chat:
    def prepare(number: int, rows: list, **_changes: object) -> list:
        texts = [message["content"] for message in rows[0]["messages"]]
        call = Call(key=("", number), path="", body=json.dumps(texts).encode())
        return [SimpleNamespace(call=call)]

    info = SimpleNamespace(max_model_len=None)
    prompt = PromptConfig(messages_column="messages")
    session = SimpleNamespace(engine=engine, info=info, prompt=prompt, prepare=prepare)
    left = iter(lines)

    def read() -> str:
        return next(left, None) or (_ for _ in ()).throw(EOFError)

    return Chat(session, read, is_terminal=is_terminal)


def test_whole_turns_are_left_out_from_the_first_on(capfd) -> None:
    engine = SmallEngine(most=3)
    chat_with(engine, ["one", "two", "three", "four"]).run()
    assert engine.asked[2:] == [["two", "answer 2", "three"], ["three", "answer 3", "four"]]
    assert "the context is full: the first 1 turns are left out" in capfd.readouterr().err


def test_ctrl_c_ends_an_answer_and_what_was_shown_stays(capfd) -> None:
    engine = SmallEngine(most=9)
    chat_with(engine, ["stop", "two"], is_terminal=True).run()
    assert engine.asked[1] == ["stop", "answer ", "two"]
    assert "stopped: the model sees what it has said" in capfd.readouterr().err


def test_messages_stand_in_their_formats() -> None:
    config = EngineConfig(model="m", server_args=["--max-model-len", "99"])
    session = SimpleNamespace(config=config, prompt=PromptConfig(body={"top_p": 0.5}))
    use_formats(session, r"user: {}\n", r'bot: "{}"</s>\n')
    assert session.config.server_args[:3] == ["--max-model-len", "99", "--chat-template"]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "{{ no template }}"},
    ]
    template = jinja2.Template(session.config.server_args[3])
    assert template.render(messages=messages, bos_token="<s>") == (
        '<s>Be brief.\nuser: hi\nbot: "hello"</s>\nuser: {{ no template }}\nbot: "'
    )
    assert session.prompt.body == {"stop": ['"</s>', "user:"], "top_p": 0.5}
    with pytest.raises(ConfigError, match="expected both"):
        use_formats(session, "user", "{}")
