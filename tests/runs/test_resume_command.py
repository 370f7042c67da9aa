"""The command that goes on with a run, where somebody else wrote run.json: bash gets words, and nothing to run."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.records import Run
from batchinfer.runs.verify import worker_command

HOSTILE = (
    "0; touch hurt",
    "$(touch hurt)",
    "# \x1b[2K\\' ; touch hurt ; $'",
    "\N{RIGHT-TO-LEFT OVERRIDE}| touch hurt",
    "--trust-remote-code",
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
def test_whatever_run_json_holds_is_one_word(tmp_path, text):
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
        ({}, {"server_args": ["--seed-x", 5]}, "…"),
        ({}, {"options": FORGED}, "--limit 3"),
    ],
)
def test_values_of_other_types_leave_a_gap_and_only_recorded_options_are_taken(
    prompt, recorded, words
):
    command = worker_command(run_of({"prompt": prompt}, recorded), "/run", "/job")
    assert command == f"batchinfer worker --job /job --output /run {words}"


SAFE = ["--reasoning-parser", "qwen3", "--stop", "-", "-O3"]
UNSAFE = {
    # words of the server, which vLLM's parser takes for the whole name, too, and what is named of them
    "--trust-remote-code": "--trust-remote-code",
    "--trust-rem": "--trust-rem",
    "--plugin\nevil=#": "--plugin\\nevil",
    "--reasoning-parser-p evil.py": "--reasoning-parser-p",
    "--logits evil.Evil": "--logits",
    "--middleware evil.Evil": "--middleware",
    "--worker-extension-cls evil.Evil": "--worker-extension-cls",
    "--scheduler_cls evil.Evil": "--scheduler-cls",
    "--distributed-executor-backend=evil.Evil": "--distributed-executor-backend",
    "--kv-t.kv_connector_module_path evil": "--kv-t.kv-connector-module-path",
    "--ec-transfer-config.ec_connector evil": "--ec-transfer-config.ec-connector",
}


@pytest.mark.parametrize("typed", UNSAFE)
def test_no_code_is_run_because_run_json_says_so(typed):
    options = {"server_command": "evil {model} {port}"}
    words = [*SAFE, *typed.split(" "), "--max-model-len", "8"]
    recorded = {"options": options, "server_args": words}
    command = worker_command(run_of({}, recorded), "/run", "/job")
    safe = f"batchinfer worker --job /job --output /run {' '.join(SAFE)} --max-model-len 8"
    left_out = f"--server-command, {UNSAFE[typed]} left out: add it only if you trust the code that it runs"
    assert command == f"{safe} # {left_out}"
