"""The command that goes on with a run, where somebody else wrote run.json: bash gets words, and nothing to run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.records import Run
from batchinfer.runs.verify import worker_command

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
    prompt = dict.fromkeys(("messages_column", "system_prompt", "prompt_template"), text) | {
        "blank_columns": [text],
        "body": {"stop": [text], "response_format": {text: text}},
    }
    recorded = {
        "options": dict.fromkeys(("model", "engine", "limit", "run_seed"), text)
        | {"base_urls": [text]},
        "server_args": ["--max-model-len", text],
    }
    command = worker_command(run_of({"prompt": prompt}, recorded), text, text)
    words = words_of(command, tmp_path)
    assert words[0] == "worker"
    assert "…" not in words
    for option in ("--job", "--output", "--limit", "--seed", "--model", "--messages-column"):
        assert words[words.index(option) + 1] == text
    assert all(letter.isprintable() or letter == "\n" for letter in command)
    assert not list(tmp_path.iterdir())
    damaged = worker_command(run_of({"prompt": {"body": text}}, {}), text, text)
    assert words_of(damaged, tmp_path)[-1] == "…", "a gap for whoever edited it"


@pytest.mark.parametrize(
    "words",
    [
        ["--trust-remote-code"],
        ["--trust_remote_code=true"],
        ["--tool-parser-plugin", "evil.py"],
        ["--middleware", "evil.Evil"],
    ],
)
def test_no_code_is_run_because_run_json_says_so(tmp_path: Path, words: list[str]) -> None:
    recorded = {"server_args": ["--seed-x", "1", *words, "--max-model-len", "8"]}
    config = {"model": "m", "server_command": "evil {model} {port}"}
    command = worker_command(run_of(config, recorded), "/run", "/job")
    assert "left out" in command
    given = words_of(command, tmp_path)
    assert given[-4:] == ["--seed-x", "1", "--max-model-len", "8"]
    assert not [word for word in given if "evil" in word or "trust" in word]
    assert "left out" not in worker_command(run_of({"model": "m"}, {}), "/run", "/job")
