"""`chat`: in a real terminal, through a pipe, and the parts that both share."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from batchinfer.cli.main import main
from batchinfer.core.errors import ConfigError, InputError
from batchinfer.playground.dialogue import Dialogue, Formats, Settings, Turn, read_format
from batchinfer.playground.lines import PipedLines
from batchinfer.playground.options import choices, with_defaults
from terminal import ALT_ENTER, CTRL_C, CTRL_D, SIGTERM, UP, Terminal

ECHO = ["chat", "--engine", "echo"]


def pipe(text: str, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "batchinfer", *ECHO, *options]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)


class TestTerminal:
    @pytest.fixture
    def chat(self, tmp_path: Path):
        with Terminal(*ECHO, "--echo-latency-seconds", "0.05", state=tmp_path) as terminal:
            terminal.expect("/help lists the commands")
            terminal.expect(">>>")
            yield terminal

    def test_a_conversation_with_its_commands(self, chat: Terminal, tmp_path: Path) -> None:
        chat.type("good morning to you\r")
        chat.expect("\ngood morning to you\n")
        chat.type("/set max_tokens=2,temperature=0.5\r")
        chat.expect("max_tokens = 2\n")
        chat.expect("temperature = 0.5\n")
        chat.type("one two three\r")
        chat.expect("\none two\n")
        chat.expect("cut: the answer reached max_tokens")
        chat.type("/retry\r")
        chat.expect("\none two\n")
        chat.type("/system Be brief.\r")
        chat.expect("the system prompt is changed")
        chat.type("/history\r")
        shown = chat.expect("model: one two\n")
        assert shown.count("you: one two three") == 1
        assert "system prompt: Be brief." in shown
        chat.type(f"/save {tmp_path}/chat.jsonl\r")
        chat.expect("saved 2 turns")
        chat.type(f"/save {tmp_path}/chat.jsonl\r")
        chat.expect("is there already")
        chat.type("/prompt\r")
        chat.expect("user: one two three")
        chat.type("/paramz\r")
        chat.expect("did you mean 'params'?")
        chat.type("//not a command\r")
        chat.expect("\n/not a\n")
        chat.type("/reset\r")
        chat.expect("a new conversation begins")
        chat.type("/history\r")
        chat.expect("nothing was said yet")
        chat.type("/quit\r")
        assert chat.end() == 0
        [line] = (tmp_path / "chat.jsonl").read_text().splitlines()
        assert json.loads(line)["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "good morning to you"},
            {"role": "assistant", "content": "good morning to you"},
            {"role": "user", "content": "one two three"},
            {"role": "assistant", "content": "one two"},
        ]

    def test_messages_of_several_lines(self, chat: Terminal) -> None:
        chat.type('"""\rone\rtwo\r"""\r')
        chat.expect("\none\ntwo\n>>>")
        chat.type(f"three{ALT_ENTER}four\r")
        chat.expect("\nthree\nfour\n>>>")
        chat.type(CTRL_D)
        assert chat.end() == 0

    def test_ctrl_c_at_the_prompt_clears_the_line(self, chat: Terminal) -> None:
        chat.type("never sent" + CTRL_C)
        chat.expect("Ctrl-D or /quit ends the chat")
        chat.type("sent\r")
        chat.expect("\nsent\n")
        chat.type("/history\r")
        assert "never" not in chat.expect("model: sent")

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
        history = tmp_path / "batchinfer/chat-history"
        assert history.stat().st_mode & 0o777 == 0o600
        with Terminal(*ECHO, state=tmp_path) as second:
            second.expect(">>>")
            second.type(UP + UP + "\r")
            second.expect("\nremember this\n")


def test_ctrl_c_ends_an_answer_and_not_the_chat(tmp_path: Path) -> None:
    slow = ["--echo-latency-seconds", "60", "--echo-tokens", "2000,2000", "--input-history", ""]
    with Terminal(*ECHO, *slow, state=tmp_path) as chat:
        chat.expect(">>>")
        chat.type("on and\r")
        chat.expect("\non and on and")
        chat.type(CTRL_C)
        chat.expect("stopped; the model sees what it has said")
        chat.expect(">>>")
        chat.type("/history\r")
        chat.expect("model (stopped): on and on and")
        chat.expect(">>>")
        chat.type("/quit\r")
        assert chat.end() == 0
    assert not list(tmp_path.iterdir())


def test_answers_go_to_a_file_and_the_prompt_to_the_terminal(tmp_path: Path) -> None:
    with Terminal(*ECHO, state=tmp_path, stdout=tmp_path / "out") as chat:
        chat.expect(">>>")
        chat.type("hello there\r")
        chat.expect(">>>")
        chat.type("/quit\r")
        assert chat.end() == 0
    assert (tmp_path / "out").read_text() == "hello there\n"


class TestPipe:
    def test_each_line_is_a_message(self) -> None:
        done = pipe('hello you\n\n/set max_tokens=1\nhello you\n"""\na\n\nb"""\n')
        assert (done.returncode, done.stdout) == (0, "hello you\nhello\na\n\nb\n")
        assert ">>>" not in done.stdout + done.stderr

    def test_nothing_at_all(self) -> None:
        done = pipe("")
        assert (done.returncode, done.stdout) == (0, "")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("/unknown\nnever\n", "/unknown: is not a command"),
            ("/set max_tokens=0\nnever\n", "max_tokens: 0, expected at least 1"),
            ("/set\nnever\n", "/set: expected NAME=VALUE"),
            (
                "/set max_tokns=2\nnever\n",
                "/set max_tokns: vLLM's SamplingParams has no such field; did you",
            ),
            ("/save\nnever\n", "/save: expected the name of a new file"),
            ("/reset\n/save never.jsonl\nnever\n", "/save: nothing was said yet"),
            ('"""\nnever\n', "standard input: ends within a message"),
        ],
    )
    def test_a_mistake_ends_it(self, text: str, message: str) -> None:
        done = pipe("first\n" + text)
        assert (done.returncode, done.stdout) == (2, "first\n")
        assert message in done.stderr
        assert "Traceback" not in done.stderr

    def test_bytes_that_are_no_text_are_refused(self) -> None:
        command = [sys.executable, "-m", "batchinfer", *ECHO]
        done = subprocess.run(command, input=b"a\xff\n", capture_output=True, timeout=120)
        assert (done.returncode, done.stdout) == (2, b"")
        assert b"UTF-8" in done.stderr or b"utf-8" in done.stderr
        assert b"Traceback" not in done.stderr

    def test_standard_input_may_be_closed(self) -> None:
        command = [sys.executable, "-m", "batchinfer", *ECHO]
        closed = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
        done = subprocess.run(closed, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, "")
        assert "Traceback" not in done.stderr

    def test_a_signal_ends_it(self) -> None:
        command = [sys.executable, "-m", "batchinfer", *ECHO, "--echo-latency-seconds", "60"]
        process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True)
        try:
            process.stdin.write("a " * 1000 + "\n")
            process.stdin.flush()
            assert process.stdout.read(2) == "a "
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 75
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()
            for stream in (process.stdin, process.stdout, process.stderr):
                stream.close()

    def test_standard_input_that_is_no_text(self) -> None:
        class Binary:
            def readline(self):
                return b"\xff".decode()

        with pytest.raises(InputError, match="standard input: cannot be read"):
            PipedLines(Binary()).read()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm"], "--model: is missing"),
        (["--engine", "vllm", "--model", "./nowhere"], "is no folder on this machine"),
        (["--sampling", "n=2"], "n: is 2, expected 1"),
        (["--user-msg-fmt", "user: {}"], "--assistant-msg-fmt: is missing"),
        (["--user-msg-fmt", "user", "--assistant-msg-fmt", "{}"], "expected {} exactly once"),
        (["--temperature", "x"], "'x' is not a valid float"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_loaded(capfd, arguments, message) -> None:
    assert main([*ECHO, *arguments]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert "loading" not in err


# --------------------------------------------------------------------------- settings and context


class WordTokenizer:
    """A token is a word. The chat template writes each role and content as words."""

    eos_token, has_chat_template, longest_token = "", True, 0

    def apply_chat_template(self, messages, *, template, continue_final, kwargs):
        if not template:
            return " ".join(f"<{m['role']}> {m['content']}" for m in messages)
        import jinja2

        rendered = jinja2.Environment().from_string(template)
        return rendered.render(messages=messages, add_generation_prompt=True, **kwargs)

    def encode(self, texts, *, add_special_tokens):
        start = [1] if add_special_tokens else []
        return [[*start, *(len(word) + 10 for word in text.split())] for text in texts]

    def decode(self, token_ids):
        return "<s>" if list(token_ids) == [1] else " ".join(map(str, token_ids))


def make_settings(formats: Formats | None = None, **options) -> Settings:
    given = {"engine": "echo", "messages_column": "messages", "turns": "all", **options}
    given = with_defaults(given)
    return Settings(given, choices(given), formats)


class TestContext:
    def dialogue(self, max_model_len: int, **options) -> Dialogue:
        dialogue = Dialogue(make_settings(**options), WordTokenizer(), max_model_len)
        for number in range(4):
            dialogue.add(Turn(message=f"question {number}", answer=f"answer {number}"))
        return dialogue

    def test_whole_turns_are_left_out_from_the_first_on(self) -> None:
        # A turn has 6 tokens, the system prompt 2 and the message 2. With 4 for the answer 16 fit.
        ready = self.dialogue(20, max_tokens=4, system_prompt="short").prepare("now")
        assert ready.num_dropped == 2
        assert ready.prompt == (
            "<system> short <user> question 2 <assistant> answer 2 "
            "<user> question 3 <assistant> answer 3 <user> now"
        )
        assert len(ready.request.token_ids) == 16

    def test_nothing_is_left_out_while_there_is_room(self) -> None:
        assert self.dialogue(30, max_tokens=4).prepare("now").num_dropped == 0

    def test_the_prompt_may_have_half_of_the_context_whatever_max_tokens_says(self) -> None:
        assert self.dialogue(52, max_tokens=1000).prepare("now").num_dropped == 0

    def test_a_message_that_does_not_fit_alone_is_refused(self) -> None:
        dialogue = self.dialogue(20, max_tokens=4)
        assert dialogue.prepare("word " * 18).num_dropped == 4
        with pytest.raises(InputError, match="the message is too long: its prompt has 20 tokens"):
            dialogue.prepare("word " * 19)
        assert len(dialogue.turns) == 4


class TestSettings:
    def test_values_change_and_go_back(self) -> None:
        settings = make_settings(temperature=0.5, max_tokens=9)
        settings.set({"max_new_tokens": 5, "top_k": 3, "seed": 7})
        settings.set({"temperature": None, "max_tokens": 6})
        assert settings.shown() == {"max_tokens": 6, "top_k": 3, "seed": 7}

    @pytest.mark.parametrize(
        ("pairs", "message"),
        [
            ({"temperature": -1}, "temperature: -1.0, expected"),
            ({"temperature": "hot"}, "Expected `float | null`"),
            ({"temprature": 1}, "did you mean 'temperature'"),
            ({"temprature": None}, "did you mean 'temperature'"),
            ({"n": 2}, "n: is 2, expected 1"),
            ({"seed": "x"}, "seed: is 'x', expected a whole number or none"),
        ],
    )
    def test_a_wrong_value_changes_nothing(self, pairs, message) -> None:
        settings = make_settings(max_tokens=9)
        with pytest.raises(ConfigError) as error:
            settings.set({"top_p": 0.5, **pairs})
        assert message in f"{error.value.message} {error.value.hint}"
        assert settings.shown() == {"max_tokens": 9, "seed": 0}

    def test_each_attempt_has_a_seed_of_its_own_that_repeats_in_the_next_chat(self) -> None:
        def seeds():
            dialogue = Dialogue(make_settings(temperature=1.0), None, None)
            return [dialogue.prepare("again").request.sampling.seed for _ in range(3)]

        assert len(set(seeds())) == 3
        assert seeds() == seeds()


def test_the_adapter_answers_every_message() -> None:
    dialogue = Dialogue(make_settings(lora=("a=/adapters/a",)), None, None)
    assert dialogue.prepare("hi").request.adapter == "a"
    with pytest.raises(ConfigError, match="--lora: is given 2 times, expected one adapter"):
        make_settings(lora=("a=/adapters/a", "b=/adapters/b"))


class TestFormats:
    FORMATS = Formats(
        user=read_format("--user-msg-fmt", r"user: {}\n"),
        assistant=read_format("--assistant-msg-fmt", r"bot: {}</s>\n"),
    )

    def test_messages_stand_in_their_formats(self) -> None:
        settings = make_settings(self.FORMATS, system_prompt="Be brief.")
        dialogue = Dialogue(settings, WordTokenizer(), None)
        dialogue.add(Turn(message="hi", answer=" hello\n"))
        ready = dialogue.prepare("{{ not a template }}")
        assert ready.prompt == (
            "<s>Be brief.\nuser: hi\nbot: hello</s>\nuser: {{ not a template }}\nbot: "
        )

    def test_an_answer_ends_where_a_format_does(self) -> None:
        dialogue = Dialogue(make_settings(self.FORMATS), WordTokenizer(), None)
        assert dialogue.prepare("hi").request.sampling.stop == ["</s>", "user:"]
        own = Dialogue(make_settings(self.FORMATS, stop=["."]), WordTokenizer(), None)
        assert own.prepare("hi").request.sampling.stop == ["."]
