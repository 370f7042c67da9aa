"""`chat` and `generate` with a running endpoint as the engine."""

from __future__ import annotations

import io

import pytest

from batchinfer.cli.main import main
from fake_endpoint import fake_endpoint

pytest.importorskip("openai")


@pytest.fixture
def endpoint():
    with fake_endpoint() as found:
        yield found


def test_generate_answers_over_a_grid_and_streams(endpoint, capfd):
    options = ["--engine", "openai", "--base-url", endpoint.url, "--model", "echo-model"]
    assert main(["generate", *options, "--prompt", "one two three", "--max-tokens", "2,5"]) == 0
    shown = capfd.readouterr()
    assert "one two\n" in shown.out
    assert "one two three\n" in shown.out
    assert all(body["stream"] and body["messages"] for body in endpoint.bodies)


def test_chat_keeps_the_conversation(endpoint, capfd, monkeypatch):
    options = ["--engine", "openai", "--base-url", endpoint.url, "--model", "echo-model"]
    monkeypatch.setattr("sys.stdin", io.StringIO("hello there\nand again\n"))
    assert main(["chat", *options]) == 0
    assert capfd.readouterr().out == "hello there\nand again\n"
    roles = [message["role"] for message in endpoint.bodies[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_an_endpoint_that_is_away_is_said_at_once(command, capfd, monkeypatch):
    with fake_endpoint() as gone:
        pass
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    options = ["--engine", "openai", "--base-url", gone.url, "--model", "m"]
    prompt = ["--prompt", "a"] if command == "generate" else []
    assert main([command, *options, *prompt]) == 2
    assert "cannot be reached" in capfd.readouterr().err
