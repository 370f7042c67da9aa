"""What commands share: the list of commands, their common options, settings files, and --show-config."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import click

from batchinfer.cli.help import COMMON, SECTIONS, HelpOption, SectionOption
from batchinfer.cli.logs import set_format, set_level
from batchinfer.cli.options import LEFT_OUT, F, options
from batchinfer.cli.terminal import say
from batchinfer.cli.values import text_of, write_names
from batchinfer.core.errors import ConfigError, near
from batchinfer.core.option_help import NotNegative, Opt
from batchinfer.core.records import Record
from batchinfer.core.redaction import without_secrets
from batchinfer.core.yaml_text import parse_yaml

logger = logging.getLogger(__name__)


COMMANDS = {
    "run": ("pipeline.run", "Answer every row of a data set on this machine, in one command."),
    "generate": ("playground.generate", "Try prompts on a model, over a grid of sampling values."),
    "chat": ("playground.chat", "Talk with a model in the terminal."),
    "split": ("split.splitting", "Split data sets into JSONL chunks and per-worker manifests."),
    "worker": ("worker.command", "Run a model over the chunks of a job; resumes where it stopped."),
    "launch": ("pipeline.launch", "Start workers through SkyPilot, Slurm or Kubernetes."),
    "status": ("runs.status", "Show how a run goes: progress, rates, time left, errors, cost."),
    "verify": ("runs.verify", "Prove that a run is complete and sound, or say how to fix it."),
    "clean": ("runs.clean", "Remove what dead workers left under a run."),
    "stop": ("runs.stop", "Stop every worker of a run, or let it go on."),
    "report": ("runs.report", "Write a run as one HTML page, finished or not."),
    "compare": ("collect.compare", "Compare the answers of two runs over one job, row by row."),
    "collect": (
        "collect.collecting",
        "Collect verified answers: parquet, JSON Lines, CSV, the Hub.",
    ),
    "check": ("check.checking", "Find out before paying: access, prompts, memory, time and cost."),
    "convert": ("convert", "Turn a checkpoint into a model, or a model into ONNX."),
}
"""All commands by name: the module whose attribute `command` it is, and its line in `batchinfer --help`. Modules are
named, not imported, so that help answers at once."""

SERVER_SECTION = "vllm"
"""Section of settings files with options of the server that a run starts."""
FROM_FILE = "batchinfer.server_args"
"""Key of click's `Context.meta` under which the words of that section are kept."""


class Machines(Record, frozen=True, kw_only=True):
    """What machines cost, where workers do not say it."""

    is_spot: Annotated[bool | None, Opt(flag="--spot")] = None
    """Whether they are spot machines, where workers do not say. Default: no."""
    price_per_hour: NotNegative | None = None
    """Dollars an hour for one worker's machine. Default: SkyPilot's catalog if this machine has it, else list prices
    by GPU."""


price_options = options(Machines)
"""Decorator that adds --spot and --price-per-hour to a command."""


def common_options(function: F) -> F:
    """Add the options that every command has: --config, --log-format and --log-level.

    When the command runs, it also warns of environment variables that are named like an option's but set no option.
    """

    @functools.wraps(function)
    def called(*arguments: Any, **given: Any) -> Any:
        context = click.get_current_context()
        # Where a server is started, they are its options; see `server_args`.
        is_server = "server_args" in context.params
        for name, hint in () if is_server else unknown_variables(context, os.environ):
            logger.warning("%s: sets no option%s", name, hint or "; see --help")
        return function(*arguments, **given)

    shared: dict[str, Any] = {"cls": SectionOption, "section": COMMON, "is_eager": True}
    option = functools.partial(click.option, **shared, expose_value=False)
    level = option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        callback=lambda _context, _option, value: set_level(value),
        help="How much to log (to stderr).",
    )
    log_format = option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        callback=lambda _context, _option, value: set_format(value),
        help="Log lines for people, or one JSON object a line.",
    )
    config = option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        envvar="BATCHINFER_CONFIG",
        callback=_read_config,
        help="YAML file with options; flags and environment variables win over it.",
    )
    return cast("F", config(log_format(level(called))))


