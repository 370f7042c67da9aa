"""Options as structs declare them: each has a help, and is written back as it was read. Help fits one screen."""

from typing import Any

import click
import pytest

from batchinfer.cli.help import HEIGHT, WIDTH
from batchinfer.cli.main import main
from batchinfer.cli.options import Option, options_of
from batchinfer.cli.settings import COMMANDS
from batchinfer.clusters import Plan
from batchinfer.core.shell import FromFile
from batchinfer.worker.worker_config import WorkerConfig

OPTIONS = options_of(WorkerConfig) + options_of(Plan)


def parsed(option: Option, *words: str) -> list[Any]:
    """What click makes of these words, as a list of one."""

    @click.command
    @option.decorate
    def command(**options: Any) -> list[Any]:
        return list(options.values())

    return list(command.main(words, standalone_mode=False))


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.flag)
def test_an_option_that_is_not_given_is_the_default_of_its_field(option):
    assert option.read(parsed(option)[0]) == option.default
    assert option.read(None) == option.default
    assert option.spell(option.default) == []


HARD = "it's \"so\" $HOME `x`\nsecond, 'line' \N{SNOWMAN} "
VALUES: list[tuple[str, Any]] = [
    ("limit", 3),
    ("replicas", "auto"),
    ("run_seed", None),
    ("run_seed", -7),
    ("gpus", ["0", "GPU-1"]),
    ("loras", {"a": "/x", "b": "s3://b/y"}),
    ("prompt_template", HARD),
    ("as_chat", True),
    ("system_prompt", HARD),
    ("system_prompt", f"@{HARD}"),
    ("chat_template_kwargs", {"a": [HARD]}),
    ("columns", {"image": ["a", HARD], "tools": ["3"]}),
    ("check", False),
    ("prompt_template", "alpaca"),
    ("temperature", 0.0),
    ("sampling", {"bad_words": ["a,b=c"], "min_tokens": 2}),
]


@pytest.mark.parametrize(("field", "value"), VALUES)
def test_a_value_is_spelled_as_it_is_read(field, value, tmp_path):
    option = next(option for option in OPTIONS if option.field == field)
    words: list[str] = []
    for flag, word in option.spell(value):
        words.append(flag)
        if isinstance(word, FromFile):
            (tmp_path / "file").write_text(word.text)
            words.append(f"{word.prefix}{tmp_path}/file")
        elif word is not None:
            words.append(word)
    assert option.read(parsed(option, *words)[0]) == value


def test_a_worker_has_at_most_sixty_options():
    assert len(options_of(WorkerConfig)) <= 60


@pytest.mark.parametrize("words", ["", *COMMANDS, "convert mpt-to-ft"])
def test_help_of_every_command_fits_one_screen(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main([*words.split(), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= HEIGHT
    assert [line for line in lines if len(line) > WIDTH] == []
