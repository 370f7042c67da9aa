"""Every command's parameters are those that were recorded: scripts, settings files and variables rely on them.

`parameters.json` changes with an option that is added or taken away, never by accident:
`python tests/cli/test_parameters.py` records it anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from batchinfer.cli.main import group

RECORDED = Path(__file__).with_name("parameters.json")
PINNED = ("name", "opts", "secondary_opts", "required", "multiple", "envvar", "is_flag")


def describe(parameter: click.Parameter) -> dict[str, Any]:
    """What callers rely on, so not the help text. Left out is what is empty or off."""
    info = parameter.to_info_dict()
    kind = {key: value for key, value in info["type"].items() if key != "name" and value}
    pinned = {key: info[key] for key in PINNED if info.get(key)}
    return {**pinned, "type": kind, "default": info["default"]}


def parameters() -> dict[str, list[dict[str, Any]]]:
    """By command, in the order in which `--show-config` shows them."""
    return {
        name: [describe(parameter) for parameter in command.params]
        for name, command in _commands(group)
    }


def _commands(parent: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(parent)
    for name in parent.list_commands(context):
        command = parent.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


@pytest.mark.parametrize("name", [name for name, _ in _commands(group)])
def test_a_commands_parameters_are_those_that_were_recorded(name: str) -> None:
    recorded = json.loads(RECORDED.read_text())[name]
    assert json.loads(json.dumps(parameters()[name], default=str)) == recorded


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e400"])
def test_no_range_of_numbers_holds_one_that_is_none_or_infinite(text: str) -> None:
    checked = []
    for name, command in _commands(group):
        for parameter in command.params:
            if isinstance(parameter.type, click.FloatRange):
                checked.append(f"{name} {parameter.name}")
                with pytest.raises(click.BadParameter):
                    parameter.type.convert(text, parameter, None)
    assert {"report price_per_hour", "worker lease_seconds", "launch hours"} <= set(checked)


if __name__ == "__main__":
    blocks = []
    for name, entries in parameters().items():
        lines = ",\n".join(json.dumps(entry, default=str) for entry in entries)
        blocks.append(f'"{name}": [\n{lines}\n]')
    RECORDED.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
