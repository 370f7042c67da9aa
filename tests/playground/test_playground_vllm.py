"""`chat` with the demo's model behind vLLM's server: what it knows, its prompts, and a stop."""

import pytest

from models import DEMO_MODEL
from terminal import CTRL_C, Terminal

pytestmark = pytest.mark.vllm


@pytest.fixture
def options(demo_url):
    return ["--engine", "openai", "--base-url", demo_url, "--model", str(DEMO_MODEL)]


def test_chat_in_a_terminal(options, tmp_path):
    with Terminal(
        "chat", *options, "--max-tokens", "24", "--temperature", "0", state=tmp_path
    ) as chat:
        chat.expect(">>>", 120)
        chat.talk(
            ("What is the capital of Peru?", "\nLima\n"),
            ("/prompt", "<|im_start|>user\nWhat is the capital of Peru?<|im_end|>\n"),
            ("/set ignore_eos=true,max_tokens=none", "ignore_eos = True"),
        )
        chat.send("What is 47 plus 38?\r")
        chat.expect("85")
        chat.send(CTRL_C)
        chat.expect(": the model sees what it has said")  # on a busy machine it was done before
        chat.send("/history\r")
        chat.expect("assistant: 85")
        chat.expect(">>>")
        chat.leave()
    assert "WARNING" not in chat.shown
    assert "INFO" not in chat.shown
