"""Pages of the site that are built and not kept: every command's options, and the Python interface.

mkdocs calls these hooks; see mkdocs.yml.
"""

from __future__ import annotations

import inspect
import os
import re
from typing import TYPE_CHECKING, Any

import click
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of the code."""
    # Defaults taken from the caller's environment must not reach the reference.
    for variable in [name for name in os.environ if name.startswith("BATCHINFER_")]:
        del os.environ[variable]
    pages = {"commands": commands(), "interface": interface()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put tables of the code in their places, and name files outside of docs/, which the site does not have.

    mkdocs takes no block for code whose first line has more than the language, and ignores headings after it.
    """
    markdown = re.sub(r"^(```\w+) \S+$", r"\1", markdown, flags=re.MULTILINE)
    markdown = re.sub(r"<!-- table: (\w+) -->", lambda found: _TABLES[found[1]](), markdown)
    outside = r"\[([^\]]+)\]\(((?:\.\./)+(?!decisions/|docs/)[\w./-]*)\)"
    return re.sub(outside, lambda found: f"{found[1]} (`{found[2].lstrip('./')}`)", markdown)


def metrics() -> str:
    """Return the table of all metrics."""
    from batchinfer.ledger.metrics import LABELS, METRICS, RUN_METRICS

    labels = {name: f" Label `{label}`." for name, label in LABELS.items()}
    found = {name: text + labels.get(name, "") for name, text in METRICS.items()}
    found |= {name: f"{text} Only of `status`." for name, text in RUN_METRICS.items()}
    rows = [f"| `{name}` | {text} |" for name, text in found.items()]
    return "\n".join(["| metric | meaning |", "|---|---|", *rows])


_TABLES = {"metrics": metrics}


def commands() -> str:
    """Return the reference of all commands, with every option."""
    from batchinfer.cli.main import group

    parts = ["# Commands\n"]
    for path, text in _helps(group, "batchinfer", None):
        parts.append(f"## {path}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def _helps(
    command: click.Command, name: str, parent: click.Context | None
) -> Iterator[tuple[str, str]]:
    from batchinfer.cli.help import SectionCommand

    context = click.Context(command, info_name=name, parent=parent, terminal_width=100)
    is_long = isinstance(command, SectionCommand)
    yield (
        context.command_path,
        command.help_of(context, "all") if is_long else command.get_help(context),
    )
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None:
                yield from _helps(found, child, context)


def interface() -> str:
    """Return the reference of the Python interface, from its signatures and docstrings."""
    import batchinfer

    parts = ["# Python interface\n"]
    for name in ("run", "make_job", "open_run", "RunHandle"):
        found = getattr(batchinfer, name)
        parts += [f"## {name}\n", _described(found, name)]
        if inspect.isclass(found):
            for method, member in inspect.getmembers(found, inspect.isfunction):
                if not method.startswith("_"):
                    parts += [f"### {name}.{method}\n", _described(member, method)]
    return "\n".join(parts)


def _described(found: Any, name: str) -> str:
    return f"```text\n{name}{inspect.signature(found)}\n\n{inspect.getdoc(found)}\n```\n"
