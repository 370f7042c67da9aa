"""`worker --show-config`: what is set, where from, and what the example files mean."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from batchinfer.cli.main import main
from batchinfer.core.redaction import is_secret, without_secrets
from making import ECHO

REPOSITORY = Path(__file__).resolve().parents[2]


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    status = main(["worker", *arguments])
    captured = capsys.readouterr()
    lines = captured.out.strip().splitlines()
    return status, json.loads(lines[-1]) if lines else {}, captured.err


def test_show_config_says_where_each_value_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "run.yaml"
    settings.write_text("sampling: {max_tokens: 9, n: 3, stop: [x]}\nvllm: {hf_token: hf_abc}\n")
    monkeypatch.setenv("BATCHINFER_WORKER_TOP_P", "0.5")
    monkeypatch.setenv("BATCHINFER_WORKER_MAX_TOKENS", "8")
    options = ("--config", str(settings), "--job", "s3://nowhere/job", *ECHO, "--n", "4")
    status = main(["worker", *options, "--show-config"])
    captured = capsys.readouterr()
    assert status == 0
    found = json.loads(captured.out)
    assert found["options"]["n"] == {"value": 4, "from": "command line"}
    assert found["options"]["top-p"] == {"value": 0.5, "from": "environment"}
    assert found["options"]["max-tokens"] == {"value": 8, "from": "environment"}
    assert found["options"]["temperature"] == {"value": None, "from": "default"}
    assert found["options"]["stop"]["from"] == "settings file"
    assert found["resolved"]["prompt"]["body"]["max_tokens"] == 8
    assert found["resolved"]["engine"]["server_args"] == ["--hf-token", "(secret)"]
    assert "hf_abc" not in captured.out + captured.err


def test_secrets_are_found_however_deep_and_counts_of_tokens_are_none() -> None:
    assert without_secrets({"a": [{"api_key": "x"}], "url": "s3://id:key@b/c"}) == {
        "a": [{"api_key": "(secret)"}],
        "url": "s3://…@b/c",
    }
    assert not any(map(is_secret, ("max_tokens", "tokenizer", "stop_token_ids", "echo-tokens")))
    assert all(map(is_secret, ("HF_TOKEN", "hf-token", "aws_secret_access_key", "password")))


EXAMPLES = ("run", "axolotl-guide", "completions-requests", "openai-batch")


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_settings_are_read(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = REPOSITORY / "examples" / f"{name}.yaml"
    status, result, shown = call(capsys, "--config", str(path), "--show-config")
    assert status == 0, shown
    assert result["options"]["model"]["from"] == "settings file"


def test_every_line_of_the_full_example_is_an_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (REPOSITORY / "examples" / "run.yaml").read_text()
    for name in ("prompt.jinja", "system.txt", "chat.jinja"):
        (tmp_path / name).write_text("Hello {{ messages }}")
        text = text.replace(name, str(tmp_path / name))
    for name, content in {"examples.jsonl": '{"a": 1}\n', "tools.json": '[{"name": "f"}]'}.items():
        (tmp_path / name).write_text(content)
        text = text.replace(name, str(tmp_path / name))
    settings = tmp_path / "run.yaml"
    settings.write_text(re.sub(r"(?m)^  #(?=\w)", "  ", text))
    status, result, shown = call(capsys, "--config", str(settings), "--show-config")
    assert status == 0, shown
    assert result["options"]["system-prompt"]["from"] == "settings file"


def test_guide_s_generation_settings_mean_the_same_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = REPOSITORY / "examples" / "axolotl-guide.yaml"
    _, result, _ = call(capsys, "--config", str(path), "--show-config")
    sampling = {
        name: value for name, value in result["resolved"]["prompt"]["body"].items() if value
    }
    assert (
        sampling.items()
        >= {
            "n": 3,
            "repetition_penalty": 1.18,
            "max_tokens": 500,
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 20,
        }.items()
    )
