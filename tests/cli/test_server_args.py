"""Options of the server: taken as they are typed, wherever they stand, and handed on; ours are told from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest

from batchinfer.cli.main import group, main
from batchinfer.cli.server_args import check_name, divide, without_secrets_in


def options_of(name: str) -> list[click.Parameter]:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    return command.params


Called = tuple[int, dict[str, Any], str]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Shows what `worker` makes of words of a command line: its status, its engine's configuration, stderr."""

    def called(*words: str, engine: str = "vllm") -> Called:
        base = ["--engine", engine, "--prompt-column", "p", "--show-config"]
        status = main(["worker", *base, *words])
        out, err = capsys.readouterr()
        found = json.loads(out.splitlines()[-1])["resolved"]["engine"] if out.strip() else {}
        return status, found, err

    return called


@pytest.mark.parametrize(
    ("words", "own", "server"),
    [
        ("--max-model-len 8192 --quantization=fp8", "", "--max-model-len 8192 --quantization=fp8"),
        ("--enforce-eager --limit 5", "--limit 5", "--enforce-eager"),
        ("--limit 5 --lora-modules a b --n=2", "--limit 5 --n=2", "--lora-modules a b"),
        ("--no-enable-x -O3 -cc.mode 3", "", "--no-enable-x -O3 -cc.mode 3"),
        ("--seed -1 --some-number -1", "--seed -1", "--some-number -1"),
        ("--seed 3 -- --sed 4 x", "--seed 3", "--sed 4 x"),
        ("--stop --dtype --dtype half", "--stop --dtype", "--dtype half"),
        ("a -o b --dtype half --task embed", "a -o b --task embed", "--dtype half"),
    ],
)
def test_words_are_divided_as_both_parsers_read_them(words: str, own: str, server: str) -> None:
    assert divide(words.split(), options_of("run")) == (own.split(), server.split())


def test_what_is_nearly_ours_reaches_the_server_after_two_dashes(
    show: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = show("--model", "m", "--colum", "x")
    assert status == 2
    assert "Did you mean --column?" in err
    status, engine, _ = show("--model", "m", "--", "--colum", "x")
    assert (status, engine["server_args"]) == (0, ["--colum", "x"])
    monkeypatch.setenv("BATCHINFER_WORKER_MAX_TOKNS", "hush")
    status, _, err = show("--model", "m")
    assert (status, "--max-tokens" in err, "hush" in err) == (2, True, False)


@pytest.mark.vllm
def test_no_option_of_vllm_is_taken_for_a_misspelling_of_ours(vllm_options: set[str]) -> None:
    for name in ("worker", "run", "check", "chat", "generate"):
        ours = {each for parameter in options_of(name) for each in parameter.opts}
        for option in sorted(vllm_options - ours):
            check_name(option, dict.fromkeys(ours))


def test_settings_and_variables_hold_them_too_and_what_is_typed_wins(
    show: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {model: m}\nvllm:\n  max_model_len: 4096\n  enforce-eager: true\n  enable_x: false\n"
        "  limit-mm-per-prompt: {image: 2}\n  lora_modules: [a, b]\n  dtype: half\n  nothing:\n"
    )
    monkeypatch.setenv("BATCHINFER_WORKER_DTYPE", "float")
    monkeypatch.setenv("BATCHINFER_WORKER_LANGUAGE_MODEL_ONLY", "true")
    status, engine, _ = show("--config", str(path), "--max-model-len=8192", "--no-enforce-eager")
    assert status == 0
    assert engine["server_args"] == [
        "--max-model-len=8192", "--no-enforce-eager", "--no-enable-x", "--limit-mm-per-prompt", '{"image": 2}',
        "--lora-modules", "a", "b", "--dtype", "float", "--language-model-only",
    ]  # fmt: skip


def test_secrets_are_not_kept() -> None:
    words = ["--hf-token", "a", "--dtype", "half", "--my-api-key=a", "--x", "s3://a:b@c"]
    assert without_secrets_in(words) == ["--dtype", "half", "--x", "s3://…@c"]
