"""Says from which settings file or environment variable the values are that an error is about."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import click
from click.core import ParameterSource

_FILE = "batchinfer.settings_file"
"""Key of the settings file's path, and of its keys by parameter, in `click.Context.meta`."""
_COMMAND = "batchinfer.command"
"""Key of the running command's context in `click.Context.meta`, which it shares with the context of the group."""


def remember_command(context: click.Context) -> None:
    """Keep the context of the running command for `origins_in`."""
    context.meta[_COMMAND] = context


def remember_file(context: click.Context, path: Path, keys: Mapping[str, str]) -> None:
    """Keep the path of the settings file that a command has read, and its keys by the parameters that they set."""
    context.meta[_FILE] = (str(path), keys)


def origin_of(error: click.ClickException) -> str:
    """Return the settings file or the environment variable that a wrong value is from; "" for a command line's."""
    if not isinstance(error, click.BadParameter) or error.ctx is None or error.param is None:
        return ""
    return _origin(error.ctx, error.param)


def origins_in(message: str) -> list[str]:
    """Say of the options that a message names which values are from the settings file or the environment.

    Returns:
        A sentence for each such option of the running command, in the order of the message.
    """
    group = click.get_current_context(silent=True)
    context = group.meta.get(_COMMAND) if group is not None else None
    if context is None:
        return []
    options = {name: each for each in context.command.params for name in each.opts}
    named = dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", message))
    origins = {name: _origin(context, options[name]) for name in named if name in options}
    return [f"{name} is from {origin}" for name, origin in origins.items() if origin]


def _origin(context: click.Context, parameter: click.Parameter) -> str:
    name = parameter.name or ""
    match context.get_parameter_source(name):
        case ParameterSource.DEFAULT_MAP:
            path, keys = context.meta[_FILE]
            return f"the settings file {path} (key {keys[name]})"
        case ParameterSource.ENVIRONMENT:
            named = parameter.envvar or ""
            names = [named] if isinstance(named, str) else named
            used = next((each for each in names if os.environ.get(each)), "")
            return f"the environment variable {used}"
    return ""
