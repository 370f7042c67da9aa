"""scripts/write_cli_docs.py: the reference holds every command, lazily loaded ones too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "write_cli_docs.py"


@pytest.fixture(scope="module")
def writer():
    spec = importlib.util.spec_from_file_location("write_cli_docs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class LazyGroup(click.Group):
    def list_commands(self, context):
        return ["grow", "secret", "trees"]

    def get_command(self, context, name):
        if name == "trees":
            return click.Group(
                name, commands={"count": click.Command("count", help="Count trees.")}
            )
        option = click.Option(["--height"], default=3, help="How high.", show_default=True)
        return click.Command(name, params=[option], help=f"To {name}.", hidden=name == "secret")


def test_every_command_has_a_section_but_hidden_ones(writer):
    reference = writer.render_reference(LazyGroup("garden"), "garden")
    headings = [line for line in reference.splitlines() if line.startswith("##")]
    assert headings == [
        "## `garden`",
        "### `garden grow`",
        "### `garden trees`",
        "#### `garden trees count`",
    ]
    assert "How high.  [default: 3]" in reference


def test_reference_does_not_depend_on_the_terminal(writer, monkeypatch):
    wide = writer.render_reference(LazyGroup("garden"), "garden")
    monkeypatch.setenv("COLUMNS", "40")
    assert writer.render_reference(LazyGroup("garden"), "garden") == wide


def test_reference_has_no_trailing_blanks(writer):
    reference = writer.render_reference(LazyGroup("garden"), "garden")
    assert not [line for line in reference.splitlines() if line != line.rstrip()]
