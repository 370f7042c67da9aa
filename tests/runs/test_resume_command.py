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
        "options": {"model": text, "media_root": text, "base_urls": [text]},
        "server_args": ["--max-model-len", text],
    }
    command = worker_command(run_of({"prompt": prompt}, recorded), text, text)
    words = words_of(command, tmp_path)
    assert words[0] == "worker"
    assert "…" not in words
    for option in ("--job", "--output", "--media-root", "--model", "--messages-column"):
        assert words[words.index(option) + 1] == text
    assert all(letter.isprintable() or letter == "\n" for letter in command)
    assert not list(tmp_path.iterdir())


FORGED = {"output": "s3://evil/x", "job": "evil", "prompt_template": 5, "limit": 3}


@pytest.mark.parametrize(
    ("prompt", "recorded", "words"),
    [
        ({"body": "x"}, {}, "…"),
        ({}, {"server_args": 5}, "…"),
        ({}, {"server_args": ["--seed-x", 5]}, "…"),
        ({}, {"options": [5]}, "…"),
        ({}, {"options": {"limit": "many"}}, "…"),
        ({}, {"options": {"model": {"a": 5}}}, "…"),
        ({}, {"options": {"loras": 5}}, "…"),
        ({}, {"options": FORGED}, "--limit 3"),
    ],
)
def test_values_of_other_types_leave_a_gap_and_only_recorded_options_are_taken(
    prompt: Any, recorded: Any, words: str
) -> None:
    command = worker_command(run_of({"prompt": prompt}, recorded), "/run", "/job")
    assert command == f"batchinfer worker --job /job --output /run {words}"


UNSAFE = (
    *("--trust-remote-code", "--trust_remote_code=true", "--plugin\nevil #"),
    *("--tool-parser-plugin", "evil.py", "--middleware", "evil.Evil"),
)


def test_no_code_is_run_because_run_json_says_so(tmp_path: Path) -> None:
    recorded = {"server_args": ["--seed-x", "1", *UNSAFE, "--max-model-len", "8"]}
    config = {"model": "m", "server_command": "evil {model} {port}"}
    command, comment = worker_command(run_of(config, recorded), "/run", "/job").split(" # ", 1)
    assert comment.startswith(
        "--trust-remote-code, --trust-remote-code, --plugin\\nevil #, "
        "--tool-parser-plugin, --middleware left out"
    )
    given = words_of(command, tmp_path)
    assert given[-4:] == ["--seed-x", "1", "--max-model-len", "8"]
    assert not [word for word in given if "evil" in word or "trust" in word]
    assert "left out" not in worker_command(run_of({"model": "m"}, {}), "/run", "/job")


@pytest.mark.parametrize(
    "word",
    [
        *(
            "--trust-rem",
            "--tool-p=x",
            "--reasoning-parser-p",
            "--logits",
            "--worker-extension-cls",
        ),
        *("--scheduler_cls", "--distributed-executor-backend=evil.Evil", "--kv-transfer-config"),
        *("--kv-t.kv_connector_module_path", "--ec-transfer-config.ec_connector"),
    ],
)
def test_beginnings_and_members_of_such_options_are_left_out_too(word: str) -> None:
    """vLLM's parser takes them for the whole name."""
    safe = ["--reasoning-parser", "qwen3", "--stop", "-", "-O3"]
    recorded = {"server_args": [*safe, word, "evil"]}
    command = worker_command(run_of({}, recorded), "/run", "/job").partition(" # ")[0]
    assert command == f"batchinfer worker --job /job --output /run {' '.join(safe)}"
