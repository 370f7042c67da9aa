"""The table of a run's options: each fills a field that exists, and is written back as it was read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from batchinfer.cli.main import group
from batchinfer.cli.options import Option
from batchinfer.cli.run_options import OPTIONS
from batchinfer.cli.values import read_pairs
from batchinfer.core.errors import ConfigError
from batchinfer.core.shell import FromFile
from batchinfer.engines.config import EchoOptions, EngineConfig
from batchinfer.prompts import PromptConfig
from batchinfer.worker.config import Limits, WorkerConfig

STRUCTS = {
    struct.__name__: struct
    for struct in (EngineConfig, EchoOptions, Limits, PromptConfig, WorkerConfig)
}
FROM_ELSEWHERE = ("manifests", "output", "worker_id")
"""Options without which the worker finds a value by itself."""


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.flag)
def test_an_option_fills_a_field_and_has_its_default(option: Option) -> None:
    if not option.struct:
        return
    fields = {field.name: field for field in msgspec.structs.fields(STRUCTS[option.struct])}
    assert option.target in fields
    if option.parameter not in FROM_ELSEWHERE:
        field = fields[option.target]
        factory = field.default_factory
        default = field.default if factory is msgspec.NODEFAULT else factory()
        assert option.read(parsed(option)[0]) == default


def parsed(option: Option, *words: str) -> list[Any]:
    """What click makes of these words, as a list of one."""

    @click.command
    @option.decorate
    def command(**options: Any) -> list[Any]:
        return list(options.values())

    found: list[Any] = command.main(words, standalone_mode=False)
    return found


HARD = "it's \"so\" $HOME `x`\nsecond, 'line' \N{SNOWMAN} "
VALUES: list[tuple[str, Any]] = [
    ("limit", 3),
    ("replicas", "auto"),
    ("replicas", 2),
    ("run_seed", None),
    ("run_seed", 0),
    ("run_seed", -7),
    ("gpus", ["0", "GPU-1"]),
    ("gpus", None),
    ("base_urls", ["http://a/v1", "http://b/v1"]),
    ("loras", {"a": "/x", "b": "s3://b/y"}),
    ("normalize", None),
    ("normalize", False),
    ("prompt_template", HARD),
    ("as_chat", True),
    ("system_prompt", HARD),
    ("system_prompt", f"@{HARD}"),
    ("chat_template_kwargs", {"a": [HARD]}),
    ("blank_columns", ["a", "b"]),
    ("stop", [HARD, "", "-"]),
    ("stop", None),
    ("stop_token_ids", [1, 2]),
    ("top_k", -1),
    ("temperature", 0.0),
    ("sampling", {"bad_words": ["a,b=c"], "min_tokens": 2}),
]


@pytest.mark.parametrize(("target", "value"), VALUES)
def test_a_value_is_spelled_as_it_is_read(target: str, value: Any, tmp_path: Path) -> None:
    (option,) = (option for option in OPTIONS if option.target == target)
    words: list[str] = []
    for flag, word in option.spell(value):
        words.append(flag)
        if isinstance(word, FromFile):
            (tmp_path / "file").write_text(word.text)
            words.append(f"{word.prefix}{tmp_path}/file")
        elif word is not None:
            words.append(word)
    assert option.read(parsed(option, *words)[0]) == value


def help_of(name: str) -> str:
    context = click.Context(group, info_name="batchinfer")
    command = group.get_command(context, name)
    assert command is not None
    return command.get_help(click.Context(command, info_name=name, parent=context))


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e400"])
def test_no_range_of_numbers_holds_one_that_is_none_or_infinite(text: str) -> None:
    checked = []
    for option in OPTIONS:
        kind = option.kind.click.get("type")
        if isinstance(kind, click.FloatRange):
            checked.append(option.parameter)
            with pytest.raises(click.BadParameter):
                kind.convert(text, None, None)
    assert "lease_seconds" in checked


@pytest.mark.parametrize("name", group.list_commands(click.Context(group)))
def test_every_option_has_a_help_text(name: str) -> None:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    options = [option for option in command.params if isinstance(option, click.Option)]
    assert [option.opts[0] for option in options if not option.help] == []


def test_help_begins_with_what_a_first_run_needs_and_ends_with_rehearsals() -> None:
    text = help_of("worker")
    headings = re.findall(r"^(\w.*):$", text, re.MULTILINE)
    assert headings == [
        "What a first run needs",
        "Input",
        "Model",
        "Engine",
        "Prompt",
        "Media",
        "Sampling",
        "Output",
        "Behaviour",
        "Endpoint, with --engine openai",
        "A look before working",
        "Settings and logs",
        "Rehearsal, with --engine echo",
    ]
    first = text.partition("What a first run needs:")[2].partition("Input:")[0]
    flags = re.findall(r"^  (--[\w-]+)", first, re.MULTILINE)
    assert flags == ["--job", "--output", "--model", "--messages-column", "--max-tokens"]
    assert all(flag in text.partition("Finished rows")[0] for flag in flags), "the example"
    assert len(re.findall(r"^  (?:-h, )?--", text, re.MULTILINE)) == len(OPTIONS) + 4


def test_help_of_check_begins_with_its_own_options() -> None:
    text = help_of("check")
    own = text.partition("\nOptions:")[2].partition("What a first run needs:")[0]
    assert {"--show", "--price-per-hour"} <= set(re.findall(r"--[\w-]+", own))
    assert "--show-config" not in text


@pytest.mark.parametrize(
    ("arguments", "pairs"),
    [
        (["a=1", "b=x"], {"a": 1, "b": "x"}),
        (["a=1, b = x y ,c=none"], {"a": 1, "b": "x y", "c": None}),
        (['a=["x,y=1", "z"],b=2'], {"a": ["x,y=1", "z"], "b": 2}),
        (['a={"k": [1, 2]},b=False'], {"a": {"k": [1, 2]}, "b": False}),
        (["stop=,"], {"stop": ","}),
        (["stop=a, b"], {"stop": "a, b"}),
        (["bad-words=[]"], {"bad_words": []}),
        (["a=1", "a=2"], {"a": 2}),
        (["a="], {"a": ""}),
        (["a=1e-3x,b=1"], {"a": "1e-3x", "b": 1}),
        (["url=http://x/?q=1"], {"url": "http://x/?q=1"}),
        (["a=1,"], {"a": 1}),
        ([""], {}),
    ],
)
def test_pairs_are_read_with_commas_between_and_inside(
    arguments: list[str], pairs: dict[str, object]
) -> None:
    assert read_pairs("--sampling", arguments) == pairs


@pytest.mark.parametrize("argument", ["top_k", "=3", "3=x", '"a"=1'])
def test_what_is_no_pair_is_refused_with_an_example(argument: str) -> None:
    with pytest.raises(ConfigError, match="expected NAME=VALUE") as caught:
        read_pairs("--sampling", [argument])
    assert "top_k=20" in caught.value.hint
