"""Options of the server: taken as they are typed, wherever they stand, and handed on; ours are told from them."""

import click
import pytest

from batchinfer.cli.main import group
from batchinfer.cli.server_args import check_name, divide, without_secrets_in


def options_of(name: str) -> list[click.Parameter]:
    return group.get_command(click.Context(group), name).params


SHOW = ("worker", "--model", "m", "--prompt-column", "p", "--show-config")


@pytest.mark.parametrize(
    ("words", "own", "server"),
    [
        ("--enforce-eager --limit 5", "--limit 5", "--enforce-eager"),
        ("--limit 5 --lora-modules a b --n=2", "--limit 5 --n=2", "--lora-modules a b"),
        ("--no-enable-x -O3 -cc.mode 3", "", "--no-enable-x -O3 -cc.mode 3"),
        ("--seed -1 --some-number -1", "--seed -1", "--some-number -1"),
        ("--seed 3 -- --sed 4 x", "--seed 3", "--sed 4 x"),
        ("--stop --dtype --dtype half", "--stop --dtype", "--dtype half"),
        ("a -o b --dtype half --task embed", "a -o b --task embed", "--dtype half"),
    ],
)
def test_words_are_divided_as_both_parsers_read_them(words, own, server):
    assert divide(words.split(), options_of("run")) == (own.split(), server.split())


def test_what_is_nearly_ours_reaches_the_server_after_two_dashes(call, monkeypatch):
    engine = call(*SHOW, "--", "--colum", "x").result["resolved"]["engine"]
    assert engine["server_args"] == ["--colum", "x"]
    monkeypatch.setenv("BATCHINFER_WORKER_MAX_TOKNS", "hush")
    refused = call(*SHOW)
    assert (refused.status, "--max-tokens" in refused.err) == (2, True)
    assert "hush" not in refused.err


@pytest.mark.vllm
def test_no_option_of_vllm_is_taken_for_a_misspelling_of_ours(vllm_options):
    for name in ("worker", "run", "check", "chat", "generate"):
        ours = {each for parameter in options_of(name) for each in parameter.opts}
        for option in sorted(vllm_options - ours):
            check_name(option, ours)


def test_settings_and_variables_hold_them_too_and_what_is_typed_wins(call, tmp_path, monkeypatch):
    path = tmp_path / "run.yaml"
    path.write_text(
        "vllm:\n  max_model_len: 4096\n  enforce-eager: true\n  enable_x: false\n"
        "  limit-mm-per-prompt: {image: 2}\n  lora_modules: [a, b]\n  dtype: half\n  nothing:\n"
    )
    monkeypatch.setenv("BATCHINFER_WORKER_DTYPE", "float")
    monkeypatch.setenv("BATCHINFER_WORKER_LANGUAGE_MODEL_ONLY", "true")
    done = call(*SHOW, "--config", path, "--max-model-len=8192", "--no-enforce-eager")
    assert done.result["resolved"]["engine"]["server_args"] == [
        "--max-model-len=8192", "--no-enforce-eager", "--no-enable-x", "--limit-mm-per-prompt", '{"image": 2}',
        "--lora-modules", "a", "b", "--dtype", "float", "--language-model-only",
    ]  # fmt: skip


def test_secrets_are_not_kept():
    words = ["--hf-token", "a", "--dtype", "half", "--my-api-key=a", "--x", "s3://a:b@c"]
    assert without_secrets_in(words) == ["--dtype", "half", "--x", "s3://…@c"]
