"""The command line: lazily loaded commands, exit status, and the one JSON object on the last line of stdout."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from batchinfer import __version__
from batchinfer.cli.entry import INTERRUPTED
from batchinfer.cli.help import WIDTH, HelpOption
from batchinfer.cli.logs import configure_logging
from batchinfer.cli.settings import COMMANDS
from batchinfer.cli.terminal import say, stdout_errors
from batchinfer.core.errors import BatchinferError, ConfigError, StorageError

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH}
_RENAME = "rename it, or write it in UTF-8"


class LazyGroup(click.Group):
    """The group of all commands.

    A command's module is imported only when a command line names the command. `batchinfer --help` imports none.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """See click.Group."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """See click.Group."""
        if cmd_name not in COMMANDS:
            return None
        module = f"batchinfer.{COMMANDS[cmd_name][0]}"
        command: click.Command = importlib.import_module(module).command
        _name_variables(command, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """See click.Group."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _name_variables(command: click.Command, name: str) -> None:
    """Name the environment variables BATCHINFER_<COMMAND>_<OPTION> of options that set no variable themselves.

    By default click would derive it from the name of the Python parameter, which may differ from the option's.
    """
    for option in command.params:
        is_asked = isinstance(option, click.Option) and not isinstance(option, HelpOption)
        if is_asked and option.envvar is None:
            spelling = max(option.opts, key=len).lstrip("-")
            option.envvar = f"BATCHINFER_{name}_{spelling}".replace("-", "_").upper()


@click.command(
    cls=LazyGroup,
    commands=dict.fromkeys(COMMANDS),  # click names the nearest of a misspelt one
    context_settings={**_CONTEXT, "auto_envvar_prefix": "BATCHINFER"},
)
@click.version_option(__version__, prog_name="batchinfer")
def group() -> None:
    """Offline batch inference with vLLM over object storage, on machines that may vanish.

    Every option can also be set by environment (BATCHINFER_<COMMAND>_<OPTION>) or in a YAML file (--config).
    Logs go to stderr; the last line of stdout is one JSON object.
    """


@group.result_callback()
def print_result(result: Any) -> None:
    """Print a command's result.

    Raises:
        BatchinferError: stdout cannot take the result, because the disk is full, for example.
    """
    if result is not None:
        from batchinfer.core import codec
        from batchinfer.core.printable import printable_values

        hint = "what the command did is done; run it again to see its result"
        with stdout_errors("result", hint):
            click.echo(codec.encode(printable_values(result)).decode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status. A user's mistake gives an error message without a traceback."""
    configure_logging()
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        for word in words:
            if word.encode(errors="ignore").decode() != word:
                raise ConfigError(f"{word!r}: is not UTF-8", hint=_RENAME)
        group.main(words, "batchinfer", standalone_mode=False)
    except click.Abort:
        say("error: interrupted")
        return INTERRUPTED
    except click.ClickException as error:
        _show_click_error(error)
        return error.exit_code
    except BatchinferError as error:
        _show(error)
        return error.exit_status
    except (OSError, UnicodeEncodeError) as error:
        ours = _explained(error)
        if ours is None:
            raise
        _show(ours)
        return ours.exit_status
    return 0


def _explained(error: OSError | UnicodeEncodeError) -> BatchinferError | None:
    """Return our error for trouble that can come from any line of a command; None if it is a bug."""
    if isinstance(error, UnicodeEncodeError):
        # So Python writes bytes of paths and variables, such as those of the current folder, that are no UTF-8.
        if "\udc80" <= error.object[error.start] <= "\udcff":
            return ConfigError(f"{error.object[:300]!r}: is not UTF-8", hint=_RENAME)
        return None
    if error.errno == errno.EMFILE:
        hint = "raise the limit, as in `ulimit -n 1024`, and start the same command again"
        return StorageError("too many files and connections are open", hint=hint)
    if isinstance(error, FileNotFoundError) and error.filename is None:  # of os.getcwd
        return ConfigError(
            "the current folder is gone, expected one that relative paths count from",
            hint='`cd "$PWD"` enters one that has been made anew at its place',
        )
    return None


def _show(error: BatchinferError) -> None:
    say(f"error: {error.message}")
    if error.hint:
        for line in f"hint: {error.hint}".split("\n"):  # a command to copy may have several lines
            say(line)
    try:
        print_result(getattr(error, "result", None))
    except BatchinferError as second:
        say(f"error: {second.message}")


def _show_click_error(error: click.ClickException) -> None:
    """Show click's own error about a command line, which repeats what the user typed."""
    message, context = error.format_message(), getattr(error, "ctx", None)
    if message.startswith("Usage: "):  # the help of a group that was called without a command
        error.show()
        return
    say(f"error: {message}")
    if context is not None:
        usage = " ".join(context.get_usage().removeprefix("Usage: ").split())
        say(f"hint: {usage}; `{context.command_path} --help` shows the options")


def run(arguments: Sequence[str] | None = None) -> None:
    """Run a command line, flush stdout and stderr, and end the process. `batchinfer.cli.entry.start` calls this.

    `start` sees to a Ctrl-C that comes before or after the command; click does while it runs. The process ends
    by os._exit. Otherwise the threads of an object-store client, or an engine that did not close, could keep a paid
    machine running.
    """
    try:
        _open_closed_streams()
        status = main(arguments)
    except Exception:  # noqa: BLE001 - a bug; Python would print its traceback with the secrets of URLs
        for line in traceback.format_exc().rstrip().split("\n"):
            say(line)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk, which `print_result` has reported
            stream.flush()
    os._exit(status)


def _open_closed_streams() -> None:
    """Redirect stdout and stderr to the null device if the caller has closed them.

    Otherwise the next file that we open would get the file descriptor of the closed stream. Child processes would then
    print into that file.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
            setattr(sys, name, nowhere)
