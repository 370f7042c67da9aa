"""The command that goes on with a run, where somebody else wrote run.json: bash gets words, and nothing to run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.records import Run
from batchinfer.runs.resume_command import worker_command

HOSTILE = (
    "0; touch hurt",
    "$(touch hurt)",
    "`touch hurt`",
    "' ; touch hurt ; '",
    "a\n touch hurt\n",
    "# \x1b[2K\\' ; touch hurt ; $'",
    "\N{RIGHT-TO-LEFT OVERRIDE}| touch hurt",
    "--trust-remote-code",
    "x & touch hurt",
)


def run_of(config: dict[str, Any], recorded: dict[str, Any]) -> Run:
    return Run(format_version=1, fingerprint="f", nonce="n", config=config, recorded=recorded)


def words_of(command: str, folder: Path) -> list[str]:
    """What batchinfer would be called with. Texts that come from files are read."""
    script = (
        'batchinfer() { for word; do [ -p "$word" ] && cat "$word" || printf %s "$word"; '
        f'printf "\\0"; done; }}\n{command}'
    )
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, check=True)
    assert not done.stderr
    return done.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("text", HOSTILE)
def test_whatever_run_json_holds_is_one_word(tmp_path: Path, text: str) -> None:
    names = "model tokenizer hf_config_path quantization dtype max_model_len limit seed"
    config: dict[str, Any] = dict.fromkeys(names.split(), text)
    config["engine_args"] = {text: text}
    texts = "request_format turns messages_column prompt_column template_name prompt_template"
    texts += " system_prompt chat_template id_column output_format truncate_prompt continue_final"
    config["prompt"] = dict.fromkeys(texts.split(), text) | {
        "keep": [text],
        "blank_columns": [text],
        "few_shot": [{"prompt": text}],
        "chat_template_kwargs": {text: text},
    }
    config["sampling"] = {"stop": [text], "structured": {text: text}, "extra": {text: text}}
    recorded = {
        "engine": f"{text} ",
        "tensor_parallel_size": text,
        "pipeline_parallel_size": text,
        "trust_remote_code": text,
    }
    parts = [config, {**config, "prompt": {}}, {**config, "sampling": {}}]
    for part in parts:
        command = worker_command(run_of(part, recorded), text, text, [text])
        words = words_of(command, tmp_path)
        assert words[0] == "worker"
        assert "…" not in words
        for option in ("--job", "--manifest", "--output", "--limit", "--seed", "--model"):
            assert words[words.index(option) + 1] == text
        assert all(letter.isprintable() or letter == "\n" for letter in command)
    assert not list(tmp_path.iterdir())


def test_code_of_the_model_is_not_trusted_because_run_json_says_so(tmp_path: Path) -> None:
    config = {"model": "m", "engine_args": {"trust_remote_code": True}}
    command = worker_command(run_of(config, {"trust_remote_code": True}), "/run", "/job")
    assert "code that comes with the model" in command
    assert not [word for word in words_of(command, tmp_path) if "trust" in word]
    assert "trust" not in worker_command(run_of({"model": "m"}, {}), "/run", "/job")
