"""Texts on stderr for people.

No other room prints by itself, so no secret of a URL and no control character reaches a terminal.
"""

from __future__ import annotations

import click

from batchinfer.core.printable import one_entry


def say(text: str) -> None:
    """Print a text to stderr: secrets of URLs masked, control characters as escapes, lines after the first indented."""
    click.echo(one_entry(text), err=True)
