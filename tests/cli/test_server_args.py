"""Options of the server: taken as they are typed, wherever they stand, and handed on; ours are told from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest

from batchinfer.cli.main import group, main
from batchinfer.cli.server_args import check_name, divide, merge, without_secrets_in
from batchinfer.core.errors import ConfigError
from batchinfer.engines.config import parse_args
from making import make_job


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
    ],
)
def test_words_are_divided_as_both_parsers_read_them(words: str, own: str, server: str) -> None:
    assert divide(words.split(), options_of("worker")) == (own.split(), server.split())


def test_arguments_before_an_option_of_the_server_are_ours() -> None:
    words = ["a.parquet", "b.parquet", "-o", "out", "--dtype", "half", "--task", "embed", "-oelse"]
    own, server = divide(words, options_of("run"))
    assert own == ["a.parquet", "b.parquet", "-o", "out", "--task", "embed", "-oelse"]
    assert server == ["--dtype", "half"]


def test_json_is_one_word_and_reaches_the_server_as_it_is(show: Any) -> None:
    images = '{"image": 2}'
    words = ("--limit-mm-per-prompt", images, "--tokenizer-mode", "mistral")
    status, engine, _ = show("--model", "m", *words)
    assert (status, engine["server_args"]) == (0, list(words))
    assert parse_args(engine["server_args"])["limit_mm_per_prompt"] == {"image": 2}


@pytest.mark.parametrize(
    ("word", "meant"),
    [("--max-token", "--max-tokens"), ("--prompt-colum", "--prompt-column"), ("--lora-colum", "--lora-column"),
     ("--temprature=1", "--temperature"), ("--system_prompt", "--system-prompt")],
)  # fmt: skip
def test_what_is_nearly_ours_is_refused_with_the_nearest_name(
    show: Any, word: str, meant: str
) -> None:
    status, _, err = show(word, "x")
    assert status == 2
    assert f"Did you mean {meant}?" in err
    status, engine, _ = show("--model", "m", "--", word, "x")
    assert (status, engine["server_args"][0]) == (0, word)


@pytest.mark.vllm
def test_no_option_of_vllm_is_taken_for_a_misspelling_of_ours() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    commands = FlexibleArgumentParser().add_subparsers()
    parser = ServeSubcommand().subparser_init(commands)
    theirs = {name for action in parser._actions for name in action.option_strings}
    assert len(theirs) > 300
    for name in ("worker", "run", "check", "chat", "generate"):
        ours = {each for parameter in options_of(name) for each in parameter.opts}
        for option in sorted(theirs - ours):
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


def test_a_variable_that_is_nearly_ours_is_refused(
    show: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHINFER_WORKER_MAX_TOKNS", "hush")
    status, _, err = show("--model", "m")
    assert status == 2
    assert "--max-tokens" in err
    assert "hush" not in err


def test_the_same_option_twice_in_one_place_is_a_list_and_elsewhere_another_value() -> None:
    words = merge(["--x", "1", "--y"], ["--x", "2", "--x", "3"], ["--no-y"])
    assert words == ["--x", "2", "--x", "3", "--no-y"]
    assert parse_args(words) == {"x": [2, 3], "y": False}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "8000"], "--port: is not an option here"),
        (["--uds=/tmp/x"], "--uds: is not an option here"),
        (["-tp", "2"], "write --tensor-parallel-size"),
        (["--grpc"], "--grpc: is not an option here"),
    ],
)
def test_what_the_worker_decides_is_refused(show: Any, words: list[str], said: str) -> None:
    status, _, err = show("--model", "m", *words)
    assert status == 2
    assert said in err


def test_an_endpoint_takes_none(show: Any) -> None:
    url = ("--base-url", "http://127.0.0.1:9/v1", "--model", "m")
    status, _, err = show(*url, "--dtype", "half", engine="openai")
    assert status == 2
    assert "No such option: --dtype" in err
    assert "--engine openai starts no server" in err


def test_a_rehearsal_takes_all_and_says_that_it_checks_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_job(tmp_path / "job", rows=2, per_chunk=2)
    words = ["--engine", "echo", "--prompt-column", "prompt", "--quantization", "no-such"]
    assert main(["worker", "--job", str(tmp_path / "job"), *words]) == 0
    assert "--engine echo does not check: --quantization no-such" in capsys.readouterr().err


def test_secrets_are_neither_shown_nor_kept(show: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--hf-token",
        "hf_abc",
        "--dtype",
        "half",
        "--my-api-key=hf_abc",
        "--x",
        "s3://a:hf_abc@b",
    ]
    status, engine, err = show("--model", "m", *words)
    assert status == 0
    assert "hf_abc" not in json.dumps(engine) + err
    assert without_secrets_in(words) == ["--dtype", "half", "--x", "s3://…@b"]


def test_a_section_that_is_no_mapping_is_refused(show: Any, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("vllm: [1]\n")
    status, _, err = show("--config", str(tmp_path / "run.yaml"))
    assert status == 2
    assert "vllm is no mapping" in err
    with pytest.raises(ConfigError, match="--temperature"):
        check_name("--temperatur", {"--temperature": None})
