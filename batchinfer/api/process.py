"""Runs a command as a process of its own: its options, its log, its result or its error."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from batchinfer.core import errors
from batchinfer.core.processes import describe_exit

_CHILD = (
    "from batchinfer.engines.parent_death import die_with_parent; die_with_parent({});"
    "from batchinfer.cli.entry import start; start()"
)
"""Program of a command's process, with the id of ours to fill in.

On Linux the kernel kills it when the thread that has started it ends.
"""
_ERRORS = {each.exit_status: each for each in errors.BatchinferError.__subclasses__()}
"""Class of the error that is raised, by the exit status of the command; 1 has several."""
_LAST_LINES = 5
"""Lines of its log that say what a command did before it was killed."""
_JSON_FILES = ("json_schema", "tools")
"""Options that are files with JSON, for which values are written to files."""


def call(
    name: str, arguments: Sequence[str], options: Mapping[str, Any], folder: Path, *, quiet: bool
) -> dict[str, Any]:
    """Run a command as a process, with its log on stderr, and return its result."""
    settings = folder / "options.yaml"
    settings.write_text(_as_settings(name, options, folder), encoding="utf-8")
    prefix = f"BATCHINFER_{name.upper()}_"
    variables = {key: value for key, value in os.environ.items() if not key.startswith(prefix)}
    lines: deque[str] = deque(maxlen=200)
    program = _CHILD.format(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", program, name, *arguments, "--config", str(settings)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=variables,
        # A terminal's Ctrl-C reaches it from us alone: a second signal ends its grace period.
        process_group=0,
    ) as process:
        forwarding = threading.Thread(target=_forward, args=(process, lines, quiet), daemon=True)
        forwarding.start()
        try:
            assert process.stdout is not None
            output = process.stdout.read()
        except BaseException:
            process.send_signal(signal.SIGINT)  # so that it saves finished rows and ends
            raise
        finally:
            status = _end_of(process)
            forwarding.join()
    result = json.loads(output.splitlines()[-1]) if output.strip() else {}
    if status:
        _fail(status, [line.replace(f"{folder}/", "") for line in lines], result)
    return dict(result)


def _end_of(process: subprocess.Popen[str]) -> int:
    """Wait for the end of a process, and return its status. A second interrupt goes on to it, too."""
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise


def _as_settings(command: str, options: Mapping[str, Any], folder: Path) -> str:
    """Return options as the text of a settings file; what is no option of `run` is vLLM's. Schemas and tools get files.

    Raises:
        ConfigError: A settings file cannot hold a value, or a name is nearly that of an option.
    """
    import click

    from batchinfer.cli.main import group
    from batchinfer.cli.server_args import check_name
    from batchinfer.cli.settings import SERVER_SECTION

    found = group.get_command(click.Context(group), command)
    assert found is not None
    flags = [flag for each in found.params for flag in each.opts]
    known = {flag.lstrip("-").replace("-", "_") for flag in flags}
    own: dict[str, Any] = {}
    server: dict[str, Any] = {}
    for name, value in options.items():
        try:
            plain = json.loads(json.dumps(value, default=_plain))
        except (TypeError, ValueError):
            raise errors.ConfigError(
                f"{name}: is a {type(value).__name__}, expected a number, a text, a list or a dictionary"
            ) from None
        if name in _JSON_FILES and not isinstance(plain, str):
            path = folder / f"{name}.json"
            path.write_text(json.dumps(plain), encoding="utf-8")
            plain = str(path)
        is_own = command != "run" or name in known
        if not is_own:
            check_name(f"--{name}", flags)
        (own if is_own else server)[name] = plain
    return json.dumps(own | ({SERVER_SECTION: server} if server else {}))


def _plain(value: Any) -> Any:
    if hasattr(value, "model_json_schema"):  # a class of pydantic
        return value.model_json_schema()
    if hasattr(value, "dtype") and hasattr(value, "item"):  # a number of numpy
        return value.item()
    return os.fspath(value)


def _forward(process: subprocess.Popen[str], lines: deque[str], quiet: bool) -> None:
    """Copy a process's log to our stderr, which may be a cell of a notebook, and keep its last lines.

    The error with which it ends is not copied, since it is raised.
    """
    from batchinfer.cli.terminal import say

    assert process.stderr is not None
    is_error = False
    for line in (text.rstrip("\n") for text in process.stderr):
        is_error = is_error or line.lower().startswith("error: ")
        lines.append(line)
        if not quiet and not is_error:
            say(line)


def _fail(status: int, lines: list[str], result: dict[str, Any]) -> NoReturn:
    """Raise the error that a command has printed: its last lines are the message and the hints.

    If it has printed none, the error says how the command ended, and its last lines are the hint.
    """
    kept = [line for line in lines if not (line.startswith("hint: ") and "options.yaml" in line)]
    found = re.split(r"^error: ", "\n".join(kept), flags=re.MULTILINE)
    message, _, hint = found[-1].partition("\nhint: ")
    if len(found) == 1:  # killed, or a bug
        message, hint = f"the command: {describe_exit(status)}", "\n".join(kept[-_LAST_LINES:])
    kind = errors.BatchinferError if status == 1 else _ERRORS.get(status, errors.BatchinferError)
    error = kind(message, hint=hint)
    error.attach_result(result)
    raise error
