"""`generate` and `chat` with the demo's model: what it knows, its prompts, and its context."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchinfer.cli.main import main
from composer_file import composer_content, write_composer_file
from shared_engine import SharedEngine
from terminal import CTRL_C, CTRL_D, Terminal
from tiny_model import DEMO_MODEL

pytestmark = pytest.mark.vllm
OPTIONS = ["--engine-arg", "kv_cache_memory_bytes=67108864", "--engine-arg", "block_size=32"]
SUM = "What is 47 plus 38?"


def test_chat_in_a_terminal_on_a_converted_checkpoint(tmp_path: Path) -> None:
    """The model is the one that `convert composer-to-hf` restores from a checkpoint of the demo's model."""
    checkpoint = write_composer_file(tmp_path / "ep0-ba1-rank0.pt", composer_content(DEMO_MODEL))
    assert main(["convert", "composer-to-hf", str(checkpoint), str(tmp_path / "model")]) == 0
    model = ["--model", str(tmp_path / "model"), "--max-tokens", "24"]
    with Terminal("chat", *model, *OPTIONS, state=tmp_path) as chat:
        chat.expect("context 512 tokens", 240)
        chat.expect(">>>")
        chat.type("What is the capital of Peru?\r")
        chat.expect("\nLima\n>>>")
        chat.type("/prompt\r")
        shown = chat.expect(" tokens: ")
        assert (
            "<|im_start|>user\nWhat is the capital of Peru?<|im_end|>\n<|im_start|>assis" in shown
        )
        assert ":'<|im_start|>'" in chat.expect("\n>>>")
        chat.type("/set ignore_eos=true,max_tokens=none\r")
        chat.expect("ignore_eos = True")
        chat.expect("\n>>>")
        chat.type(SUM + "\r")
        chat.expect("85")
        chat.type(CTRL_C)
        chat.expect("stopped; the model sees what it has said")
        chat.expect(">>>")
        chat.type("/set ignore_eos=false,max_tokens=24\r")
        chat.expect("\n>>>")
        chat.type("/reset\r")
        chat.expect("\n>>>")
        for _ in range(2):
            chat.type("blah " * 50 + "\r")
            chat.expect("\n>>>")
        chat.type("blah " * 50 + "\r")
        chat.expect("the context is full: the first 1 of 2 turns left out")
        chat.expect("\n>>>")
        chat.type("/reset\r")
        chat.expect("\n>>>")
        chat.type(SUM + "\r")
        chat.expect("\n85\n>>>")
        chat.type("too many words " * 200 + "\r")
        chat.expect("the message is too long: its prompt has")
        chat.expect(">>>")
        chat.type(CTRL_D)
        assert chat.end() == 0
    assert "WARNING" not in chat.shown
    assert "INFO" not in chat.shown


def test_generate_answers_on_a_grid(
    demo_engine: SharedEngine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("batchinfer.playground.session.create_engine", lambda _: demo_engine)
    command = ["generate", "--model", str(DEMO_MODEL), "--json", *OPTIONS]
    prompts = ["-p", "What is the capital of Peru?", "-p", SUM]
    assert main([*command, *prompts, "--temperature", "0,0.1", "--n", "2"]) == 0
    out, err = capfd.readouterr()
    assert out.count("\n") == 1
    results = json.loads(out)["results"]
    assert [each["prompt_index"] for each in results] == [0, 1, 0, 1]
    for each in results:
        expected = ["Lima", "85"][each["prompt_index"]]
        assert [answer["text"] for answer in each["answers"]] == [expected] * 2
        assert each["output_tokens"] == sum(a["output_tokens"] for a in each["answers"])
        assert 0 < each["first_token_seconds"] < each["seconds"]
        assert each["input_tokens"] > 10
    assert "INFO" not in err

    too_long = [*command, "-p", "word " * 600]
    assert main(too_long) == 2
    assert "prompt 1 of 1: the prompt has" in capfd.readouterr().err