def unknown_variables(
    context: click.Context, environment: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Find environment variables that are named as if they set an option of this command, but set none. Pure.

    Returns:
        Name of each such variable, with a question after the most similar name that does set an option; see `near`.
    """
    prefix = context.auto_envvar_prefix
    if not prefix:
        return []
    known = set()
    for option in context.command.params:
        named = option.envvar or f"{prefix}_{option.name or ''}".upper()
        known |= {named} if isinstance(named, str) else set(named)
    # What all of the names begin with makes none of them alike.
    ends = {name.removeprefix(prefix) for name in known}
    return [
        (name, near(name, known) if near(name.removeprefix(prefix), ends) else "")
        for name in sorted(environment)
        if name.startswith(f"{prefix}_") and name not in known
    ]


def _read_config(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    if path is None or context.resilient_parsing:
        return
    settings = read_settings(path, context.command)
    context.meta[FROM_FILE] = server_settings(path)
    context.default_map = {**(context.default_map or {}), **settings}


def read_settings(path: Path, command: click.Command) -> dict[str, Any]:
    """Read a settings file for one command.

    The file's keys are names of options, spelled with - or _. They may stand in sections or outside of them. Sections
    that are named after other commands are skipped, and so are options of a run that the command does without, so that
    several commands can use the same file.

    Returns:
        Values in the form that they would have on the command line, by the names of click's parameters.

    Raises:
        ConfigError: The file cannot be read as a YAML mapping, or a key is not an option.
    """
    options = _options(command)
    left_out = getattr(command.callback, LEFT_OUT, ())
    has_sections = any(getattr(each, "section", "") in SECTIONS for each in options.values())
    values: dict[str, Any] = {}
    for key, value in _load(path).items():
        name = str(key).replace("-", "_")
        is_others = name in COMMANDS and name != command.name
        if name == SERVER_SECTION or (isinstance(value, dict) and is_others):
            continue  # for SERVER_SECTION see `server_settings`
        is_section = isinstance(value, dict) and name in SECTIONS
        if is_section and not has_sections:
            continue  # the section of a run, and this command makes none
        inside = is_section or (isinstance(value, dict) and name == command.name)
        for inner, each in value.items() if inside else [(key, value)]:
            name = str(inner).replace("-", "_")
            if is_section and name in left_out:
                continue
            if name not in options:
                shown = repr(f"{key}.{inner}" if inside else str(key))
                message = f"--config {path}: unknown key {shown}{near(name, options)}"
                raise ConfigError(message, hint="every key is the name of an option; see --help")
            if each is not None:  # else as if the file did not have the key
                values[str(options[name].name)] = _click_value(options[name], each)
    return values


def server_settings(path: Path) -> list[str]:
    """Return the words of a command line for the options of the server in a settings file's section ``vllm``.

    Raises:
        ConfigError: the file cannot be read, or the section is no mapping.
    """
    section = _load(path).get(SERVER_SECTION) or {}
    if not isinstance(section, dict):
        hint = "it holds options of `vllm serve`, as in max_model_len: 8192"
        raise ConfigError(f"--config {path}: {SERVER_SECTION} is no mapping", hint=hint)
    return [word for name, value in section.items() for word in write_option(str(name), value)]


def write_option(name: str, value: Any) -> list[str]:
    """Return the words of a command line that give an option of the server a value.

    >>> write_option("max_model_len", 8192), write_option("--enable-x", False)
    (['--max-model-len', '8192'], ['--no-enable-x'])
    """
    flag = "--" + name.lstrip("-").replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, *map(_text, value if isinstance(value, list) else [value])]


def _load(path: Path) -> dict[Any, Any]:
    """Read a settings file's mapping.

    Raises:
        ConfigError: the file cannot be read as one.
    """
    try:
        loaded = parse_yaml(text_of(path), f"--config {path}")
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not readable as YAML ({error})") from error
    loaded = {} if loaded is None else loaded
    if not isinstance(loaded, dict):
        kind = type(loaded).__name__
        hint = "one option a line, such as `max_tokens: 512`"
        raise ConfigError(f"--config {path}: a {kind}, expected options", hint=hint)
    return loaded


def _options(command: click.Command) -> dict[str, click.Option]:
    """Return a command's options by each of their names, without leading dashes and with _ in place of -."""
    return {
        spelling.lstrip("-").replace("-", "_"): each
        for each in command.params
        if isinstance(each, click.Option)
        and not isinstance(each, HelpOption)
        and each.name != "config_file"
        for spelling in (each.name or "", *each.opts)
    }


def _click_value(option: click.Option, value: Any) -> Any:
    """Convert a value from YAML to the form that it would have on the command line."""
    if option.multiple:
        if isinstance(value, dict):
            return [f"{key}={json.dumps(item)}" for key, item in value.items()]
        return [_text(item) for item in value] if isinstance(value, list) else [value]
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list):
        return write_names(list(map(_text, value)))[0]
    if isinstance(value, bool) or option.is_flag:
        return value
    return _text(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# --------------------------------------------------------------------------- --show-config

_ORIGINS = {
    "COMMANDLINE": "command line",
    "ENVIRONMENT": "environment",
    "DEFAULT_MAP": "settings file",
    "DEFAULT": "default",
}


def show_config(context: click.Context, parts: dict[str, Any]) -> dict[str, Any]:
    """Show the options that are set, on stderr. Reads no storage.

    Args:
        context: The command's context after parsing.
        parts: Structs of the configuration that were made from the options, by name.

    Returns:
        A dictionary of two entries. `options` has the values of the command's own options, and where they came from.
        `resolved` has `parts`. Secrets are replaced by "(secret)".
    """
    import msgspec

    from batchinfer.core import codec

    options: dict[str, dict[str, Any]] = {}
    for parameter in context.command.params:
        name = parameter.name
        if not name or name not in context.params:
            continue
        source = context.get_parameter_source(name)
        shown = max(parameter.opts, key=len).lstrip("-")
        value = without_secrets(context.params[name], shown)
        origin = _ORIGINS.get(source.name if source else "DEFAULT", "default")
        options[shown] = {"value": value, "from": origin}
        if origin != "default":
            say(f"{shown}: {codec.encode(value).decode()}  # {origin}")
    defaults = sum(entry["from"] == "default" for entry in options.values())
    say(f"# and {defaults} defaults")
    resolved = {name: without_secrets(msgspec.to_builtins(part)) for name, part in parts.items()}
    return {"options": options, "resolved": resolved}
