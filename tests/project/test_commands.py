"""Commands on the pages: those of README run as they stand, and every other one is a command with options that exist.

Those of docs/cookbook.md run in test_cookbook.py, and the examples in Python in tests/api/test_python_examples.py.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from batchinfer.cli.main import group

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = [
    textwrap.dedent(block)
    for block in re.findall(r"(?m)(?:^    .*\n)+", (ROOT / "README.md").read_text())
]
_ENDS = re.compile(r"[|<>&;]|2>")
"""How words begin that are no longer the command's."""


class Named(NamedTuple):
    """A command on a page: its words, and whether some are left out there."""

    page: str
    words: list[str]
    is_cut: bool


def commands(path: Path) -> Iterator[Named]:
    """Yield the commands in the blocks of a page. What a page abridges as … is left out."""
    text = re.sub(r" *\\\n[ >]*", " ", path.read_text())
    pattern = r"^```[^\n]*\n(.*?)^```|((?:^    [^\n]*\n)+)"
    blocks = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    code = "".join(fenced or indented for fenced, indented in blocks)
    lines = re.sub(r" +# .*", "", code).replace("; ", " ; ").splitlines()
    for number, line in enumerate(lines):
        if found := re.search(r"(?:^ *(?:\$ )?|&& |-- |until )batchinfer (?=[a-z])", line):
            rest = [line[found.end() :], *lines[number + 1 :]]
            # A text in quotes may go on in the next line.
            text = next(text for end in (1, 2) if is_whole(text := " ".join(rest[:end])))
            words = list(itertools.takewhile(lambda word: not _ENDS.match(word), shlex.split(text)))
            pairs = itertools.pairwise(["", *words])
            given = [word for before, word in pairs if word != "…" or before.startswith("--")]
            yield Named(path.name, given, "…" in text)


def is_whole(text: str) -> bool:
    try:
        return bool(shlex.split(text))
    except ValueError:
        return False


FOUND = [named for path in PAGES for named in commands(path)]


def context_of(named: Named) -> click.Context | None:
    """Parse a command's words as the command line does; None for one that misses what the page leaves out."""
    command, words = group, list(named.words)
    while isinstance(command, click.Group):
        child = command.get_command(click.Context(command), words[0])
        assert child is not None, named
        command, words = child, words[1:]
    while "--config" in words:  # the page's reader has written the file
        index = words.index("--config")
        del words[index : index + 2]
    try:
        return command.make_context(named.words[0], words)
    except click.MissingParameter:
        assert named.is_cut, named
        return None


def test_every_command_on_a_page_has_options_that_exist() -> None:
    assert len(FOUND) > 80
    assert {named.words[0] for named in FOUND} >= {"run", "split", "worker", "launch", "collect"}
    for named in FOUND:
        context_of(named)


@pytest.mark.vllm
def test_the_other_options_on_pages_are_vllms() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsers = FlexibleArgumentParser().add_subparsers()
    parser = ServeSubcommand().subparser_init(parsers)
    theirs = {name for action in parser._actions for name in action.option_strings}
    contexts = [context for named in FOUND if (context := context_of(named))]
    words = {word for context in contexts for word in context.params.get("server_args", ())}
    names = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert {"--max-model-len", "--quantization"} <= names
    assert names <= theirs


# --------------------------------------------------------------------------- README


@pytest.fixture
def shell(tmp_path: Path) -> Any:
    """Runs blocks of README beside the repository's scripts and model."""
    for name in ("examples", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(block: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", block], cwd=tmp_path, capture_output=True, text=True, timeout=280,
            env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def without_set_up(block: str) -> str:
    assert block.startswith("bash scripts/setup.sh")
    return block.partition("\n")[2]


@pytest.mark.vllm
def test_the_first_commands_print_what_readme_shows(shell: Any) -> None:
    shown = shell(without_set_up(README[0]))
    [printed] = re.findall(r"^cat answers.jsonl +# … (.*) …$", README[0], re.MULTILINE)
    for part in printed.split(" … "):
        assert part in shown


def test_the_commands_for_many_machines_run_and_prove_every_row(shell: Any) -> None:
    """The engine echo stands in for the model, which would take minutes for twelve thousand rows."""
    blocks = [block for block in README if "examples/demo-model --messages-column" in block]
    [work], [look] = blocks, [block for block in README if block.startswith("batchinfer status")]
    assert work.count("--model examples/demo-model") == 1
    shown = shell(work.replace("--model examples/demo-model", "--engine echo") + look)
    assert '"status":"SOUND"' in shown
    assert shown.count('"rows":12000') >= 2
