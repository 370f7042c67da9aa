"""Prompt options of `worker` and `check` that take a text or a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.cli.main import main
from making import make_job

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def refused(capsys: pytest.CaptureFixture[str], job: str, *options: str) -> str:
    assert main(["worker", "--job", job, "--engine", "echo", *options, "--preview", "1"]) == 2
    return capsys.readouterr().err


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    make_job(tmp_path / "job", rows=2, per_chunk=2)
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "job")


@pytest.mark.parametrize("option", ["--chat-template", "--system-prompt"])
def test_the_name_of_a_file_is_not_taken_for_the_text(
    capsys: pytest.CaptureFixture[str], job: str, option: str
) -> None:
    Path("chat.jinja").write_text(TEMPLATE)
    options = ("--prompt-column", "prompt", "--as-chat", option)
    said = refused(capsys, job, *options, "chat.jinja")
    assert f"write {option} @chat.jinja" in said
    assert main(["worker", "--job", job, "--engine", "echo", *options, "@chat.jinja"]) == 0


def test_a_chat_template_that_takes_nothing_from_the_conversation_is_refused(
    capsys: pytest.CaptureFixture[str], job: str
) -> None:
    Path("empty.jinja").write_text("Hello\n")
    for text in ("mistyped.jinja", "@empty.jinja"):
        said = refused(
            capsys, job, "--prompt-column", "prompt", "--as-chat", "--chat-template", text
        )
        assert "every prompt would be the same" in said
        assert "--chat-template @FILE" in said


def test_long_texts_are_no_names_of_files(job: str) -> None:
    options = ("--as-chat", "--prompt-column", "prompt", "--system-prompt", "long " * 1000)
    assert main(["worker", "--job", job, "--engine", "echo", *options]) == 0
